"""Import of the CPU engine's real records as a whole: what a launch must be, its ranks and phases, and the profile."""

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from producer.resolving import probe_digest, read_campaign, resolve
from schemas.canonical import parse
from schemas.errors import REFUSED, Refusal
from schemas.observation import ProbeRecord
from schemas.profile import Profile
from schemas.request import Request

from import_profile import build_profile
from probe_checks import diagnose

ROOT = Path(__file__).parents[2]
DEMO, PARALLEL = Path("config/campaigns/cpu-demo.yaml"), Path("config/campaigns/cpu-parallel.yaml")
PROBES = Path("tests/campaigns/campaigns/cpu-probes.yaml")
CAMPAIGNS = {
    **dict.fromkeys(("dense", "sliding", "hybrid"), DEMO),
    **dict.fromkeys(("tensor", "data"), PARALLEL),
    **dict.fromkeys(("lfm2", "mla", "hybrid2"), PROBES),
}
MIB = 1 << 20
Change = Callable[[dict[str, Any]], object]


@pytest.fixture(autouse=True)
def at_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def request_of(name: str) -> Request:
    return resolve(read_campaign(CAMPAIGNS[name]), CAMPAIGNS[name])


def both_phases(name: str) -> list[dict[str, Any]]:
    """The prefill record as it was recorded, and that of a decode launch that found the same."""
    prefill = json.loads((ROOT / "tests/fixtures/probes" / f"{name}.json").read_text())
    decode = copy.deepcopy(prefill) | {"phase": "decode"}
    set_attempt(decode, "d" * 32)
    return [prefill, decode]


def set_attempt(record: dict[str, Any], attempt_id: str) -> None:
    for part in (record, *record["workers"], *record["schedulers"]):
        part["attempt_id"] = attempt_id


def imported(name: str, change: Change = lambda data: None, both: bool = False) -> tuple[list[str], Profile | None]:
    """Diagnostics of both phases' records after a change of the prefill one, or of `both`; without any, the profile."""
    request, data = request_of(name), both_phases(name)
    for record in data if both else data[:1]:
        change(record)
    records = [parse(ProbeRecord, record, name) for record in data]
    found = diagnose(request, request.deployments[name], records)
    return found, None if found else build_profile(request, request.deployments[name], records, {})


@pytest.mark.parametrize("name", CAMPAIGNS)
def test_real_records_import_complete(name: str):
    diagnostics, profile = imported(name)
    assert diagnostics == []
    assert profile is not None
    assert profile.provenance == "probe"


def test_what_the_engine_switched_off_by_itself_is_in_the_profile():
    _, profile = imported("mla")
    assert (profile.enable_prefix_caching, profile.enable_chunked_prefill) == (False, False)
    _, profile = imported("dense")
    assert (profile.enable_prefix_caching, profile.enable_chunked_prefill) == (True, True)


def test_the_weights_are_counted_before_repacking():
    _, profile = imported("dense")
    hidden, inner, head, vocabulary = 256, 768, 64, 8192
    attention = hidden * (4 + 2 + 2) * head + 4 * head * hidden + 2 * head
    layer = attention + 3 * hidden * inner + 2 * hidden
    assert profile.weights_bytes == 2 * (4 * layer + hidden + vocabulary * hidden)


def worker(index: int = 0, **fields: Any) -> Change:
    return lambda data: data["workers"][index].update(fields)


def scheduler(index: int = 0, **fields: Any) -> Change:
    return lambda data: data["schedulers"][index].update(fields)


LAYER = "model.layers.0.self_attn.attn"


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda d: d.update(probe_digest="0" * 64), "prefill: probe_digest: expected"),
        (lambda d: d["launch"].update(system="other"), "prefill: launch.system: expected 'cpu-2core', found 'other'"),
        (lambda d: d["launch"]["topology"].update(tp=True), "prefill: launch.topology.tp: expected 1, found True"),
        (lambda d: d.update(pins_sha256="0" * 64), "prefill: pins_sha256: expected"),
        (lambda d: d.update(workers=[]), "prefill: worker ranks (dp, tp, pp): expected [(0, 0, 0)], found []"),
        (lambda d: d["workers"].append(d["workers"][0]), "expected [(0, 0, 0)], found [(0, 0, 0), (0, 0, 0)]"),
        (lambda d: d.update(schedulers=[]), "prefill: scheduler ranks: expected [0], found []"),
        (worker(attempt_id="other"), "prefill: worker dp0 tp0 pp0: attempt_id: expected"),
        (scheduler(attempt_id="other"), "prefill: scheduler dp0: attempt_id: expected"),
        (worker(unresolved_fields=["cache.x"]), "prefill: worker dp0 tp0 pp0: unresolved_fields: expected none"),
        (scheduler(unresolved_fields=["x"]), "prefill: scheduler dp0: unresolved_fields: expected none"),
        (lambda d: set_attempt(d, "d" * 32), "attempt_id: expected one of each phase's launch"),
        (
            lambda d: d["workers"][0]["runtime"].update(torch_version="2.13.1"),
            "prefill: scheduler dp0: runtime: expected that of worker dp0 tp0 pp0",
        ),
        (
            lambda d: d["workers"][0]["cache"]["layer_classes"].update({LAYER: "InklingConvState"}),
            "unsupported runtime cache spec FullAttentionSpec of InklingConvState",
        ),
        (
            lambda d: d["workers"][0]["cache"]["storages"][0].update(device="cuda:0"),
            "decode: worker dp0 tp0 pp0: cache.devices[0]: expected 'cuda' of the prefill launch, found 'cpu'",
        ),
        (
            lambda d: d["workers"][0]["cache"]["tensor_allocations"][0].update(size=1),
            "prefill: worker dp0 tp0 pp0: ",
        ),
    ],
)
def test_each_doubt_is_a_diagnostic_and_no_profile(change: Change, line: str):
    diagnostics, profile = imported("dense", change)
    assert profile is None
    assert any(line in diagnostic for diagnostic in diagnostics), diagnostics


def test_phases_are_launched_alike():
    """Whatever one phase's launch says otherwise is named with both values."""

    def change(data: dict[str, Any]) -> None:
        data["workers"][0]["settings"]["attention_backends"] = ["TorchSDPABackend"]

    diagnostics, _ = imported("dense", change)
    place = "decode: worker dp0 tp0 pp0: settings.attention_backends[0]"
    assert diagnostics == [f"{place}: expected 'TorchSDPABackend' of the prefill launch, found 'CPUAttentionBackend'"]


@pytest.mark.parametrize("field", ["block_size", "hash_block_size"])
def test_a_scheduler_whose_block_is_not_the_recurrent_groups_is_a_diagnostic(field: str):
    """vllm#54076, #51113: align mode split by the wrong group's block."""
    diagnostics, profile = imported("hybrid", scheduler(**{field: 128}), both=True)
    assert profile is None
    assert any(f"{field}: expected" in line and "256" in line and "found 128" in line for line in diagnostics)


def resized(index: int, blocks: int) -> Change:
    """A rank whose memory held another number of blocks, as the engine would have laid them out."""

    def change(data: dict[str, Any]) -> None:
        cache, own = data["workers"][index]["cache"], data["schedulers"][index]
        before = cache["num_blocks"]
        startup = own["num_blocks"] / own["max_concurrency"]
        cache["num_blocks"] = own["num_blocks"] = blocks
        own.update(initial_free_blocks=blocks - 1, max_concurrency=blocks / startup)
        for storage in cache["storages"]:
            storage["size_bytes"] = storage["size_bytes"] // before * blocks
        for tensor in cache["tensor_allocations"]:
            tensor["size"] = tensor["size"] // before * blocks
            tensor["layer_stride"] = tensor["layer_stride"] // before * blocks
        for views in cache["layer_tensors"].values():
            for view in views:
                view["shape"][0] = view["shape"][0] // before * blocks
                view["storage_offset_bytes"] = view["storage_offset_bytes"] // before * blocks

    return change


def test_capacity_is_the_smallest_and_the_count_is_no_geometry():
    diagnostics, profile = imported("dense", resized(0, 512))
    assert diagnostics == []
    assert (profile.free_blocks, profile.kv_cache_bytes) == (511, 511 * 256 * 1024)


def test_ranks_size_their_caches_independently_and_the_smaller_counts():
    """vllm#46106: replicas thousands of blocks apart, all else equal."""
    diagnostics, profile = imported("data", resized(1, 351), both=True)
    assert diagnostics == []
    assert profile.free_blocks == 350


def test_ranks_with_other_blocks_are_a_diagnostic_with_both_values():
    """vllm#51752: the rank, the group and both values, where the engine's own error points elsewhere."""

    def change(data: dict[str, Any]) -> None:
        data["workers"][1]["cache"]["groups"][0]["block_size_tokens"] = 16

    diagnostics, _ = imported("data", change, both=True)
    line = "worker dp1 tp0 pp0: cache.groups[0].block_size_tokens: expected 128 of worker dp0 tp0 pp0, found 16"
    assert [each for each in diagnostics if each.endswith(line)] == [
        f"{phase}: {line}" for phase in ("prefill", "decode")
    ]


def test_shards_of_the_weights_need_not_be_equal():
    def change(data: dict[str, Any]) -> None:
        data["workers"][1]["model"]["weights_bytes"] += 2

    diagnostics, _ = imported("tensor", change, both=True)
    assert not any("of worker dp0" in line for line in diagnostics), diagnostics


def test_a_missing_rank_is_a_diagnostic():
    diagnostics, _ = imported("data", lambda data: data["workers"].pop())
    assert "prefill: worker ranks (dp, tp, pp): expected [(0, 0, 0), (1, 0, 0)], found [(0, 0, 0)]" in diagnostics


def test_a_missing_phase_is_a_diagnostic():
    request, (prefill, _) = request_of("dense"), both_phases("dense")
    found = diagnose(request, request.deployments["dense"], [parse(ProbeRecord, prefill, "dense")])
    assert found == ["phases: expected ['decode', 'prefill'], found ['prefill']"]


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["workers"][0]["cache"].update(num_blocks=0),
        lambda d: d["workers"][0]["cache"].update(groups=[]),
        scheduler(hash_block_size=0),
        scheduler(max_concurrency=float("nan")),
    ],
)
def test_a_record_that_cannot_be_is_refused_when_it_is_read(change: Change):
    data = both_phases("dense")[0]
    change(data)
    with pytest.raises(Refusal):
        parse(ProbeRecord, data, "dense")


def import_script(folder: Path, *records: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "workflow/scripts/import_profile.py", "--campaign", str(DEMO), "--deployment", "dense"]
    command += ["--output", str(folder / "dense.json"), *map(str, records)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_profile_names_its_records_and_a_later_success_takes_the_diagnostics_away(tmp_path: Path):
    files = []
    for record in both_phases("dense"):
        file = tmp_path / f"{record['phase']}.json"
        file.write_text(json.dumps(record))
        files.append(file)
    good = files[1].read_text()
    files[1].write_text(good.replace('"num_blocks": 1024', '"num_blocks": 1023', 1))
    done = import_script(tmp_path, *files)
    assert done.returncode == REFUSED
    report = json.loads((tmp_path / "dense.diagnostics.json").read_text())
    assert report["status"] == "incomplete"
    assert [f"incomplete: {line}" for line in report["diagnostics"]] == done.stderr.splitlines()
    assert not (tmp_path / "dense.json").exists()

    files[1].write_text(good)
    assert import_script(tmp_path, *files).returncode == 0
    assert not (tmp_path / "dense.diagnostics.json").exists()
    profile = json.loads((tmp_path / "dense.json").read_text())
    assert sorted(profile["probe_records_sha256"]) == ["decode.json", "prefill.json"]


@pytest.mark.parametrize("name", CAMPAIGNS)
def test_the_fixtures_are_of_the_campaigns_as_they_stand(name: str):
    request = request_of(name)
    found, expected = both_phases(name)[0]["probe_digest"], probe_digest(request, request.deployments[name])
    campaign = CAMPAIGNS[name].stem
    assert found == expected, f"cp results/{campaign}/probe/{name}-*/prefill.json tests/fixtures/probes/{name}.json"
