"""The evidence of cells that Dynamo measured: nothing against real artifacts, and a line for whatever is changed."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from native_samples import ONE_PHASE, TWO_RANKS, cell_of, one_phase, sample, two_ranks

from schemas.native import RankArtifact
from schemas.plan import FrozenCell

from dynamo_evidence import failures, gaps
from merge_ranks import Ranks, findings

Document = dict[str, Any]

MEASURED_HERE = Path(__file__).parent.parent / "fixtures" / "dynamo"
NO_EVIDENCE = "measurement evidence: none recorded by Dynamo 1.6.1"
GAPS: dict[str, list[str]] = {
    "d161_dense_decode_median": [NO_EVIDENCE],
    "d17_dense_decode_median_clamped": [],
    "d17_moe_swa_native_decode": ["prompts of 2 points: not derivable (real seeds)", "forwards in no record: 4"],
    "d17_rows_v3_realseed_prefill": ["prompts of 3 points: not derivable (real seeds)"],
    "d161_dense_agg/prefill": [NO_EVIDENCE],
    "d161_dense_agg/decode": [NO_EVIDENCE],
    "d161_moe_realkv_agg/prefill": [NO_EVIDENCE],
    "d161_moe_realkv_agg/decode": [
        NO_EVIDENCE,
        "grid_digest: not derivable (its replicas are not recorded and real KV reorders points)",
    ],
    "d17_dense_agg/prefill": [],
    "d17_dense_agg/decode": [],
    "d17_full_moe_agg/prefill": [],
    "d17_full_moe_agg/decode": ["prompts of 2 points: not derivable (real seeds)", "forwards in no record: 4"],
    "1.6.1/prefill": [NO_EVIDENCE],
    "1.6.1/decode": [NO_EVIDENCE],
    "1.7/prefill": ["prompts of 2 points: not derivable (real seeds)"],
    "1.7/decode": [],
}
"""Artifact (of an aggregated one: one phase) -> what it leaves open. The last four are of the campaign cpu-dynamo."""


def document_of(name: str) -> Document:
    whole, _, phase = name.partition("/")
    if whole.startswith("1."):
        data: Document = json.loads((MEASURED_HERE / f"{name}.json").read_bytes())
        return data
    return one_phase(whole, phase) if phase else sample(whole)


def artifacts_of(*documents: Document) -> list[RankArtifact]:
    return [msgspec.json.decode(json.dumps(document), type=RankArtifact) for document in documents]


def judged(document: Document, change: Callable[[Document], Any] = lambda document: None, **cell: Any) -> list[str]:
    """The failures of an artifact that was changed, for the cell that asked for it as it was."""
    frozen = cell_of(document, **cell)
    change(document)
    return list(failures(frozen, artifacts_of(document)))


def open_in(document: Document, change: Callable[[Document], Any]) -> list[str]:
    frozen = cell_of(document)
    change(document)
    found = artifacts_of(document)
    assert list(failures(frozen, found)) == []
    return list(gaps(frozen, found))


@pytest.mark.parametrize("name", GAPS)
def test_nothing_stands_against_a_real_artifact(name: str):
    document = document_of(name)
    cell, artifacts = cell_of(document), artifacts_of(document)
    assert list(failures(cell, artifacts)) == []
    assert list(gaps(cell, artifacts)) == GAPS[name]


def test_every_sample_of_one_phase_is_among_them():
    assert set(ONE_PHASE) <= set(GAPS)


def fpm(document: Document, row: int = 0) -> Document:
    return document["results"][row]["fpms"][0]


def measurement(document: Document, row: int = 0) -> Document:
    return fpm(document, row)["benchmark_measurement"]


def raw(document: Document, row: int, index: int) -> Document:
    return measurement(document, row)["raw_fpms"][index]


def record(document: Document, index: int) -> Document:
    return document["warmup_evidence"]["records"][index]


MEDIAN, ROWS, NATIVE, OLD = (
    "d17_dense_decode_median_clamped",
    "d17_rows_v3_realseed_prefill",
    "d17_moe_swa_native_decode",
    "d161_dense_decode_median",
)
DENSE, FAKE, MOE = "d17_dense_agg/decode", "d17_dense_agg/prefill", "d17_full_moe_agg/decode"

TAMPERED: list[tuple[str, Callable[[Document], Any], str]] = [
    # Protocol
    (MEDIAN, lambda d: d["measurement_protocol"].update(schema_version=2), "measurement_protocol: expected Protocol"),
    (MEDIAN, lambda d: d["measurement_protocol"].update(synthetic_content="other"), "Invalid enum value 'other'"),
    (MEDIAN, lambda d: d["measurement_protocol"].update(content_seed=0), "Expected `str`, got `int`"),
    (MEDIAN, lambda d: d["measurement_protocol"]["unobserved"].append(""), "Expected `str` of length >= 1"),
    (MEDIAN, lambda d: d["measurement_protocol"].update(surprise=1), "unknown field `surprise`"),
    (
        MEDIAN,
        lambda d: d["measurement_protocol"]["execution_evidence"].update(timing_clock="wall"),
        "Invalid enum value 'wall'",
    ),
    (
        MEDIAN,
        lambda d: d["measurement_protocol"]["preparation"].update(warmup_iterations=3),
        "measurement_protocol.preparation.warmup_iterations: expected 2, found 3",
    ),
    (
        MEDIAN,
        lambda d: d["measurement_protocol"]["preparation"].update(giant_kv_threshold=1),
        "preparation.giant_kv_threshold: expected 0, found 1",
    ),
    (
        MEDIAN,
        lambda d: d["measurement_protocol"]["preparation"].update(decode_real_kv_warmup=False),
        "preparation.decode_real_kv_warmup: expected True, found False",
    ),
    (
        ROWS,
        lambda d: d["measurement_protocol"]["preparation"].update(prefill_real_seed=False),
        "benchmark_id=1 kv_seed_regime: expected fake_prefix, found real_prefix",
    ),
    (
        FAKE,
        lambda d: d["measurement_protocol"].update(synthetic_content="zeros"),
        "synthetic_prompts.mode: expected zeros, found salted_random",
    ),
    (
        MEDIAN,
        lambda d: d.pop("warmup_evidence"),
        "warmup_evidence: expected one, as of measurement_protocol, found otherwise",
    ),
    (
        MEDIAN,
        lambda d: [d.pop("measurement_protocol"), d.pop("warmup_evidence")],
        "measurement_protocol: expected one since 1.7, found otherwise in 1.7.0.dev20261026",
    ),
    (
        MEDIAN,
        lambda d: [d.pop("measurement_protocol"), d.pop("warmup_evidence")],
        "benchmark_measurement: expected none without a protocol, found 3",
    ),
    (
        MEDIAN,
        lambda d: fpm(d, 1).pop("benchmark_measurement"),
        "benchmark_measurement: expected one of each point, found 2 of 3",
    ),
    # Measurements
    (MEDIAN, lambda d: measurement(d).update(point_key="0" * 64), "benchmark_id=1 point_key: expected "),
    (
        MEDIAN,
        lambda d: measurement(d, 1)["preparation"].update(completed_points_before=0),
        "benchmark_id=2 preparation.completed_points_before: expected 1, found 0",
    ),
    (
        MEDIAN,
        lambda d: measurement(d)["preparation"].update(kv_seed_regime="legacy"),
        "preparation.kv_seed_regime: expected skip:dense_model_content_insensitive, found legacy",
    ),
    (
        MEDIAN,
        lambda d: measurement(d)["preparation"].update(grid_digest="0" * 64),
        "benchmark_id=1 preparation.grid_digest: expected 695b8209",
    ),
    (
        MEDIAN,
        lambda d: measurement(d)["preparation"].update(warmup_records_before=2),
        "benchmark_id=1 warmup_records_before: expected 3, found 2",
    ),
    (
        MEDIAN,
        lambda d: measurement(d).update(expected_internal_samples=5),
        "benchmark_id=1 expected_internal_samples: expected 4, found 5",
    ),
    (
        DENSE,
        lambda d: measurement(d).update(expected_internal_samples=3),
        "benchmark_id=1 expected_internal_samples: expected 2, found 3",
    ),
    (
        FAKE,
        lambda d: measurement(d).update(expected_internal_samples=2),
        "benchmark_id=1 expected_internal_samples: expected 1, found 2",
    ),
    (
        MEDIAN,
        lambda d: measurement(d)["estimate"].update(method="last_step"),
        "estimate.method: expected adjacent_upper_median, found last_step",
    ),
    (DENSE, lambda d: measurement(d)["raw_fpms"].pop(), "benchmark_id=1 raw_fpms: expected 2..2, found 1"),
    (MEDIAN, lambda d: measurement(d).update(session=0), "benchmark_measurement.session: expected nothing"),
    # Marks
    (MEDIAN, lambda d: fpm(d).update(kvwarm_giant_median_of=2), "kvwarm_giant_median_of: expected 3, found 2"),
    (DENSE, lambda d: fpm(d).update(kvwarm_giant_median_of=1), "kvwarm_giant_median_of: expected nothing, found 1"),
    (FAKE, lambda d: fpm(d).update(kvwarm_giant_median_of=1), "kvwarm_giant_median_of: expected nothing, found 1"),
    (DENSE, lambda d: fpm(d).pop("kvwarm_steady_sample"), "kvwarm_steady_sample: expected True"),
    (FAKE, lambda d: fpm(d).update(kvwarm_steady_sample=True), "kvwarm_steady_sample: expected nothing, found True"),
    (OLD, lambda d: fpm(d).update(kvwarm_giant_median_of=4), "kvwarm_giant_median_of: expected 1..3, found 4"),
    (
        OLD,
        lambda d: fpm(d, 1).pop("kvwarm_giant_median_of"),
        "kvwarm_giant_median_of: expected at most 3, found nothing",
    ),
    # Samples
    (MEDIAN, lambda d: raw(d, 0, 2).update(version=2), "benchmark_id=1 raw sample 2 version: expected 1, found 2"),
    (OLD, lambda d: fpm(d, 2).update(worker_id="x"), "benchmark_id=3 worker_id: expected '', found 'x'"),
    (
        MEDIAN,
        lambda d: raw(d, 1, 0)["queued_requests"].update(num_decode_requests=1),
        "benchmark_id=2 raw sample 0 queued_requests: expected none",
    ),
    (
        OLD,
        lambda d: fpm(d, 1)["queued_requests"].update(sum_prefill_tokens=1),
        "benchmark_id=2 queued_requests: expected none",
    ),
    (
        MEDIAN,
        lambda d: raw(d, 1, 3)["scheduled_requests"].update(sum_decode_kv_tokens=302),
        "benchmark_id=2 raw sample 3 sum_decode_kv_tokens: expected 304, found 302",
    ),
    (
        MEDIAN,
        lambda d: raw(d, 1, 0)["scheduled_requests"].update(num_prefill_requests=1),
        "benchmark_id=2 raw sample 0 num_prefill_requests: expected 0, found 1",
    ),
    (
        DENSE,
        lambda d: raw(d, 1, 0)["scheduled_requests"].update(var_decode_kv_tokens=0.2),
        "raw sample 0 var_decode_kv_tokens: expected 0.25, found 0.2",
    ),
    (
        "d161_dense_agg/prefill",
        lambda d: fpm(d, 1)["scheduled_requests"].update(var_prefill_length=0.0),
        "scheduled_requests var_prefill_length: expected 0.25, found 0.0",
    ),
    (
        ROWS,
        lambda d: raw(d, 2, 0)["scheduled_requests"].update(var_prefill_length=56.0),
        "raw sample 0 var_prefill_length: expected 56.5, found 56.0",
    ),
    (
        MEDIAN,
        lambda d: raw(d, 0, 1)["benchmark_sample"]["timing"].update(basis="schedule_to_output"),
        "raw sample 1 timing.basis: expected inter_output, found schedule_to_output",
    ),
    (
        MEDIAN,
        lambda d: raw(d, 0, 1)["benchmark_sample"]["timing"].update(start_monotonic=987.3),
        "raw sample 1 start_monotonic: expected 987.303850387, the output before, found 987.3",
    ),
    (
        MEDIAN,
        lambda d: raw(d, 1, 0)["benchmark_sample"]["timing"].update(start_monotonic=1.0, end_monotonic=2.0),
        "benchmark_id=2 raw sample 0 timing: expected after 987.3",
    ),
    (
        MEDIAN,
        lambda d: d["timing"].update(benchmark_elapsed_seconds=0.01),
        "timing: expected samples within 0.01 s",
    ),
    (
        MEDIAN,
        lambda d: raw(d, 0, 0)["benchmark_sample"]["cudagraph"].update(num_unpadded_tokens=3),
        "raw sample 0 num_unpadded_tokens: expected 2, found 3",
    ),
    (
        MEDIAN,
        lambda d: raw(d, 0, 0)["benchmark_sample"]["cudagraph"].update(num_padded_tokens=4, num_paddings=2),
        "raw sample 0 num_paddings: expected 0 without a graph, found 2",
    ),
    (
        MEDIAN,
        lambda d: raw(d, 0, 0)["benchmark_sample"]["cudagraph"].update(runtime_mode="FULL"),
        "raw sample 0 runtime_mode: expected NONE of an eager engine, found FULL",
    ),
    (
        MEDIAN,
        lambda d: raw(d, 0, 0)["benchmark_sample"].update(repetition=1),
        "raw sample 0 repetition: expected nothing, found 1",
    ),
    (
        MEDIAN,
        lambda d: raw(d, 1, 2)["benchmark_sample"].update(forward_index=99),
        "benchmark_id=2 forward_index: expected to follow on, found [14, 15, 99, 17]",
    ),
    # Prompts
    (
        FAKE,
        lambda d: measurement(d, 1)["prompts"]["requests"][2].update(num_tokens=33),
        "benchmark_id=2 prompts num_tokens: expected [33, 33, 32, 32], found [33, 33, 33, 32]",
    ),
    (
        NATIVE,
        lambda d: measurement(d)["prompts"]["requests"][0].update(num_tokens=150),
        "benchmark_id=1 prompts num_tokens: expected [149, 149], found [150, 149]",
    ),
    (
        FAKE,
        lambda d: measurement(d, 1)["prompts"]["requests"][1].update(sha256="0" * 64),
        "benchmark_id=2 prompt of slot 1: expected sha256 66390b",
    ),
    (FAKE, lambda d: d["measurement_protocol"].update(content_seed="1"), "benchmark_id=3 prompt of slot 0: expected"),
    # Points
    (MEDIAN, lambda d: d["results"].reverse(), "results: expected benchmark_id 1 at its place, found 3"),
    (MEDIAN, lambda d: d["results"][0]["point"].update(batch_size=0), "batch_size: expected 1..16, found 0"),
    (
        ROWS,
        lambda d: d["results"][3]["point"].update(total_kv_read_tokens=255),
        "benchmark_id=4: expected totals that its requests add up to, found 255 tokens",
    ),
    (
        MEDIAN,
        lambda d: d["results"][1]["point"]["sample_reasons"].append("eager_warmup"),
        "sample_reasons: expected reasons of a measured point, found eager_warmup",
    ),
    (
        MEDIAN,
        lambda d: d["results"][0]["point"]["sample_reasons"].reverse(),
        "benchmark_id=1 sample_reasons: expected each once, explicit first, stamps last",
    ),
    (
        MEDIAN,
        lambda d: d["results"][1]["point"]["sample_reasons"].append("context_clamped"),
        "benchmark_id=2 context_clamped: expected 4 tokens of a decode point, found 300 of a decode point",
    ),
    (
        MEDIAN,
        lambda d: d["results"][1]["point"]["sample_reasons"].remove("explicit"),
        "sample_reasons: expected explicit of all points or of none, found of some",
    ),
    (
        MEDIAN,
        lambda d: d["results"][1]["point"]["sample_reasons"].remove("geometric_axis"),
        "sample_reasons: expected cudagraph_disabled and geometric_axis, found ['cudagraph_disabled']",
    ),
    (
        MEDIAN,
        lambda d: d["results"][1]["point"].update(expected_capture_size=2, padding_tokens=0),
        "benchmark_id=2 expected_capture_size: expected None, found 2",
    ),
    (
        MEDIAN,
        lambda d: d["results"][1]["point"].update(total_prefill_tokens=1),
        "point: expected neither new tokens nor a partition or rows of a decode point",
    ),
    (MEDIAN, lambda d: d["results"][1]["point"]["sample_reasons"].pop(), "grid_digest: expected "),
    (OLD, lambda d: d.update(grid_digest="0" * 64), "grid_digest: expected "),
    (
        ROWS,
        lambda d: d["results"][2].update(kv_seed_regime="fake_prefix"),
        "benchmark_id=3 kv_seed_regime: expected not_applicable or real_prefix, found fake_prefix",
    ),
    (
        MOE,
        lambda d: d["results"][0].update(kv_seed_regime="legacy"),
        "benchmark_id=1 kv_seed_regime: expected real_kv or fake_fallback, found legacy",
    ),
    (
        OLD,
        lambda d: d["results"][0].update(kv_seed_regime="real_kv"),
        "benchmark_id=1 kv_seed_regime: expected fake_fallback, found real_kv",
    ),
    # Warm-ups
    (MEDIAN, lambda d: record(d, 0).update(kind="other"), "warmup_evidence: expected Ledger"),
    (MEDIAN, lambda d: record(d, 0).update(surprise=1), "unknown field `surprise`"),
    (MEDIAN, lambda d: d["warmup_evidence"]["records"].pop(0), "global records: expected 1, found 0"),
    (MEDIAN, lambda d: d["warmup_evidence"].update(status="unavailable"), "records: expected none when unavailable"),
    (
        MEDIAN,
        lambda d: record(d, 0)["requested_shape"].update(max_tokens=3),
        "warmup record 0 requested_shape: expected {'prompt_lengths': [256], 'max_tokens': 2}",
    ),
    (
        MEDIAN,
        lambda d: record(d, 0)["first_scheduled_requests"].update(sum_prefill_tokens=255),
        "warmup record 0 first_scheduled_requests sum_prefill_tokens: expected 256, found 255",
    ),
    (
        MEDIAN,
        lambda d: record(d, 0)["last_scheduled_requests"].update(sum_decode_kv_tokens=257),
        "warmup record 0 last_scheduled_requests sum_decode_kv_tokens: expected 256, found 257",
    ),
    (
        MEDIAN,
        lambda d: record(d, 0).update(forward_index_end=1, observed_forward_count=1),
        "warmup record 0 observed_forward_count: expected 2, found 1",
    ),
    (
        MEDIAN,
        lambda d: record(d, 0).update(forward_index_start=1, observed_forward_count=1),
        "warmup record 0 forward_index_start: expected 0 of the first record, found 1",
    ),
    (
        MEDIAN,
        lambda d: record(d, 1).update(completed_points_before=1),
        "warmup record 1 completed_points_before: expected 0, found 1",
    ),
    (
        MEDIAN,
        lambda d: record(d, 1).update(observed_forward_count=3),
        "warmup record 1 observed_forward_count: expected 4, found 3",
    ),
    (
        MEDIAN,
        lambda d: record(d, 1).update(status="failed"),
        "warmup record 1 status: expected completed when passed, found failed",
    ),
    (
        MEDIAN,
        lambda d: record(d, 1).update(status="running"),
        "warmup record 1 forward_index_end: expected none when running, found 6",
    ),
    (
        MEDIAN,
        lambda d: record(d, 1)["validation"].update(reason="why"),
        "warmup record 1 validation.reason: expected none when passed, found why",
    ),
    (
        MEDIAN,
        lambda d: record(d, 0)["validation"].update(reason="why"),
        "warmup record 0 validation.reason: expected none of a completed one, found why",
    ),
    (
        MEDIAN,
        lambda d: record(d, 1)["validation"].pop("scope"),
        "warmup record 1 validation: expected scope and failed_dp_rank, found others",
    ),
    (
        MEDIAN,
        lambda d: record(d, 1)["validation"].update(failed_dp_rank=0),
        "warmup record 1 validation.failed_dp_rank: expected one only when failed, found 0",
    ),
    (
        MEDIAN,
        lambda d: record(d, 1).update(first_scheduled_requests=None),
        "warmup record 1 first_scheduled_requests: expected a step of 4 forwards, found none",
    ),
    (
        MEDIAN,
        lambda d: record(d, 2)["last_scheduled_requests"].update(sum_decode_kv_tokens=804),
        "warmup record 2 last_scheduled_requests sum_decode_kv_tokens: expected 808, found 804",
    ),
    (
        MEDIAN,
        lambda d: record(d, 2).update(forward_index_start=5, observed_forward_count=5),
        "warmup record 2 forward_index_start: expected at least 6, found 5",
    ),
    (
        MEDIAN,
        lambda d: record(d, 2).update(forward_index_end=12, observed_forward_count=6),
        "warmup record 2: expected no forward of 1, found some",
    ),
    (
        MEDIAN,
        lambda d: record(d, 1)["requested_shape"].update(point_type="prefill"),
        "requested_shape: expected a decode point after 3, found prefill 4",
    ),
    (
        MEDIAN,
        lambda d: record(d, 1)["requested_shape"].update(sample_reasons=["explicit"]),
        "requested_shape: expected an eager_warmup without a graph",
    ),
    (
        MEDIAN,
        lambda d: record(d, 1)["requested_shape"].update(batch_size=2**40),
        "requested_shape: expected totals of 1..16 requests, found other ones of 1099511627776",
    ),
    (
        MEDIAN,
        lambda d: record(d, 2)["requested_shape"].update(benchmark_id=6),
        "replicas: expected ids [4, 5], found [4, 6]",
    ),
    (
        MEDIAN,
        lambda d: d["warmup_evidence"]["records"].pop(),
        "replicas: expected one of each shape without a graph, found [2]",
    ),
    (
        ROWS,
        lambda d: record(d, 1).update(forward_index_end=4, observed_forward_count=2),
        "warmup record 1 observed_forward_count: expected 3, found 2",
    ),
    (
        ROWS,
        lambda d: record(d, 1)["first_scheduled_requests"].update(sum_prefill_tokens=511),
        "warmup record 1 first_scheduled_requests sum_prefill_tokens: expected 512, found 511",
    ),
    (
        ROWS,
        lambda d: record(d, 9)["requested_shape"].update(prompt_lengths=[383]),
        "warmup record 9 prompt_lengths: expected of [128, 384], found [383]",
    ),
    (
        ROWS,
        lambda d: record(d, 10)["requested_shape"].update(prompt_lengths=[138]),
        "warmup record 10 prompt_lengths: expected [138, 414], found [138]",
    ),
    (
        ROWS,
        lambda d: record(d, 8)["requested_shape"]["point"].update(sample_reasons=[]),
        "warmup record 8 requested_shape.point: expected the point 1, found another",
    ),
    (
        ROWS,
        lambda d: record(d, 2)["requested_shape"]["point"].update(benchmark_id=9),
        "warmup record 2 requested_shape.point: expected a point or a replica, found id 9",
    ),
    (
        ROWS,
        lambda d: record(d, 7)["requested_shape"].update(record(d, 3)["requested_shape"]),
        "warmup record 7: expected a prefix of the replica around it, found another's",
    ),
    (
        ROWS,
        lambda d: record(d, 9)["first_scheduled_requests"].update(sum_prefill_kv_tokens=255),
        "warmup record 9 first_scheduled_requests sum_prefill_tokens: expected 384, found 383",
    ),
    (
        ROWS,
        lambda d: record(d, 11)["last_scheduled_requests"].update(sum_prefill_kv_tokens=128),
        "warmup record 11 last_scheduled_requests: expected the first of one forward, found another",
    ),
    (
        ROWS,
        lambda d: record(d, 9).update(completed_points_before=0),
        "warmup record 9 completed_points_before: expected 1, found 0",
    ),
    # Options, limits, capacity
    (MEDIAN, lambda d: d["config"].pop("timeout"), "missing required field `timeout`"),
    (MEDIAN, lambda d: d["config"].update(timeout=True), "Expected `float`, got `bool`"),
    (MEDIAN, lambda d: d["config"].update(mode="prefill"), "config.mode: expected decode, found prefill"),
    (MEDIAN, lambda d: d["config"].update(max_batch_size=8), "configured_max_batch_size: expected 8, found 16"),
    (MEDIAN, lambda d: d["config"].update(warmup_iterations=0), "config.warmup_iterations: expected 2, found 0"),
    (
        MEDIAN,
        lambda d: d["config"].update(randomize_kda_state=True),
        "recurrent_state: expected ('random', 'uniform-request-layer-rank-v1', 0.01)",
    ),
    (
        MEDIAN,
        lambda d: d["config"].update(randomize_kda_state=True, hybrid_live_state=True),
        "config.hybrid_live_state: expected False with randomize_kda_state",
    ),
    (
        ROWS,
        lambda d: d["config"].update(collect_imbalanced=False),
        "config.collect_imbalanced: expected True with imbalanced points [2, 3], found False",
    ),
    (MEDIAN, lambda d: d["limits"].update(max_model_len=512), "limits.max_model_len: expected 1024, found 512"),
    (MEDIAN, lambda d: d["limits"].update(max_num_running_reqs=8), "limits.max_num_running_reqs: expected 16, found 8"),
    (MEDIAN, lambda d: d["limits"].update(block_size=64), "limits.block_size: expected 128, found 64"),
    (MEDIAN, lambda d: d["limits"].update(feasible_max_batch_size=15), "expected 16..16, found 15"),
    (ROWS, lambda d: d["limits"].update(feasible_max_batch_size=1), "expected 0 of a prefill cell, found 1"),
    (
        MEDIAN,
        lambda d: d["limits"].update(num_gpu_blocks=16385),
        "capacity.common.usable_blocks_without_watermark: expected 16384, found 16383",
    ),
    (
        MEDIAN,
        lambda d: d["capacity"]["common"].update(usable_blocks_with_watermark=16384),
        "usable_blocks_with_watermark: expected at most 16383, found 16384",
    ),
    (MEDIAN, lambda d: d["capacity"]["common"].update(max_model_len=1), "capacity.common.max_model_len: expected 1024"),
    (MEDIAN, lambda d: d["capacity"]["common"].update(kvwarm_eligible=True), "kvwarm_eligible: expected False"),
    (MEDIAN, lambda d: d["capacity"]["common"].update(grid_invariants_digest="0"), "capacity: expected Capacity"),
    (
        MEDIAN,
        lambda d: d["synchronization"].update(enabled=True),
        "synchronization.enabled: expected False, found True",
    ),
    (MEDIAN, lambda d: d["synchronization"].update(port=20381), "synchronization.port: expected none of one rank"),
    (MEDIAN, lambda d: d["synchronization"].update(coordinator_rank=1), "synchronization: expected Synchronization"),
    (MEDIAN, lambda d: d["measurement_policy"].update(prefill="x"), "measurement_policy: expected"),
    (
        MEDIAN,
        lambda d: d["synthetic_prompts"].update(vocab_size=9),
        "synthetic_prompts.vocab_size: expected 1024, found 9",
    ),
    (MEDIAN, lambda d: d.update(run_id="0" * 31), "run_id: expected 32 hex digits"),
    (MEDIAN, lambda d: d.update(sessions=[]), "sessions: expected nothing, found []"),
    (
        MEDIAN,
        lambda d: d["timing"].update(started_at="2026-11-30 12:00:00"),
        "timing.started_at: expected YYYY-MM-DDThh:mm:ss.uuuuuuZ, found 2026-11-30 12:00:00",
    ),
    (
        MEDIAN,
        lambda d: d["timing"].update(completed_at="2020-01-01T00:00:00.000000Z"),
        "timing.completed_at: expected after",
    ),
    (
        MEDIAN,
        lambda d: d["timing"].update(rank_benchmark_elapsed_seconds={}),
        "rank_benchmark_elapsed_seconds: expected nothing",
    ),
    # Graphs
    (
        MEDIAN,
        lambda d: d["cudagraph"].update(mode="FULL"),
        "cudagraph.mode: expected NONE of an eager cell, found FULL",
    ),
    (MEDIAN, lambda d: d["cudagraph"].update(mode="FULL"), "cudagraph.decode_mode: expected FULL, found NONE"),
    (MEDIAN, lambda d: d["cudagraph"].update(max_capture_size=1), "cudagraph.max_capture_size: expected 0, found 1"),
    (MEDIAN, lambda d: d["cudagraph"].update(capture_sizes=[4], max_capture_size=4), "expected none with mode NONE"),
    (
        MEDIAN,
        lambda d: d["engine"]["graph"].update(cudagraph_mode="FULL"),
        "engine.graph: expected NONE of an eager cell",
    ),
    # Engine
    (MEDIAN, lambda d: d["engine"].update(surprise=1), "unknown field `surprise`"),
    (MEDIAN, lambda d: d["engine"].update(resolution="worker_probe"), "Invalid enum value 'worker_probe'"),
    (
        MEDIAN,
        lambda d: d["engine"]["versions"].update(vllm="0.33.0"),
        "engine.versions.vllm: expected 0.32.0, found 0.33.0",
    ),
    (MEDIAN, lambda d: d["engine"]["versions"].update(python="2.7"), "engine: expected Engine"),
    (
        MEDIAN,
        lambda d: d["engine"]["versions"].update(dynamo="1.6.1"),
        "measurement_protocol: expected none before 1.7",
    ),
    (
        MEDIAN,
        lambda d: d["engine"]["scheduler"].update(async_scheduling=True),
        "engine.scheduler.async_scheduling: expected False, found True",
    ),
    (
        MEDIAN,
        lambda d: d["engine"]["scheduler"].update(max_num_seqs=8),
        "engine.scheduler.max_num_seqs: expected 16, found 8",
    ),
    (
        MEDIAN,
        lambda d: d["engine"]["kv_cache"].update(block_size=64),
        "engine.kv_cache block_size: expected 128 everywhere, found [64, 128]",
    ),
    (
        FAKE,
        lambda d: d["engine"]["kv_cache"].update(enable_prefix_caching=False),
        "enable_prefix_caching: expected True with cached prefixes, found False",
    ),
    (
        MOE,
        lambda d: d["engine"]["kv_cache"].update(enable_prefix_caching=False),
        "enable_prefix_caching: expected True with real KV, found False",
    ),
    (
        MOE,
        lambda d: d["engine"]["parallel"].update(enable_expert_parallel=False),
        "enable_expert_parallel: expected True with real KV, found False",
    ),
    (
        MEDIAN,
        lambda d: d["engine"]["parallel"].update(tensor_parallel_size=2),
        "engine.parallel.tensor_parallel_size: expected 1, found 2",
    ),
    (MEDIAN, lambda d: d["engine"]["parallel"].update(data_parallel_rank=1), "data_parallel_rank: expected 0, found 1"),
    (MEDIAN, lambda d: d["engine"]["parallel"].update(enable_eplb=True), "enable_eplb: expected False, found True"),
    (MEDIAN, lambda d: d["engine"].update(speculative={}), "engine.speculative: expected None, found {}"),
    (MEDIAN, lambda d: d["engine"]["kv_cache"].update(cache_dtype="fp8"), "cache_dtype: expected bfloat16, found fp8"),
    (MEDIAN, lambda d: d["engine"]["kv_cache"].update(groups=[]), "engine.kv_cache.groups: expected at least one"),
    (
        MEDIAN,
        lambda d: d["engine"]["kv_cache"]["groups"][0].update(dtype="float16"),
        "groups.0.dtype: expected bfloat16",
    ),
    (
        MEDIAN,
        lambda d: d["engine"]["kv_cache"]["groups"][0].update(block_size=64),
        "engine.kv_cache block_size: expected 128 everywhere, found [64, 128]",
    ),
    (
        MEDIAN,
        lambda d: d["engine"]["kv_cache"]["groups"][0].pop("head_size"),
        "groups.0: expected dtype, head_size, num_kv_heads and block_size, found not all of them",
    ),
    (NATIVE, lambda d: d["kvwarm"]["stages"].pop(2), "expected a chain of each real point, found none of [1]"),
    (OLD, lambda d: fpm(d).pop("kvwarm_giant_median_of"), "kvwarm_giant_median_of: expected at most 3, found nothing"),
    (MEDIAN, lambda d: d["engine"]["model"].update(dtype="float32"), "engine.model.dtype: expected bfloat16"),
    (MEDIAN, lambda d: d["engine"]["quantization"].update(method="fp8"), "engine.quantization.method: expected none"),
    (MEDIAN, lambda d: d["engine"]["quantization"].update(quant_config_class="x"), "expected neither config nor class"),
    # Real KV
    (MEDIAN, lambda d: d["kvwarm"].update(warm_eligible=1), "Expected `bool | null`, got `int`"),
    (MEDIAN, lambda d: d["kvwarm"].update(skip_reason="why"), "kvwarm.skip_reason: expected a known one, found why"),
    (
        MEDIAN,
        lambda d: d["kvwarm"].update(skip_reason=None),
        "expected the reason of a skipped warm-up, found None",
    ),
    (
        MOE,
        lambda d: d["kvwarm"].update(skip_reason="dataset_empty"),
        "expected null of an eligible warm-up, found 'dataset_empty'",
    ),
    (MEDIAN, lambda d: d["kvwarm"].update(enabled=False), "kvwarm.enabled: expected True with skip_reason dense_model"),
    (
        MEDIAN,
        lambda d: d["kvwarm"].update(skip_reason="prefix_caching_disabled"),
        "enable_prefix_caching: expected False with prefix_caching_disabled, found True",
    ),
    (
        "d161_dense_agg/decode",
        lambda d: [
            d["kvwarm"].update(skip_reason="moe_tp_balanced_by_construction"),
            d["engine"]["parallel"].update(enable_expert_parallel=True),
        ],
        "enable_expert_parallel: expected False with moe_tp_balanced_by_construction, found True",
    ),
    (MOE, lambda d: d["kvwarm"].update(dataset=None), "kvwarm.dataset: expected one, found otherwise"),
    (MOE, lambda d: d["kvwarm"]["dataset"].update(sha256="x"), "kvwarm: expected Kvwarm"),
    (MEDIAN, lambda d: d["kvwarm"].pop("points_gate_skipped"), "points_gate_skipped: expected since 1.7"),
    (MEDIAN, lambda d: d["kvwarm"].update(points_gate_skipped=2), "points_gate_skipped: expected 3..5, found 2"),
    (
        MEDIAN,
        lambda d: d["kvwarm"].update(points_gate_skipped=4),
        "kvwarm counters: expected 3 points and 2..2 replicas, found 4",
    ),
    (MEDIAN, lambda d: d["kvwarm"].update(points_real_kv=1), "kvwarm.points_real_kv: expected 0, found 1"),
    (
        OLD,
        lambda d: d["kvwarm"].update(points_fake_fallback=6),
        "kvwarm counters: expected 3 points and 0..2 replicas, found 6",
    ),
    (
        MEDIAN,
        lambda d: d["kvwarm"]["stages"].append({"batch": 2, "depth": 9}),
        "stages: expected none of an ineligible",
    ),
    (MOE, lambda d: d["kvwarm"]["stages"][0].update(batch=3), "kvwarm.stages.0.batch: expected of [1, 2], found 3"),
    (MOE, lambda d: d["kvwarm"]["stages"][0].update(depth=1025), "kvwarm.stages.0.depth: expected at most 1024"),
    (MOE, lambda d: d["kvwarm"]["stages"][0].update(failed=True), "expected build_seconds or failed, found otherwise"),
    (MOE, lambda d: d["kvwarm"]["stages"][0].update(build_seconds=9.0), "build_seconds: expected within the benchmark"),
    (MOE, lambda d: d["kvwarm"]["stages"][0].update(benchmark_id=1), "stages.0.benchmark_id: expected none"),
    (MOE, lambda d: d["kvwarm"].update(stages=[]), "benchmark_id=1 kvwarm.stages: expected a chain of 149, found none"),
    (
        NATIVE,
        lambda d: d["kvwarm"]["stages"][2].update(depth=150),
        "tokens and depth (2, 300, 149), found (2, 300, 150)",
    ),
    (
        NATIVE,
        lambda d: d["kvwarm"]["stages"][0].update(benchmark_id=9),
        "stages.0: expected batch, tokens and depth None",
    ),
    (NATIVE, lambda d: d["kvwarm"]["stages"][0].update(benchmark_id=1), "stages: expected one of each point"),
    (
        NATIVE,
        lambda d: d["engine"]["kv_cache"]["groups"][0].update(sliding_window=None),
        "groups: expected a window or a recurrent state with native chains, found neither",
    ),
]


@pytest.mark.parametrize(("name", "change", "line"), TAMPERED, ids=[f"{i}-{t[2][:50]}" for i, t in enumerate(TAMPERED)])
def test_what_contradicts_the_rest_is_found(name: str, change: Callable[[Document], Any], line: str):
    found = judged(document_of(name), change)
    assert any(line in each for each in found), found
    assert all("\n" not in each and ": expected " in each for each in found)


@pytest.mark.parametrize(
    ("identity", "line"),
    [
        ({"warmup_iterations": 5}, "config.warmup_iterations: expected 5, found 2"),
        ({"runtime_backend_version": "0.33.0"}, "engine.versions.vllm: expected 0.33.0, found 0.32.0"),
        ({"topology": {"tp": 2}}, "engine.parallel.tensor_parallel_size: expected 2, found 1"),
        (
            {"topology": {"tp": 2, "moe_ep": 2}},
            "engine.parallel.enable_expert_parallel: expected True, found False",
        ),
        ({"precision": {"kv_cache": "fp8"}}, "engine.kv_cache.cache_dtype: expected fp8, found auto"),
        ({"precision": {"gemm": "fp8_block"}}, "engine.quantization.method: expected one for gemm fp8_block"),
        ({"parallel_strategy": "tep"}, "kvwarm.warm_eligible: expected true of strategy tep, found false (dense_model"),
        (
            {"limits": {"max_num_tokens": 2048, "max_batch_size": 16, "max_model_len": 1024}},
            "expected 2048, found 1024",
        ),
    ],
)
def test_another_cell_is_found(identity: Document, line: str):
    found = judged(sample(MEDIAN), **identity)
    assert any(line in each for each in found), found


def test_a_gpu_cell_with_graphs_was_not_measured_without():
    document = sample(MEDIAN)
    line = "cudagraph.mode: expected graphs, which the cell has, found NONE"
    cell = cell_of(document, engine={"kv_cache_memory_bytes": 1})
    assert line not in list(failures(cell, artifacts_of(document)))  # the CPU's engine has none, whatever it is told
    assert line in list(failures(cell.model_copy(update={"device_name": "NVIDIA H200"}), artifacts_of(document)))


def test_a_block_that_a_strategy_must_have_is_missed():
    assert "kvwarm: expected a block of a decode cell of strategy dep, found none" in judged(
        sample(MEDIAN), lambda d: d.pop("kvwarm"), parallel_strategy="dep"
    )


def test_a_prefill_cell_has_no_verdict_on_real_kv():
    block = sample(MEDIAN)["kvwarm"]
    assert "kvwarm: expected none of a prefill cell, found one" in judged(
        sample(ROWS), lambda d: d.update(kvwarm=block)
    )


@pytest.mark.parametrize(
    ("name", "change", "line"),
    [
        (MEDIAN, lambda d: d.pop("engine"), "engine: not recorded"),
        (MEDIAN, lambda d: d["engine"].update(capture_error="broke"), "engine.capture_error: broke"),
        (MEDIAN, lambda d: d["capacity"].update(common=None), "capacity: not recorded"),
        (
            MEDIAN,
            lambda d: d["capacity"]["common"].update(usable_blocks_with_watermark=16000),
            "capacity: 383 blocks kept as a watermark",
        ),
        (
            MEDIAN,
            lambda d: [
                d["limits"].update(num_gpu_blocks=16001),
                d["capacity"]["common"].update(
                    usable_blocks_with_watermark=16000, usable_blocks_without_watermark=16000
                ),
            ],
            "capacity: 16000 blocks, the accepted profile has 16383",
        ),
        (OLD, lambda d: d.pop("kvwarm"), "kvwarm: no verdict on real KV recorded"),
        (
            MEDIAN,
            lambda d: d["measurement_protocol"]["unobserved"].remove("kv_cache_tensors"),
            "measurement_protocol.unobserved: sampled_continuation_token_ids, recurrent_state_tensors",
        ),
        (
            OLD,
            lambda d: [r.update(kv_seed_regime=None) for r in d["results"]],
            "seed regime of 3 points: none recorded",
        ),
        (
            OLD,
            lambda d: d["kvwarm"].update(points_fake_fallback=4),
            "kvwarm counters: 4 points, not 5 with one replica of each batch",
        ),
        (OLD, lambda d: fpm(d).update(kvwarm_giant_median_of=2), "samples: fewer than planned at 1 points"),
        (
            MEDIAN,
            lambda d: [
                measurement(d, 2)["raw_fpms"].pop(),
                measurement(d, 2)["estimate"].update(raw_sample_indices=[1, 2]),
                fpm(d, 2).update(kvwarm_giant_median_of=2),
            ],
            "samples: fewer than planned at 1 points",
        ),
        (
            FAKE,
            lambda d: measurement(d).update(prompts={"status": "unavailable", "requests": [], "sha256": None}),
            "prompts of 1 points: unavailable",
        ),
        (
            FAKE,
            lambda d: d["measurement_protocol"].update(synthetic_content="sharegpt"),
            "prompts of 3 points: not derivable (sharegpt content)",
        ),
        (
            MEDIAN,
            lambda d: [
                d.update(warmup_evidence={"status": "unavailable", "records": []}),
                *(measurement(d, n)["preparation"].update(warmup_records_before=None) for n in range(3)),
            ],
            "warm-ups: unavailable",
        ),
        (
            MEDIAN,
            lambda d: record(d, 0).update(status="failed"),
            "warm-ups: 1 not completed (global)",
        ),
        (
            MEDIAN,
            lambda d: d["timing"].update(completed_at=d["timing"]["completed_at"].replace("2026", "2027")),
            " s by the monotonic clock",
        ),
        (
            MOE,
            lambda d: [
                measurement(d)["prompts"]["requests"][0].update(num_tokens=151),
                measurement(d)["prompts"].update(sha256=digest_of(measurement(d)["prompts"]["requests"])),
            ],
            "prompts of 1 points: longer or shorter than their contexts",
        ),
        (
            MOE,
            lambda d: d["kvwarm"]["stages"][0].update(depth=160),
            "kvwarm.stages: 1 chains of another depth than their batch asks for",
        ),
        (
            MOE,
            lambda d: [d["kvwarm"]["stages"][0].update(failed=True), d["kvwarm"]["stages"][0].pop("build_seconds")],
            "kvwarm: 1 chains of real KV failed",
        ),
    ],
)
def test_what_is_not_established_is_said(name: str, change: Callable[[Document], Any], line: str):
    found = open_in(document_of(name), change)
    assert any(line in each for each in found), found


def test_artifacts_that_no_merge_takes_are_left_to_it():
    document = sample(MEDIAN)
    cell = cell_of(document)
    document["results"][1]["fpms"] = []
    assert list(failures(cell, artifacts_of(document))) == []
    assert list(gaps(cell, artifacts_of(document))) == []
    document["results"] = []
    assert list(failures(cell, artifacts_of(document))) == []


def digest_of(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


@pytest.mark.parametrize("name", [FAKE, ROWS, NATIVE, MOE, "d161_moe_realkv_agg/decode"])
def test_two_ranks_are_judged_each_by_its_own(name: str):
    ranks = two_ranks(document_of(name))
    cell, found = cell_of(ranks[0], **TWO_RANKS), artifacts_of(*ranks)
    files = [Path("benchmark.json"), Path("benchmark_dp1.json")]
    assert list(findings(Ranks(files, [json.dumps(rank).encode() for rank in ranks]))) == []
    assert list(failures(cell, found)) == []
    expected = [gap for rank in (0, 1) for gap in GAPS[name] if not (rank and "grid_digest" in gap)]
    assert [gap.removeprefix("rank 0 ").removeprefix("rank 1 ") for gap in gaps(cell, found)] == expected


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            lambda d: measurement(d, 0)["prompts"]["requests"][0].update(sha256="0" * 64),
            "rank 1 benchmark_id=1 prompt of",
        ),
        (lambda d: d["config"].update(output_path="a.json"), "rank 1 config.output_path: expected _dp1 at its end"),
        (
            lambda d: d["synchronization"].update(port=1),
            "rank 1 synchronization: expected that of rank 0, found another",
        ),
        (lambda d: d["capacity"].update(common=None), "rank 1 capacity: expected that of rank 0, found another"),
        (
            lambda d: d["limits"].update(num_gpu_blocks=9000),
            "usable_blocks_without_watermark: expected 8999, found 16383",
        ),
        (lambda d: raw(d, 2, 0).update(version=0), "rank 1 benchmark_id=3 raw sample 0 version: expected 1, found 0"),
        (lambda d: record(d, 1).update(kind="global"), "rank 1 warmup_evidence global records: expected 1, found 2"),
        (lambda d: d.pop("cudagraph") and d.update(cudagraph={}), "rank 1 cudagraph: expected Cudagraph"),
    ],
)
def test_the_second_rank_is_judged_too(change: Callable[[Document], Any], line: str):
    ranks = two_ranks(document_of(FAKE))
    cell = cell_of(ranks[0], **TWO_RANKS)
    change(ranks[1])
    found = list(failures(cell, artifacts_of(*ranks)))
    assert any(line in each for each in found), found


def with_graphs() -> tuple[FrozenCell, Document]:
    """A decode sample of 1.6.1 as an engine with graphs would have left it: batches 1 and 4 captured as 1 and 8."""
    document = document_of("d161_dense_agg/decode")
    cell = cell_of(document, engine={"kv_cache_memory_bytes": 1 << 28})
    document["cudagraph"] = {
        "mode": "FULL_AND_PIECEWISE",
        "prefill_mode": "PIECEWISE",
        "decode_mode": "FULL",
        "max_capture_size": 32,
        "capture_sizes": [1, 8, 32],
        "prefill_capture_sizes": [1, 8, 32],
        "decode_capture_sizes": [1, 8],
    }
    document["engine"]["graph"].update(cudagraph_mode="FULL_AND_PIECEWISE", cudagraph_capture_sizes=[1, 8, 32])
    document["kvwarm"]["points_fake_fallback"] = 2
    grid = []
    for row, capture, padding in zip(document["results"], (1, 8), (0, 4), strict=True):
        row["point"] |= {"expected_cudagraph_mode": "FULL", "expected_capture_size": capture, "padding_tokens": padding}
        row["point"]["sample_reasons"] = ["explicit", "capture", "kvwarm_fake_fallback"]
        grid.append(row["point"] | {"sample_reasons": ["explicit", "capture"]})
    document["grid_digest"] = digest_of(grid)
    return cell, document


def test_an_engine_with_graphs_has_no_replicas():
    cell, document = with_graphs()
    assert list(failures(cell, artifacts_of(document))) == []
    assert list(gaps(cell, artifacts_of(document))) == [NO_EVIDENCE]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            lambda d: d["results"][1]["point"].update(padding_tokens=3),
            "benchmark_id=2 padding_tokens: expected 4, found 3",
        ),
        (
            lambda d: d["results"][1]["point"].update(expected_capture_size=4),
            "expected_capture_size: expected 8, found 4",
        ),
        (
            lambda d: d["results"][0]["point"].update(expected_cudagraph_mode="PIECEWISE"),
            "benchmark_id=1 expected_cudagraph_mode: expected FULL, found PIECEWISE",
        ),
        (lambda d: d["cudagraph"].update(decode_capture_sizes=[1]), "decode_capture_sizes: expected [1, 8], found [1]"),
        (lambda d: d["cudagraph"].update(prefill_capture_sizes=[1]), "prefill_capture_sizes: expected [1, 8, 32]"),
        (
            lambda d: d["cudagraph"].update(prefill_mode="FULL"),
            "cudagraph.prefill_mode: expected PIECEWISE, found FULL",
        ),
        (lambda d: d["cudagraph"].update(capture_sizes=[8, 1, 32]), "cudagraph.capture_sizes: expected [1, 8, 32]"),
    ],
)
def test_graphs_that_do_not_fit_are_found(change: Callable[[Document], Any], line: str):
    cell, document = with_graphs()
    change(document)
    found = list(failures(cell, artifacts_of(document)))
    assert any(line in each for each in found), found


FREE = re.compile(
    r"config\.(timeout|output_path|collect_imbalanced|hybrid_live_state|\w+_samples)"
    r"|engine\.attention\.\w+|engine\.parallel\.(all2all_backend|eplb_config\.\w+|enable_expert_parallel)"
    r"|engine\.kv_cache\.(kv_cache_layout|enable_prefix_caching)|engine\.kv_cache\.groups\.\d+\.\w+"
    r"|engine\.scheduler\.(enable_chunked_prefill|long_prefill_token_threshold)"
    r"|engine\.model\.(architectures\.\d+|model|model_type)|engine\.versions\.(dynamo|python|vllm_build_commit)"
    r"|capacity\.common\.grid_invariants_digest|run_id"
    r"|kvwarm\.(dataset\.\w+|giant_kv_\w+|stages\.\d+\.build_seconds)"
    r"|measurement_protocol\.(content_seed|synthetic_pool_tag)"
    r"|measurement_protocol\.preparation\.(prefill_real_seed|decode_real_kv_warmup|giant_kv_\w+)"
)
"""Leaves that one change may pass through, as the module says; everything else of an artifact is witnessed."""


def leaves(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if not value or not isinstance(value, dict | list):
        yield path
    for key, child in children:
        yield from leaves(child, (*path, key))


def other(value: Any) -> Any:
    """Another value of the same type."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, str):
        return value[:-1] + ("1" if value.endswith("0") else "0")
    return [1] if value == [] else {"x": 1} if value == {} else value + 1


@pytest.mark.parametrize("name", [MEDIAN, ROWS, NATIVE, OLD])
def test_one_changed_leaf_is_noticed_unless_nothing_else_witnesses_it(name: str):
    document = sample(name)
    cell, text = cell_of(document), json.dumps(document)
    before = list(gaps(cell, artifacts_of(document)))
    unnoticed = []
    for path in leaves(document):
        if path[0] == "iteration_groups":
            continue
        changed = json.loads(text)
        places = [path]
        if path[0] == "results" and path[2] == "point":
            places.append(("iteration_groups", *path[1:]))
        if path[0] == "results" and path[2] == "fpms":
            places.append(("iteration_groups", path[1], "rank_results", 0, *path[2:]))
        for place in places:
            *parents, last = place
            block = changed
            for key in parents:
                block = block[key]
            block[last] = other(block[last])
        try:
            artifacts = artifacts_of(changed)
        except msgspec.ValidationError:
            continue
        merge = findings(Ranks([Path("benchmark.json")], [json.dumps(changed).encode()]))
        if not (list(merge) or list(failures(cell, artifacts)) or list(gaps(cell, artifacts)) != before):
            unnoticed.append(".".join(map(str, path)))
    assert [path for path in unnoticed if not FREE.fullmatch(path)] == []
