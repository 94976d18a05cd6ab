"""Import of the CPU engine's real records as a whole: what a launch must be, its ranks and phases, and the profile."""

import copy
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from producer.resolving import launch_of, probe_digest, read_campaign, resolve
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


def asking(request: Request, name: str, records: list[dict[str, Any]], **engine: Any) -> Request:
    """The request with other settings of the engine, and its records with the launch that it then asks for."""
    deployment = request.deployments[name]
    changed = deployment.model_copy(update={"engine": deployment.engine.model_copy(update=engine)})
    request = request.model_copy(update={"deployments": {name: changed}})
    own = {"probe_digest": probe_digest(request, changed), "launch": launch_of(request, changed)}
    for record in records:
        record.update(json.loads(json.dumps(own)))
        for each in record["workers"]:
            each["settings"] |= engine
    return request


PART_OF_MEMORY = {"kv_cache_memory_bytes": None, "gpu_memory_utilization": 0.9}
"""Settings of an engine that takes what memory it finds: how many blocks that makes depends on the machine."""


def imported(
    name: str, change: Change = lambda data: None, both: bool = False, **engine: Any
) -> tuple[list[str], Profile | None]:
    """Diagnostics of both phases' records after a change of the prefill one, or of `both`; without any, the profile."""
    request, data = request_of(name), both_phases(name)
    if engine:
        request = asking(request, name, data, **engine)
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
        (
            lambda d: set_attempt(d, "d" * 32),
            f"attempt_id: expected one of each phase's launch, found '{'d' * 32}' 2 times",
        ),
        (lambda d: set_attempt(d, ""), "prefill: attempt_id: expected 32 hexadecimal digits, found ''"),
        (lambda d: set_attempt(d, "D" * 32), "prefill: attempt_id: expected 32 hexadecimal digits, found 'DD"),
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
    diagnostics, profile = imported("dense", resized(0, 512), **PART_OF_MEMORY)
    assert diagnostics == []
    assert (profile.kv_cache_memory_bytes, profile.gpu_memory_utilization) == (None, 0.9)
    assert (profile.free_blocks, profile.kv_cache_bytes) == (511, 511 * 256 * 1024)


def test_a_pool_of_as_many_bytes_as_were_asked_for():
    diagnostics, profile = imported("dense", resized(0, 512), both=True, kv_cache_memory_bytes=128 * MIB)
    assert diagnostics == []
    assert (profile.free_blocks, profile.kv_cache_memory_bytes) == (511, 128 * MIB)


@pytest.mark.parametrize("blocks", [60_000, 1025, 1023, 33])
def test_a_pool_of_other_bytes_than_were_asked_for(blocks: int):
    """256 MiB are 1,024 blocks of 256 KiB, however well the records of another pool fit together."""
    diagnostics, _ = imported("dense", resized(0, blocks), both=True)
    of = "268435456 bytes in blocks of 262144, worker dp0 tp0 pp0"
    line = f"scheduler dp0: num_blocks: expected 1024 ({of}), found {blocks}"
    assert diagnostics == [f"prefill: {line}", f"decode: {line}"]


def test_a_part_of_the_memory_is_no_more_than_that():
    blocks = 10**6  # 244 GiB

    def change(data: dict[str, Any]) -> None:
        resized(0, blocks)(data)
        data["workers"][0]["hardware"]["total_memory_bytes"] = 280_000_000_000

    diagnostics, _ = imported("dense", change, both=True, **PART_OF_MEMORY)
    wanted = "at most 252000000000 (0.9 of 280000000000 bytes)"
    line = f"worker dp0 tp0 pp0: cache.storages (bytes): expected {wanted}, found {blocks * 262_144}"
    assert diagnostics == [f"prefill: {line}", f"decode: {line}"]


def test_a_pool_in_which_the_longest_request_does_not_fit():
    """The engine does not start with it: 32 blocks of 128 tokens beside the null block hold 4,096 tokens."""
    assert imported("dense", resized(0, 33), both=True, **PART_OF_MEMORY)[0] == []
    diagnostics, _ = imported("dense", resized(0, 32), both=True, **PART_OF_MEMORY)
    line = "scheduler dp0: initial_free_blocks: expected at least the 32 of a request of 4096 tokens, found 31"
    assert diagnostics == [f"prefill: {line}", f"decode: {line}"]


def test_what_no_profile_can_hold_is_refused_in_a_line():
    request, data = request_of("dense"), both_phases("dense")
    data[0]["schedulers"][0]["initial_free_blocks"] = 0
    records = [parse(ProbeRecord, record, "dense") for record in data]
    with pytest.raises(Refusal, match=r"^free_blocks: expected greater than or equal to 1, found 0: probe records$"):
        build_profile(request, request.deployments["dense"], records, {})
    data[0]["workers"][0]["cache"]["groups"][0]["layer_specs"][LAYER]["spec_type"] = "RSWASpec"
    records = [parse(ProbeRecord, record, "dense") for record in data]
    with pytest.raises(Refusal, match=r"^cache\.groups: .*unsupported runtime cache spec RSWASpec, which .*: probe"):
        build_profile(request, request.deployments["dense"], records, {})


def test_ranks_size_their_caches_independently_and_the_smaller_counts():
    """vllm#46106: replicas thousands of blocks apart, all else equal."""
    diagnostics, profile = imported("data", resized(1, 351), both=True, **PART_OF_MEMORY)
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


def test_each_rank_is_named_that_has_the_same_doubt():
    def change(data: dict[str, Any]) -> None:
        for own in data["workers"]:
            own["settings"]["moe_backend"] = "triton"

    diagnostics, _ = imported("tensor", change, both=True)
    line = "settings.moe_backend: expected auto, found triton"
    ranks = ("worker dp0 tp0 pp0", "worker dp0 tp1 pp0")
    assert diagnostics == [f"{phase}: {rank}: {line}" for phase in ("prefill", "decode") for rank in ranks]


def test_schedulers_of_other_engines_are_a_diagnostic():
    """Of one launch, and of the other phase's."""

    def change(data: dict[str, Any]) -> None:
        data["schedulers"][1]["runtime"]["torch_version"] = "2.13.1"

    torch = both_phases("data")[0]["schedulers"][0]["runtime"]["torch_version"]
    expected = f"scheduler dp1: runtime.torch_version: expected '{torch}' of scheduler dp0, found '2.13.1'"
    diagnostics, _ = imported("data", change, both=True)
    assert diagnostics == [f"prefill: {expected}", f"decode: {expected}"]
    diagnostics, _ = imported("data", change)
    other = f"decode: scheduler dp1: runtime.torch_version: expected '2.13.1' of the prefill launch, found '{torch}'"
    assert diagnostics == [f"prefill: {expected}", other]


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
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


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


def test_the_attempt_that_stands_twice_is_the_one_that_is_named():
    request, data = request_of("dense"), both_phases("dense")
    first, second, third = (copy.deepcopy(record) for record in (*data, data[1]))
    records = [parse(ProbeRecord, record, "dense") for record in (first, second, third)]
    found = diagnose(request, request.deployments["dense"], records)
    twice = [line for line in found if "expected one of each phase's launch" in line]
    assert twice == [f"attempt_id: expected one of each phase's launch, found '{'d' * 32}' 2 times"]


def test_the_bytes_that_are_diagnosed_are_those_of_the_digest(tmp_path: Path):
    """What comes out of a pipe is there to be read once."""
    written = {}
    for record in both_phases("dense"):
        file = tmp_path / f"{record['phase']}.json"
        written[file] = json.dumps(record).encode()
        os.mkfifo(file)
        threading.Thread(target=file.write_bytes, args=(written[file],), daemon=True).start()
    done = import_script(tmp_path, *written)
    assert (done.returncode, done.stderr) == (0, "")
    digests = {file.name: hashlib.sha256(data).hexdigest() for file, data in written.items()}
    assert json.loads((tmp_path / "dense.json").read_text())["probe_records_sha256"] == digests


def test_two_records_of_one_name_are_refused(tmp_path: Path):
    files = []
    for record in both_phases("dense"):
        file = tmp_path / record["phase"] / "record.json"
        file.parent.mkdir()
        file.write_text(json.dumps(record))
        files.append(file)
    done = import_script(tmp_path, *files)
    assert done.returncode == REFUSED
    assert done.stderr == f"refused: probe records: expected files of different names, found 2 of one: {files[0]}\n"
    assert not (tmp_path / "dense.json").exists()


@pytest.mark.parametrize("name", CAMPAIGNS)
def test_the_fixtures_are_of_the_campaigns_as_they_stand(name: str):
    request = request_of(name)
    found, expected = both_phases(name)[0]["probe_digest"], probe_digest(request, request.deployments[name])
    campaign = CAMPAIGNS[name].stem
    assert found == expected, f"cp results/{campaign}/probe/{name}-*/prefill.json tests/fixtures/probes/{name}.json"
