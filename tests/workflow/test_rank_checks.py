"""Each thing that stands against a merge, on two ranks of a real artifact: changed so, it is found and named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from native_samples import sample, two_ranks

from schemas.layout import rank_file

from merge_ranks import Ranks, findings

Documents = list[dict[str, Any]]


@pytest.fixture
def documents() -> Documents:
    return json.loads(json.dumps(two_ranks(sample("d17_moe_swa_native_decode"))))


def lines(documents: Documents, folder: Path) -> list[str]:
    files = [folder / rank_file(rank) for rank in range(len(documents))]
    for file, document in zip(files, documents, strict=True):
        file.write_text(json.dumps(document))
    return [str(refusal) for refusal in findings(Ranks.read(files))]


def in_group(change: Callable[[dict[str, Any]], Any]) -> Callable[[Documents], None]:
    """A change of the first group, as both files repeat it."""

    def changed(documents: Documents) -> None:
        for document in documents:
            change(document["iteration_groups"][0])

    return changed


def in_fpm(change: Callable[[dict[str, Any]], Any]) -> Callable[[Documents], None]:
    """A change of rank 0's first retained value: in its own row, and in the groups of both files."""

    def changed(documents: Documents) -> None:
        change(documents[0]["results"][0]["fpms"][0])
        for document in documents:
            change(document["iteration_groups"][0]["rank_results"][0]["fpms"][0])

    return changed


def in_measurement(change: Callable[[dict[str, Any]], Any]) -> Callable[[Documents], None]:
    return in_fpm(lambda fpm: change(fpm["benchmark_measurement"]))


def in_sample(index: int, change: Callable[[dict[str, Any]], Any]) -> Callable[[Documents], None]:
    return in_measurement(lambda measurement: change(measurement["raw_fpms"][index]))


def own(rank: int, change: Callable[[dict[str, Any]], Any]) -> Callable[[Documents], None]:
    return lambda documents: change(documents[rank])


WHERE = "rank=0 benchmark_id=1"
EVIDENCE = f"Self-benchmark execution evidence is invalid: {WHERE}: "


def without_protocol(document: dict[str, Any]) -> None:
    del document["measurement_protocol"], document["warmup_evidence"]


def without_start(raw: dict[str, Any], wall: float) -> None:
    raw["wall_time"], raw["benchmark_sample"]["timing"]["start_monotonic"] = wall, None


CASES: dict[str, tuple[Callable[[Documents], Any], str]] = {
    "no run id": (lambda ds: [d.update(run_id="") for d in ds], "run_id: expected a text, found ''"),
    "no grid": (lambda ds: [d.update(grid_digest=None) for d in ds], "grid_digest: expected a text, found None"),
    "ranks swapped": (lambda ds: ds.reverse(), "dp.rank: expected the rank of benchmark.json, found 1"),
    "half a protocol": (
        own(1, lambda d: d.pop("warmup_evidence")),
        "warmup_evidence: expected with measurement_protocol",
    ),
    "another protocol": (
        own(1, lambda d: d["measurement_protocol"].update(content_seed="1")),
        "Self-benchmark measurement protocol mismatch: measurement_protocol: expected the value of benchmark.json",
    ),
    "another size": (own(1, lambda d: d["dp"].update(size=3)), "dp.size: expected 2, found 3"),
    "true for 1": (
        own(1, lambda d: d["config"].update(randomize_kda_state=0)),
        "config: expected the value of benchmark.json, found another",
    ),
    "no kvwarm": (own(1, lambda d: d.pop("kvwarm")), "kvwarm: expected as in benchmark.json, found a block on one"),
    "another verdict": (
        own(1, lambda d: d["kvwarm"].update(warm_eligible=None)),
        "kvwarm.warm_eligible: expected True of benchmark.json, found None",
    ),
    "other groups": (
        own(1, lambda d: d["iteration_groups"][0].update(wall_time=9.0)),
        "iteration_groups: expected the value of benchmark.json, found another",
    ),
    "no engine": (
        own(1, lambda d: d.pop("engine")),
        "engine provenance mismatch: engine: expected as in benchmark.json",
    ),
    "another engine": (
        own(1, lambda d: d["engine"]["versions"].update(vllm="0.33.0")),
        "engine provenance mismatch: engine.versions: expected",
    ),
    "another id": (in_group(lambda g: g["point"].update(benchmark_id=2)), "point.benchmark_id: expected 1, found 2"),
    "incomplete": (
        in_group(lambda g: g.update(complete=False)),
        "iteration group is incomplete for benchmark_id=1: expected [0, 1], found [0, 1], complete false",
    ),
    "a rank less": (
        in_group(lambda g: g["rank_results"].pop()),
        "iteration group is incomplete for benchmark_id=1: expected [0, 1], found [0]",
    ),
    "two values": (
        in_group(lambda g: g["rank_results"][0]["fpms"].append(g["rank_results"][0]["fpms"][0])),
        f"Each self-benchmark rank-point must contain exactly one FPM: {WHERE}: expected 1, found 2",
    ),
    "no measurement": (
        in_fpm(lambda f: f.pop("benchmark_measurement")),
        f"measurement evidence missing or invalid: {WHERE}: expected benchmark_measurement, found nothing",
    ),
    "no protocol": (
        lambda ds: [without_protocol(d) for d in ds],
        f"measurement evidence has no shared protocol: {WHERE}: expected nothing without",
    ),
    "not the slowest": (
        in_group(lambda g: g.update(wall_time=9.0)),
        "iteration wall time mismatch for benchmark_id=1:",
    ),
    "another version": (
        in_fpm(lambda f: f.update(version=2)),
        f"measurement identity mismatch: {WHERE}: counter_id, dp_rank, version: expected (1, 0, 1), found (1, 0, 2)",
    ),
    "no time": (in_fpm(lambda f: f.update(wall_time=0.0)), f"wall_time {WHERE}: expected a positive number"),
    "another shape": (
        in_fpm(lambda f: f["scheduled_requests"].update(num_decode_requests=9)),
        f"scheduled_requests {WHERE}: expected (0, 0, 0, 2, ",
    ),
    "new tokens of a decode": (
        in_group(lambda g: g["point"].update(total_prefill_tokens=1)),
        f"point {WHERE}: tokens: expected 0 new and at least 2 read",
    ),
    "another schema": (
        in_measurement(lambda m: m.update(schema_version=2)),
        f"measurement identity mismatch: {WHERE}: schema_version, dp_rank: expected (1, 0), found (2, 0)",
    ),
    "too many samples": (
        in_measurement(lambda m: m.update(expected_internal_samples=1)),
        f"{EVIDENCE}raw samples: expected 1..1, found 4",
    ),
    "another place": (
        in_sample(1, lambda r: r["benchmark_sample"].update(sample_index=5)),
        f"{EVIDENCE}sample_index: expected 1, found 5",
    ),
    "another worker": (in_sample(1, lambda r: r.update(worker_id="w")), f"{EVIDENCE}raw sample 1: expected {WHERE}"),
    "a forward twice": (
        in_sample(1, lambda r: r["benchmark_sample"].update(forward_index=0)),
        f"{EVIDENCE}forward_index: expected more than",
    ),
    "a sample without time": (
        in_sample(0, lambda r: without_start(r, 0.0)),
        f"{EVIDENCE}raw sample 0 wall_time: expected a positive number, found 0.0",
    ),
    "another interval": (
        in_sample(1, lambda r: r.update(wall_time=9.0)),
        f"{EVIDENCE}raw sample 1 contradicts its timing interval: wall_time: expected",
    ),
    "padding that does not add up": (
        in_sample(
            1,
            lambda r: r["benchmark_sample"].update(
                cudagraph={
                    "status": "observed",
                    "runtime_mode": "FULL",
                    "num_unpadded_tokens": 2,
                    "num_padded_tokens": 4,
                    "num_paddings": 1,
                }
            ),
        ),
        f"{EVIDENCE}raw sample 1 has invalid observed graph data: expected mode, and padded - unpadded = paddings",
    ),
    "unavailable and known": (
        in_sample(1, lambda r: r["benchmark_sample"]["cudagraph"].update(status="unavailable", runtime_mode="NONE")),
        f"{EVIDENCE}raw sample 1 contradicts its graph observation status: expected nothing",
    ),
    "a method that does not apply": (
        in_measurement(lambda m: m["estimate"].update(method="single_step")),
        f"{EVIDENCE}reduction: expected another method than single_step for 4 of 4 samples",
    ),
    "the first sample too": (
        in_measurement(lambda m: m["estimate"].update(raw_sample_indices=[0, 1, 2, 3])),
        f"{EVIDENCE}reduction: expected adjacent_upper_median over [1, 2, 3] of 4 of 4 samples",
    ),
    "a mean": (
        in_fpm(lambda f: f.update(wall_time=f["wall_time"] * 1.01)),
        f"{EVIDENCE}retained wall time contradicts the raw reduction inputs: wall_time: expected",
    ),
    "a queue beside one": (
        in_sample(2, lambda r: r["queued_requests"].update(num_decode_requests=1)),
        f"{EVIDENCE}raw sample 2 queued_requests: expected the retained ones",
    ),
    "a step that grows too fast": (
        in_sample(2, lambda r: r["scheduled_requests"].update(sum_decode_kv_tokens=1)),
        f"{EVIDENCE}raw sample 2 scheduled_requests: expected the retained ones, or a token more",
    ),
    "unavailable prompts with a digest": (
        in_measurement(lambda m: m["prompts"].update(status="unavailable")),
        f"prompts {WHERE}: expected nothing where they are unavailable, found digests",
    ),
    "a slot twice": (
        in_measurement(lambda m: m["prompts"]["requests"][1].update(slot=0)),
        f"prompts {WHERE}: slots: expected 0..1, found [0, 0]",
    ),
    "another prompt": (
        in_measurement(lambda m: m["prompts"]["requests"][1].update(sha256="0" * 64)),
        f"prompts {WHERE}: sha256: expected",
    ),
    "rows in another order": (
        own(1, lambda d: d["results"].reverse()),
        "results: expected the points of the iteration groups, in their order, found others",
    ),
    "a value of its own": (
        own(1, lambda d: d["results"][0]["fpms"][0].update(wall_time=9.0)),
        "local result differs from synchronized group: rank=1 benchmark_id=1: expected the group's entry",
    ),
    "another stamp": (
        own(1, lambda d: d["results"][0].update(kv_seed_regime="fake_fallback")),
        "benchmark_id=1 kv_seed_regime: expected what its stamps say",
    ),
    "two regimes": (
        own(1, lambda d: d["results"][0].update(kv_seed_regime=None)),
        "kv_seed_regime benchmark_id=1: expected one regime over all ranks, found ['None', 'real_kv']",
    ),
}


def test_as_they_are_nothing_stands_against_them(documents: Documents, tmp_path: Path):
    assert lines(documents, tmp_path) == []


@pytest.mark.parametrize("name", CASES)
def test_what_stands_against_a_merge_is_named(name: str, documents: Documents, tmp_path: Path):
    change, expected = CASES[name]
    change(documents)
    found = lines(documents, tmp_path)
    assert any(line.startswith(expected) for line in found), "\n".join(found)
