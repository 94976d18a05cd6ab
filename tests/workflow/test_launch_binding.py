"""Measured launches are bound to the accepted probe: what real processes say, and each way in which they say otherwise.

The records are those of real engines (tests/fixtures/probes); a cell's session holds the same.
"""

import copy
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import glm_records
import msgspec
import pytest
from cells import frozen_cell
from conftest import ROOT
from goldens import with_own_campaigns
from tampering import accepted_of, rewrite_line

from producer.graph import CampaignGraph
from producer.journal import Journal
from producer.resolving import read_declared
from schemas.canonical import canonical_bytes, digest, parse, read_json, sha256, write_model
from schemas.errors import Refusal
from schemas.journal import RankSession, SessionLine
from schemas.observation import ProbeRecord, WorkerRecord
from schemas.plan import FrozenCell
from schemas.profile import Profile

from cache_groups import profile_groups
from launch_binding import MAY_DIFFER, Accepted, binding_findings, profile_findings, read_accepted
from spec_pages import pool_page_bytes
from verify_cell import read_cell

PROBES = ROOT / "tests" / "fixtures" / "probes"
RECORDED = sorted(file.stem for file in PROBES.glob("*.json"))

Change = Callable[[dict[str, Any]], Any]


def recorded(name: str) -> dict[str, Any]:
    """The record of a real launch, as plain values without nulls."""
    record: dict[str, Any] = read_json(PROBES / f"{name}.json", "probe record")
    return record


def sized_by_memory(record: dict[str, Any]) -> dict[str, Any]:
    """A launch that took what memory it found: with bytes that were asked for there is one size of the pool alone."""
    again = copy.deepcopy(record)
    for own in again["workers"]:
        own["settings"].pop("kv_cache_memory_bytes")
    return again


def relaunched(record: dict[str, Any], attempt: str) -> dict[str, Any]:
    """The same launch once more."""
    again = copy.deepcopy(record)
    for process in (again, *again["workers"], *again["schedulers"]):
        process["attempt_id"] = attempt
    return again


def session_of(record: dict[str, Any], number: int = 1) -> SessionLine:
    """A session whose processes say what those of a probe said."""
    ranks = []
    for scheduler in record["schedulers"]:
        rank = scheduler["dp_rank"]
        ranks.append(
            RankSession(
                dp_rank=rank,
                device_name="cpu",
                engine_start_seconds=1.0,
                engine={},
                limits={"num_gpu_blocks": scheduler["num_blocks"]},
                cudagraph={},
                capacity={"usable_blocks_without_watermark": scheduler["initial_free_blocks"]},
                runtime={
                    "workers": [worker for worker in record["workers"] if worker["dp_rank"] == rank],
                    "scheduler": scheduler,
                },
            )
        )
    return SessionLine("", "", number, "", "", {}, ranks)


def profile_of(record: dict[str, Any], **change: Any) -> Profile:
    """The profile of a launch, as far as launches are bound to it."""
    probe = parse(ProbeRecord, record, "record")
    scheduler, worker = probe.schedulers[0], probe.workers[0]
    page = pool_page_bytes(worker.cache)
    fields = {
        "architecture": worker.model.architectures[0],
        "model_config_sha256": worker.model.config_sha256,
        "model_revision": "r1",
        "runtime_backend_version": worker.runtime.version,
        "probe_digest": "b" * 64,
        "probe_records_sha256": {"prefill.json": sha256(canonical_bytes(record))},
        "groups": profile_groups(worker.runtime.version, worker.cache, page),
        "free_blocks": scheduler.initial_free_blocks,
        "kv_cache_bytes": scheduler.initial_free_blocks * page,
        "block_size": scheduler.block_size,
        "hash_block_size": scheduler.hash_block_size,
        "cache_hit_alignment_tokens": scheduler.cache_hit_alignment_tokens,
        "enable_prefix_caching": scheduler.enable_prefix_caching,
        "mamba_cache_mode": scheduler.mamba_cache_mode,
        "max_num_tokens": scheduler.max_num_scheduled_tokens,
        "max_batch_size": scheduler.max_num_running_reqs,
        "max_model_len": scheduler.max_model_len,
        "device_name": worker.hardware.device_name,
    }
    return Profile(**fields | change)


def cell_of(record: dict[str, Any], probe_digest: str = "b" * 64) -> FrozenCell:
    workers = [worker for worker in record["workers"] if worker["dp_rank"] == 0]
    topology = {"tp": len(workers), "dp": len(record["schedulers"])}
    return frozen_cell(topology=topology, phase=record["phase"], probe_digest=probe_digest)


def accepted(record: dict[str, Any], **change: Any) -> Accepted:
    data = canonical_bytes(record)
    return Accepted(profile_of(record, **change), parse(ProbeRecord, record, "record"), "prefill.json", sha256(data))


def findings(record: dict[str, Any], *launches: dict[str, Any], **change: Any) -> list[str]:
    """What stands against these launches of a cell, when `record` was accepted."""
    sessions = tuple(session_of(launch, number) for number, launch in enumerate(launches, start=1))
    return list(binding_findings(cell_of(record), accepted(record, **change), Journal(sessions)))


def worker(change: Change, index: int = -1) -> Change:
    return lambda record: change(record["workers"][index])


def scheduler(change: Change) -> Change:
    return lambda record: change(record["schedulers"][-1])


@pytest.mark.parametrize("name", RECORDED)
def test_the_same_launch_again_is_bound(name: str):
    record = recorded(name)
    assert findings(record, relaunched(record, "one"), relaunched(record, "two")) == []


OWN = recorded("tensor")["workers"][1]
DIFFERENT: list[tuple[Change, str]] = [
    (
        worker(lambda own: own["settings"].update(cache_dtype="fp8")),
        "worker dp0 tp1 pp0: settings.cache_dtype: expected 'auto' of the accepted probe, found 'fp8'",
    ),
    (
        worker(lambda own: own["settings"].update(async_scheduling=True)),
        "worker dp0 tp1 pp0: settings.async_scheduling: expected False of the accepted probe, found True",
    ),
    (
        worker(lambda own: own["settings"].pop("kv_cache_memory_bytes")),
        "worker dp0 tp1 pp0: settings.kv_cache_memory_bytes: expected 67108864 of the accepted probe, found nothing",
    ),
    (
        worker(lambda own: own["settings"]["attention_backends"].append("Other")),
        "worker dp0 tp1 pp0: number of settings.attention_backends: expected 1 of the accepted probe, found 2",
    ),
    (
        worker(lambda own: own["settings"]["compilation"].update(cudagraph_mode="FULL")),
        "worker dp0 tp1 pp0: settings.compilation.cudagraph_mode: expected 'NONE' of the accepted probe, found 'FULL'",
    ),
    (
        worker(lambda own: own["runtime"].update(torch_version="2.0")),
        f"worker dp0 tp1 pp0: runtime.torch_version: expected {OWN['runtime']['torch_version']!r} of the accepted "
        "probe, found '2.0'",
    ),
    (
        worker(lambda own: own["hardware"].update(device_type="cuda")),
        "worker dp0 tp1 pp0: hardware.device_type: expected 'cpu' of the accepted probe, found 'cuda'",
    ),
    (
        worker(lambda own: own["model"].update(weights_bytes=1)),
        f"worker dp0 tp1 pp0: model.weights_bytes: expected {OWN['model']['weights_bytes']} of the accepted probe, "
        "found 1",
    ),
    (
        worker(lambda own: own["cache"].update(kernel_block_size_tokens=[64])),
        "worker dp0 tp1 pp0: cache.kernel_block_size_tokens[0]: expected 128 of the accepted probe, found 64",
    ),
    (
        worker(lambda own: own["cache"]["groups"][0].update(startup_blocks_per_request=1)),
        "worker dp0 tp1 pp0: cache.groups[0].startup_blocks_per_request: expected 16 of the accepted probe, found 1",
    ),
    (
        scheduler(lambda own: own.update(hash_block_size=64)),
        "scheduler dp0: hash_block_size: expected 128 of the accepted probe, found 64",
    ),
    (
        scheduler(lambda own: own["launch"].update({"scheduler_config.policy": "priority"})),
        "scheduler dp0: launch.scheduler_config.policy: expected 'fcfs' of the accepted probe, found 'priority'",
    ),
    (
        scheduler(lambda own: own.update(permanent_reserved_block_ids=[0, 1])),
        "scheduler dp0: number of permanent_reserved_block_ids: expected 1 of the accepted probe, found 2",
    ),
]


@pytest.mark.parametrize(("change", "line"), DIFFERENT, ids=[line.split(": expected")[0] for _, line in DIFFERENT])
def test_what_a_launch_has_otherwise_is_named_with_its_process_and_both_values(change: Change, line: str):
    record = recorded("tensor")
    second = relaunched(record, "two")
    change(second)
    assert f"session 2 {line}" in findings(record, relaunched(record, "one"), second)


def test_a_block_stride_and_a_view_of_another_shape_are_another_geometry():
    record, other = recorded("tensor"), relaunched(recorded("tensor"), "one")
    cache = other["workers"][0]["cache"]
    layer = cache["groups"][0]["layer_names"][0]
    cache["tensor_allocations"][0]["block_stride"] *= 2
    cache["layer_tensors"][layer][0]["shape"][2] = 64
    found = findings(record, other)
    where, stride = "session 1 worker dp0 tp0 pp0: cache.", 32768
    assert (
        f"{where}tensor_allocations[0].block_stride: expected {stride} of the accepted probe, found {2 * stride}"
        in found
    )
    assert f"{where}layer_tensors.{layer}[0].shape[1]: expected 128 of the accepted probe, found 64" in found


def test_a_setting_that_the_engine_does_not_have_is_not_one_that_nobody_asked_for():
    record, other = recorded("dense"), relaunched(recorded("dense"), "one")
    assert other["schedulers"][0]["launch"].pop("num_hash_lookahead_tokens") == "absent"
    field = "launch.num_hash_lookahead_tokens: expected 'absent' of the accepted probe, found nothing"
    assert findings(record, other) == [f"session 1 scheduler dp0: {field}"]


def test_settings_of_recurrent_state_are_compared():
    record, other = recorded("hybrid"), relaunched(recorded("hybrid"), "one")
    for spec in other["workers"][0]["cache"]["groups"][1]["layer_specs"].values():
        spec["num_prefill_checkpoint_blocks"] = 1
    (layer,) = other["workers"][0]["cache"]["groups"][1]["layer_specs"]
    field = f"cache.groups[1].layer_specs.{layer}.num_prefill_checkpoint_blocks"
    line = f"session 1 worker dp0 tp0 pp0: {field}: expected 0 of the accepted probe, found 1"
    assert line in findings(record, other)


def resized(record: dict[str, Any], blocks: int) -> dict[str, Any]:
    """The same launch with another pool, whose layers lie one after another (layer-outermost layouts)."""
    again = relaunched(record, "resized")
    for own in again["workers"]:
        cache, before = own["cache"], own["cache"]["num_blocks"]
        starts: dict[str, int] = {}
        for tensor in cache["tensor_allocations"]:
            tensor["layer_stride"] = tensor["layer_stride"] // before * blocks
            tensor["offset"] = tensor["offset"] // before * blocks
            tensor["size"] = tensor["size"] // before * blocks
            places = enumerate(tensor["layers"])
            starts |= {layer: tensor["offset"] + at * tensor["layer_stride"] for at, layer in places}
        for layer, views in cache["layer_tensors"].items():
            first = views[0]["storage_offset_bytes"]
            for view in views:
                view["storage_offset_bytes"] += starts[layer] - first
                view["shape"][0] = view["shape"][0] // before * blocks
        for storage in cache["storages"]:
            storage["size_bytes"] = storage["size_bytes"] // before * blocks
        cache["num_blocks"] = blocks
    for own in again["schedulers"]:
        own["max_concurrency"] = blocks / sum(group["startup_blocks_per_request"] for group in own["groups"])
        own["initial_free_blocks"] += blocks - own["num_blocks"]
        own["num_blocks"] = blocks
    return again


@pytest.mark.parametrize("name", ["dense", "sliding", "hybrid", "tensor", "data"])
def test_more_blocks_are_as_good_and_fewer_are_not(name: str):
    record = sized_by_memory(recorded(name))
    blocks = record["schedulers"][0]["num_blocks"]
    assert findings(record, resized(record, 2 * blocks)) == []
    assert findings(record, resized(record, blocks + 1)) == []
    found = findings(record, resized(record, blocks - 1))
    free = blocks - 1
    expected = []
    for own in record["schedulers"]:
        at = f"session 1 scheduler dp{own['dp_rank']}: initial_free_blocks: "
        expected.append(f"{at}expected at least {free} of the accepted profile, found {free - 1}")
        for each in record["workers"]:
            if each["dp_rank"] == own["dp_rank"]:
                at = f"session 1 worker dp{each['dp_rank']} tp{each['tp_rank']} pp0: cache.num_blocks: "
                wanted = f"more than the {free} free blocks of the accepted profile"
                expected.append(f"{at}expected {wanted}, found {free}")
    assert found == expected


def test_fewer_blocks_than_the_probe_of_this_phase_suffice_when_the_profile_has_them():
    """The accepted capacity is the smallest over ranks and phases."""
    record = sized_by_memory(recorded("dense"))
    page = pool_page_bytes(parse(ProbeRecord, record, "record").workers[0].cache)
    assert findings(record, resized(record, 1000), free_blocks=999, kv_cache_bytes=999 * page) == []


@pytest.mark.parametrize("name", ["tensor", "hybrid2"])
def test_in_what_order_processes_stand_says_nothing(name: str):
    record, other = recorded(name), relaunched(recorded(name), "one")
    other["workers"].reverse()
    assert findings(record, other) == []


def test_what_may_differ_does_and_has_its_reason():
    record, other = recorded("dense"), relaunched(recorded("dense"), "one")
    other["workers"][0]["model"]["model"] = "elsewhere"
    other["workers"][0]["hardware"] |= {"total_memory_bytes": 1, "threads": 9}
    assert findings(record, other) == []
    assert set(MAY_DIFFER) == {"model.model", "hardware.threads"}
    assert all(MAY_DIFFER.values())


def test_every_rank_is_there_once():
    record = recorded("tensor")
    missing, twice, other = (relaunched(record, attempt) for attempt in ("one", "two", "three"))
    missing["workers"].pop()
    twice["workers"].append(twice["workers"][1])
    other["workers"][1]["tp_rank"] = 2
    ranks = "rank 0: worker ranks (dp, tp, pp): expected [(0, 0, 0), (0, 1, 0)], found "
    assert findings(record, missing, twice, other) == [
        f"session 1 {ranks}[(0, 0, 0)]",
        f"session 2 {ranks}[(0, 0, 0), (0, 1, 0), (0, 1, 0)]",
        f"session 3 {ranks}[(0, 0, 0), (0, 2, 0)]",
        "session 3 worker dp0 tp2 pp0: expected a process of the accepted probe, found another",
    ]


def test_a_rank_of_another_data_parallel_engine_is_found():
    record, other = recorded("data"), relaunched(recorded("data"), "one")
    line = session_of(other)
    first, second = line.ranks
    swapped = SessionLine("", "", 1, "", "", {}, [first, first])
    found = list(binding_findings(cell_of(record), accepted(record), Journal((swapped,))))
    assert "session 1 rank 1: worker ranks (dp, tp, pp): expected [(1, 0, 0)], found [(0, 0, 0)]" in found
    assert "session 1 scheduler dp0: dp_rank: expected 1 of its session, found 0" in found
    assert second.runtime["scheduler"]["dp_rank"] == 1


def test_records_are_of_one_attempt_that_is_the_launchs_own():
    record = recorded("tensor")
    mixed, copied, again = relaunched(record, "one"), copy.deepcopy(record), relaunched(record, "one")
    mixed["schedulers"][0]["attempt_id"] = "other"
    assert findings(record, mixed, copied, again) == [
        "session 1 attempt_id: expected one of all processes, found one, other",
        f"session 2 attempt_id: expected one of its own, found {record['attempt_id']} of the accepted probe",
        "session 3 attempt_id: expected one of its own, found one of session 1",
    ]


def test_pinned_sources_are_the_adapters_even_where_the_probe_agrees():
    record = recorded("dense")
    name = "vllm/v1/core/sched/scheduler.py"
    pinned = record["workers"][0]["runtime"]["source_files"][name]
    for own in (*record["workers"], *record["schedulers"]):
        own["runtime"]["source_files"][name] = "0" * 64
    pin = f"runtime.source_files.{name}: expected {pinned}, found {'0' * 64}"
    assert findings(record, relaunched(record, "one")) == [
        f"session 1 worker dp0 tp0 pp0: {pin}",
        f"session 1 scheduler dp0: {pin}",
    ]


def test_what_an_observer_left_open_is_no_evidence():
    record = recorded("dense")
    record["workers"][0]["unresolved_fields"] = ["cache.groups"]
    line = "session 1 worker dp0 tp0 pp0: unresolved_fields: expected none, found cache.groups"
    assert findings(record, relaunched(record, "one")) == [line]


def test_a_cache_that_cannot_be_is_found_even_where_the_probe_agrees():
    """Two layers that own the same bytes, in both launches."""
    record = recorded("dense")
    record["workers"][0]["cache"]["tensor_allocations"][0]["layer_stride"] = 65536
    assert any("session 1 worker dp0 tp0 pp0: " in line for line in findings(record, relaunched(record, "one")))


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda own: own.clear(), "runtime.workers: expected a value, found nothing"),
        (lambda own: own.update(workers=[], surprise=1), "runtime.surprise: expected no such key, found 1"),
        (
            lambda own: own["workers"][0].pop("cache"),
            "runtime.workers.0.cache: expected a value, found nothing",
        ),
        (
            lambda own: own["scheduler"].update(num_blocks=1024.0),
            "runtime.scheduler.num_blocks: expected a valid integer, found 1024.0",
        ),
        (
            lambda own: own["scheduler"].update(num_blocks=2**53 + 1),
            f"runtime.scheduler.num_blocks: expected less than or equal to {2**53}, found {2**53 + 1}",
        ),
    ],
    ids=["none", "unknown", "torn", "float", "too large"],
)
def test_records_that_are_none_are_a_finding_by_field(change: Change, line: str):
    record = recorded("dense")
    session = session_of(relaunched(record, "one"))
    change(session.ranks[0].runtime)
    found = list(binding_findings(cell_of(record), accepted(record), Journal((session,))))
    assert found == [f"session 1 rank 0: {line}"]


def test_the_sessions_own_blocks_are_those_of_its_records():
    record = recorded("dense")
    session = session_of(relaunched(record, "one"))
    session.ranks[0].limits["num_gpu_blocks"] = 5000
    session.ranks[0].capacity["usable_blocks_without_watermark"] = 4999
    found = list(binding_findings(cell_of(record), accepted(record), Journal((session,))))
    blocks = record["schedulers"][0]["num_blocks"]
    assert found == [
        f"session 1 scheduler dp0: num_blocks: expected 5000 of its session, found {blocks}",
        f"session 1 scheduler dp0: initial_free_blocks: expected 4999 of its session, found {blocks - 1}",
    ]


# What was accepted


def test_the_record_is_the_one_that_the_profile_names():
    record = recorded("dense")
    other = Accepted(
        profile_of(record, probe_records_sha256={"prefill.json": "0" * 64, "decode.json": "1" * 64}),
        *accepted(record)[1:],
    )
    found = list(binding_findings(cell_of(record), other, Journal((session_of(relaunched(record, "one")),))))
    sha = sha256(canonical_bytes(record))
    assert found == [f"sha256 of the probe's prefill.json: expected {'0' * 64} of the accepted profile, found {sha}"]


def test_the_profile_and_the_record_are_of_the_cells_launch_and_phase():
    record = recorded("dense")
    cell = frozen_cell(phase="decode", probe_digest="c" * 64)
    found = list(binding_findings(cell, accepted(record), Journal((session_of(relaunched(record, "one")),))))
    assert found == [
        f"accepted profile: expected that of probe {'c' * 64}, found that of {'b' * 64}",
        "phase of the probe's prefill.json: expected decode, found prefill",
    ]


def test_files_of_what_was_accepted_are_read_together(tmp_path: Path):
    record = recorded("dense")
    imported, declared, file = (tmp_path / name for name in ("imported.json", "declared.json", "prefill.json"))
    write_model(imported, profile_of(record))
    write_model(declared, profile_of(record, probe_digest=None, probe_records_sha256={}))
    file.write_bytes(canonical_bytes(record))
    assert read_accepted([imported, file], "cell") == accepted(record)
    assert read_accepted([declared], "cell").record is None
    for files, refusal in (
        ([], "accepted profile: expected that of cell, found none: command line"),
        ([imported], f"accepted profile: expected one probe record with it, found []: {imported}"),
        (
            [declared, file],
            f"accepted profile: expected no probe record beside a declared one, found ['prefill.json']: {declared}",
        ),
        ([imported, tmp_path / "gone.json"], "probe record: expected a readable file, found No such file or directory"),
    ):
        with pytest.raises(Refusal) as refused:
            read_accepted(files, "cell")
        assert str(refused.value).startswith(refusal)


@pytest.mark.parametrize(
    ("campaign", "cell", "expected"),
    [
        ("glm-5.3-flash-gb300-tp4", "decode-tp4-0123456789abcdef", ["config/profiles/glm-5.3-flash-gb300-tp4.json"]),
        ("cpu-demo", "decode-dense-0123456789abcdef", ["profile/dense-{}.json", "probe/dense-{}/decode.json"]),
        ("cpu-demo", "prefill-hybrid-0123456789abcdef", ["profile/hybrid-{}.json", "probe/hybrid-{}/prefill.json"]),
    ],
)
def test_the_graph_names_what_a_cell_is_bound_to(
    monkeypatch: pytest.MonkeyPatch, campaign: str, cell: str, expected: list[str]
):
    monkeypatch.chdir(ROOT)
    graph = CampaignGraph(campaign)
    short = graph.deployment(cell.split("-")[1]).profile_digest[:16]
    found = [file.removeprefix(f"results/{campaign}/") for file in graph.accepted_files(cell)]
    assert found == [name.format(short) for name in expected]


def test_an_imported_cell_is_bound_to_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(with_own_campaigns(tmp_path).root)
    assert CampaignGraph("cpu-dynamo").accepted_files("decode-dense-0123456789abcdef") == []


# A declared profile

DECLARED = ROOT / "config" / "profiles" / "glm-5.3-flash-gb300-tp4.json"


def glm_launch(attempt: str) -> dict[str, Any]:
    """The records of GLM-5.3-Flash at TP 4, as one launch."""
    processes = {"workers": [glm_records.worker(rank) for rank in range(4)], "schedulers": [glm_records.scheduler()]}
    record = json.loads(json.dumps({"attempt_id": "", "phase": "decode", **processes}))
    return relaunched(record, attempt)


def declared_findings(*launches: dict[str, Any]) -> list[str]:
    profile = read_declared(DECLARED)
    cell = frozen_cell(
        probe_digest=digest(profile),
        phase="decode",
        runtime_backend_version="0.33.0",
        parallel_strategy="pure_tp",
        topology={"tp": 4, "moe_tp": 4},
        precision={"gemm": "fp8_block", "moe": "fp8_block", "fmha": "fp8", "kv_cache": "fp8"},
        limits={"max_num_tokens": 8192, "max_batch_size": 32, "max_model_len": 1_048_576},
        engine={"gpu_memory_utilization": 0.9, "mamba_cache_mode": "align"},
        environment={"OMP_NUM_THREADS": "1"},
    )
    sessions = tuple(
        msgspec.structs.replace(
            session_of(launch, number),
            ranks=[msgspec.structs.replace(rank, device_name="NVIDIA GB300") for rank in session_of(launch).ranks],
        )
        for number, launch in enumerate(launches, start=1)
    )
    return list(binding_findings(cell, Accepted(profile), Journal(sessions)))


def test_a_launch_is_what_a_declared_profile_says():
    assert declared_findings(glm_launch("one"), glm_launch("two")) == []


def in_group(index: int, **change: Any) -> Change:
    """The specs of all layers of one group of the first worker, changed."""

    def changed(own: dict[str, Any]) -> None:
        for spec in own["cache"]["groups"][index]["layer_specs"].values():
            spec.update(change)

    return worker(changed, 0)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            worker(lambda own: own["hardware"].update(device_name="NVIDIA H200"), 0),
            "worker dp0 tp0 pp0: hardware.device_name: expected 'NVIDIA GB300' of the accepted profile, "
            "found 'NVIDIA H200'",
        ),
        (
            worker(lambda own: own["model"].update(config_sha256="0" * 64), 0),
            "worker dp0 tp0 pp0: model.config_sha256: expected "
            f"'{read_declared(DECLARED).model_config_sha256}' of the accepted profile, found '{'0' * 64}'",
        ),
        (
            worker(lambda own: own["settings"].update(max_num_seqs=64), 3),
            "worker dp0 tp3 pp0: settings.max_num_seqs: expected 32 of the accepted profile, found 64",
        ),
        (
            scheduler(lambda own: own.update(mamba_cache_mode="none")),
            "scheduler dp0: mamba_cache_mode: expected 'align' of the accepted profile, found 'none'",
        ),
        (
            scheduler(lambda own: own.update(hash_block_size=4)),
            "scheduler dp0: hash_block_size: expected 2176 of the accepted profile, found 4",
        ),
        (
            scheduler(lambda own: own.update(max_model_len=4096)),
            "scheduler dp0: max_model_len: expected 1048576 of the accepted profile, found 4096",
        ),
        (
            in_group(0, prefill_checkpoint_alignment=32),
            "worker dp0 tp0 pp0: cache.groups[0].prefill_checkpoint_alignment: expected 16 of the accepted profile, "
            "found 32",
        ),
        (
            in_group(2, num_prefill_checkpoint_blocks=0),
            "worker dp0 tp0 pp0: cache.groups[2].prefill_checkpoint_blocks: expected 1 of the accepted profile, "
            "found None",
        ),
        (
            worker(lambda own: own["cache"]["groups"][5].update(block_size_tokens=8), 1),
            "worker dp0 tp1 pp0: cache.groups[5].block_size_tokens: expected 4 of the accepted profile, found 8",
        ),
        (
            worker(lambda own: own["cache"]["groups"][3]["layer_names"].pop(), 2),
            "worker dp0 tp2 pp0: cache.groups[3].num_layers: expected 8 of the accepted profile, found 7",
        ),
        (
            worker(lambda own: own["cache"]["groups"].pop(), 0),
            "worker dp0 tp0 pp0: number of cache.groups: expected 6 of the accepted profile, found 5",
        ),
        (
            worker(lambda own: own["cache"]["storages"][0].update(size_bytes=13_697 * 65536), 0),
            "worker dp0 tp0 pp0: cache.groups[0].page_size_bytes: expected 13516800 of the accepted profile, "
            "found 65536",
        ),
        (
            scheduler(lambda own: own.update(num_blocks=13_000, initial_free_blocks=12_999)),
            "scheduler dp0: initial_free_blocks: expected at least 13696 of the accepted profile, found 12999",
        ),
    ],
)
def test_what_a_declared_profile_says_otherwise_is_named(change: Change, line: str):
    launch = glm_launch("one")
    change(launch)
    assert f"session 1 {line}" in declared_findings(launch)


def test_more_blocks_than_declared_are_as_good(monkeypatch: pytest.MonkeyPatch):
    first = glm_launch("one")
    monkeypatch.setattr(glm_records, "BLOCKS", 14_000)
    assert declared_findings(first, glm_launch("two")) == []


def test_what_a_declared_profile_does_not_say_is_the_same_in_every_start():
    second = glm_launch("two")
    second["workers"][2]["settings"]["moe_backend"] = "triton"
    where = "session 2 worker dp0 tp2 pp0: settings.moe_backend: expected "
    assert declared_findings(glm_launch("one"), second) == [
        f"{where}auto, found triton",
        f"{where}'auto' of session 1, found 'triton'",
    ]


def in_settings(**change: Any) -> Change:
    return worker(lambda own: own["settings"].update(change), 0)


def in_both(**change: Any) -> Change:
    """Graphs of the first worker, before and after its backends had their say."""

    def changed(own: dict[str, Any]) -> None:
        for name in ("initial_compilation", "compilation"):
            own["settings"][name].update(change)

    return worker(changed, 0)


def in_launch(setting: str, value: Any) -> Change:
    return scheduler(lambda own: own["launch"].update({setting: value}))


W, S = "worker dp0 tp0 pp0: ", "scheduler dp0: "
OTHERWISE: list[tuple[Change, str]] = [
    (in_settings(speculative_config="eagle"), f"{W}settings.speculative_config: expected None, found eagle"),
    (in_settings(kv_transfer_config="nixl"), f"{W}settings.kv_transfer_config: expected None, found nixl"),
    (in_settings(cpu_offload_gb=4.0), f"{W}settings.cpu_offload_gb: expected 0.0, found 4.0"),
    (
        in_settings(cache_dtype="auto"),
        f"{W}settings.cache_dtype: expected one of ('fp8', 'fp8_e4m3', 'fp8_ds_mla'), found 'auto'",
    ),
    (in_settings(tensor_parallel_size=8), f"{W}settings.tensor_parallel_size: expected 4, found 8"),
    (in_settings(enable_expert_parallel=True), f"{W}expert axes (moe_tp, moe_ep): expected (4, 1), found (1, 4)"),
    (in_settings(enforce_eager=True), f"{W}settings.enforce_eager: expected False, found True"),
    (in_settings(async_scheduling=True), f"{W}settings.async_scheduling: expected False, found True"),
    (in_settings(enable_chunked_prefill=False), f"{W}settings.enable_chunked_prefill: expected True, found False"),
    (in_settings(enable_eplb=True), f"{W}settings.enable_eplb: expected False, found True"),
    (
        in_both(cudagraph_mode="FULL"),
        f"{W}settings.initial_compilation.cudagraph_mode: expected FULL_AND_PIECEWISE, found FULL",
    ),
    (
        worker(lambda own: own["model"].pop("quantization"), 0),
        f"{W}model.quantization: expected the method of quantization_config, found None",
    ),
    (
        worker(lambda own: own["model"].update(quantization="awq"), 0),
        f"{W}model.quantization: expected the method of quantization_config, found awq",
    ),
    (
        worker(lambda own: own["model"].pop("quantization_config"), 0),
        f"{W}model.quantization_config: expected a block of labels fp8_block, fp8_block, found none",
    ),
    (
        worker(lambda own: own["model"].update(dtype="float16"), 0),
        f"{W}model.dtype: expected bfloat16, found float16",
    ),
    (
        worker(lambda own: own["model"].update(load_format="dummy"), 0),
        f"{W}model.load_format: expected auto, found dummy",
    ),
    (
        worker(lambda own: own["hardware"].update(device_type="cpu"), 0),
        f"{W}hardware.device_type: expected cuda, found cpu",
    ),
    (
        in_launch("scheduler_config.policy", "priority"),
        f"{S}launch.scheduler_config.policy: expected fcfs, found priority",
    ),
    (
        in_launch("scheduler_config.policy", "absent"),
        f"{S}launch.scheduler_config.policy: expected fcfs, found absent",
    ),
    (
        in_launch("scheduler_config.enable_chunked_prefill", False),
        f"{S}launch.scheduler_config.enable_chunked_prefill: expected True, found False",
    ),
    (
        scheduler(lambda own: own.update(coordinator="UnitaryKVCacheCoordinator")),
        f"{S}coordinator: expected HybridKVCacheCoordinator, found UnitaryKVCacheCoordinator",
    ),
    (scheduler(lambda own: own.update(watermark_blocks=7)), f"{S}watermark_blocks: expected 0, found 7"),
    (
        scheduler(lambda own: own.update(max_concurrency=28.0)),
        f"{S}max_concurrency: expected 13697 blocks / 495 of a request = 27.67070707070707, found 28.0",
    ),
    (
        worker(lambda own: own["settings"].pop("recurrent"), 0),
        f"{W}settings.recurrent: expected the cache settings of recurrent state on 0.33.0, found none",
    ),
    (
        worker(lambda own: own["model"].update(sidecar_sha256="0"), 0),
        f"{W}model.sidecar_sha256: expected None, found 0",
    ),
]


@pytest.mark.parametrize(("change", "line"), OTHERWISE, ids=[line.split(": expected")[0] for _, line in OTHERWISE])
def test_a_launch_on_a_declared_profile_is_the_cells(change: Change, line: str):
    launch = glm_launch("one")
    change(launch)
    assert f"session 1 {line}" in declared_findings(launch)


def test_capture_sizes_that_a_declared_profile_names_are_the_launches():
    """The launch captured 1, 2, 4 and eight multiples of 8."""
    declared = read_declared(DECLARED).model_copy(update={"cudagraph_capture_sizes": (1, 2)})
    own = parse(WorkerRecord, glm_launch("one")["workers"][0], "record")
    assert list(profile_findings(declared, [own])) == [
        f"{W}number of settings.compilation.cudagraph_capture_sizes: expected 2 of the accepted profile, found 11"
    ]


def test_threads_are_those_that_the_cell_fixes():
    launch = glm_launch("one")
    launch["workers"][2]["hardware"]["threads"] = 9
    line = "session 1 worker dp0 tp2 pp0: hardware.threads: expected 1 of the campaign's environment, found 9"
    assert declared_findings(launch) == [line]


@pytest.mark.parametrize(("environment", "fixed"), [({"VLLM_CPU_OMP_THREADS_BIND": "0|1"}, True), ({}, False)])
def test_threads_of_an_imported_profiles_cell_too(environment: dict[str, str], fixed: bool):
    record, other = recorded("tensor"), relaunched(recorded("tensor"), "one")
    other["workers"][1]["hardware"]["threads"] = 9
    cell = frozen_cell(topology={"tp": 2}, phase=record["phase"], environment=environment)
    found = list(binding_findings(cell, accepted(record), Journal((session_of(other),))))
    line = "session 1 worker dp0 tp1 pp0: hardware.threads: expected 1 of the campaign's environment, found 9"
    assert found == ([line] if fixed else [])


# The whole judge


@pytest.fixture
def cells(smoke: Path, tmp_path: Path) -> Path:
    shutil.copytree(smoke / "cells", tmp_path / "cells")
    return tmp_path / "cells"


def verdict(folder: Path) -> dict[str, Any]:
    """What `verify_cell` writes of a cell, run as the rule runs it."""
    files = [str(file) for file in accepted_of(folder)]
    output = folder / "evidence.json"
    command = [sys.executable, "workflow/scripts/verify_cell.py", "--folder", str(folder), "--accepted", *files]
    done = subprocess.run([*command, "--output", str(output)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    evidence: dict[str, Any] = json.loads(output.read_text())
    return evidence


@pytest.mark.demo
@pytest.mark.parametrize("name", ["prefill-sliding", "decode-hybrid"])
def test_one_field_of_a_sessions_record_that_was_edited_fails_the_evidence(cells: Path, name: str):
    (folder,) = cells.glob(f"{name}-*")
    assert (verdict(folder)["state"], verdict(folder)["failures"]) == ("recorded", [])

    def edit(line: dict[str, Any]) -> None:
        line["ranks"][0]["runtime"]["workers"][0]["settings"]["moe_backend"] = "triton"

    rewrite_line(folder, 0, edit, derive=True)
    found = verdict(folder)
    field = "session 1 worker dp0 tp0 pp0: settings.moe_backend: expected 'auto' of the accepted probe, found 'triton'"
    assert (found["state"], found["failures"]) == ("failed", [field])


@pytest.mark.demo
def test_a_session_without_records_fails_the_evidence(cells: Path):
    (folder,) = cells.glob("decode-dense-*")
    rewrite_line(folder, 0, lambda line: line["ranks"][0].update(runtime={}), derive=True)
    line = "session 1 rank 0: runtime.workers: expected a value, found nothing"
    assert verdict(folder)["failures"] == [line]


@pytest.mark.demo
def test_without_the_probe_a_cell_is_not_verified(cells: Path):
    (folder,) = cells.glob("decode-dense-*")
    with pytest.raises(Refusal, match=r"accepted profile: expected one probe record with it, found \[\]"):
        read_cell(folder, accepted_of(folder)[:1])
    with pytest.raises(Refusal, match="accepted profile: expected that of decode-dense-"):
        read_cell(folder, [])
