"""The rank artifact (Dynamo's self-benchmark, schema_version 2), as msgspec structs: bulk records parse fast.

It is ours, and Dynamo's of 1.6.1 and 1.7. Keys stand in the order in which the original writes them. A field with
`UNSET` is left out when absent, since presence carries meaning; blocks that are no bulk stay plain mappings.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from schemas.canonical import read_bytes, sha256, write_atomic
from schemas.errors import Refusal

SCHEMA_VERSION = 2

REGIME_STAMPS = {
    "real_prefix": "prefill_real_seed",
    "fake_prefix": "prefill_fake_prefix",
    "real_kv": "kvwarm_real_kv",
    "fake_fallback": "kvwarm_fake_fallback",
}
"""Native seed regime -> the one stamp that its rows carry in `sample_reasons`; every other regime carries none."""


Int = Annotated[int, Meta(ge=-(2**53), le=2**53)]
"""An integer that every reader of JSON reads alike: beyond 2^53 some of them round."""


class Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """Immutable, and no key goes unread. Without cycles, so the collector need not look at a million of them."""


T = TypeVar("T", bound=Struct)


class ScheduledRequests(Struct, frozen=True):
    """Requests and tokens of one forward pass; variances are population variances."""

    num_prefill_requests: Int
    sum_prefill_tokens: Int
    var_prefill_length: float
    sum_prefill_kv_tokens: Int
    num_decode_requests: Int
    sum_decode_kv_tokens: Int
    var_decode_kv_tokens: float


class QueuedRequests(Struct, frozen=True):
    """Requests that wait beside a forward pass, and their tokens."""

    num_prefill_requests: Int
    sum_prefill_tokens: Int
    var_prefill_length: float
    num_decode_requests: Int
    sum_decode_kv_tokens: Int
    var_decode_kv_tokens: float


NONE_QUEUED = QueuedRequests(0, 0, 0.0, 0, 0, 0.0)


class Timing(Struct, frozen=True):
    """Seconds of one process's monotonic clock; wall time is their difference."""

    basis: Literal["schedule_to_output", "inter_output"]
    start_monotonic: float | None
    end_monotonic: float


class CudagraphObservation(Struct, frozen=True):
    """vLLM's `cudagraph_stats` of the step; unavailable means not observed, never "NONE"."""

    status: Literal["observed", "unavailable"]
    runtime_mode: str | None
    num_unpadded_tokens: Int | None
    num_padded_tokens: Int | None
    num_paddings: Int | None


UNOBSERVED = CudagraphObservation("unavailable", None, None, None, None)


class BenchmarkSample(Struct, frozen=True):
    """`sample_index` is the position in `raw_fpms`; `forward_index` counts this rank's non-empty forwards.

    `repetition` is the place among all submissions of the point, warm-ups and rejected ones included: with the point's
    key it gives the prompts again. `producer_overhead_seconds` is what the producer's own code took of the interval.
    """

    sample_index: Int
    forward_index: Int
    timing: Timing
    cudagraph: CudagraphObservation
    repetition: Int | UnsetType = UNSET
    producer_overhead_seconds: float | UnsetType = UNSET


class RawFpm(Struct, frozen=True):
    """One measured forward pass before reduction."""

    version: Int
    worker_id: str
    dp_rank: Int
    counter_id: Int
    wall_time: float
    scheduled_requests: ScheduledRequests
    queued_requests: QueuedRequests
    benchmark_sample: BenchmarkSample


class PromptDigest(Struct, frozen=True):
    slot: Int
    num_tokens: Int
    sha256: str


class Prompts(Struct, frozen=True):
    """sha256 of each prompt's ids as little-endian uint32; the outer one is over the requests' canonical JSON."""

    status: Literal["recorded", "unavailable"]
    requests: list[PromptDigest]
    sha256: str | None


class RejectedRepetition(Struct, frozen=True):
    """A repetition that did not run as the point says: `chunks` are [cached, scheduled] of each slot, by step."""

    ordinal: Int
    reason: str
    chunks: list[list[list[Int]]]


class Preparation(Struct, frozen=True):
    grid_digest: str
    completed_points_before: Int
    kv_seed_regime: str
    warmup_records_before: Int | None


class Estimate(Struct, frozen=True):
    method: Literal["single_step", "last_step", "adjacent_upper_median"]
    raw_sample_indices: list[Int]


class BenchmarkMeasurement(Struct, frozen=True):
    """How a retained value came to be. `repetition_line_sha256` binds it to its line of repetitions.jsonl.

    `session` is the engine start that it is from (clocks of two starts do not compare), `rejections` what ran otherwise
    and does not count, `device_state` what the device said of its clocks afterwards, where it can be asked.
    """

    schema_version: Int
    point_key: str
    dp_rank: Int
    prompts: Prompts
    preparation: Preparation
    expected_internal_samples: Int
    raw_fpms: list[RawFpm]
    estimate: Estimate
    repetition_line_sha256: str | UnsetType = UNSET
    session: Int | UnsetType = UNSET
    rejections: list[RejectedRepetition] | UnsetType = UNSET
    device_state: dict[str, float] | UnsetType = UNSET


class Fpm(Struct, frozen=True):
    """The retained forward-pass metric of one point on one rank; `wall_time` in seconds.

    Dynamo alone writes `kvwarm_giant_median_of`, the steady steps whose upper median this is, and its mark.
    """

    version: Int
    worker_id: str
    dp_rank: Int
    counter_id: Int
    wall_time: float
    scheduled_requests: ScheduledRequests
    queued_requests: QueuedRequests
    kvwarm_giant_median_of: Int | UnsetType = UNSET
    kvwarm_steady_sample: bool | UnsetType = UNSET
    benchmark_measurement: BenchmarkMeasurement | UnsetType = UNSET


class NativePoint(Struct, frozen=True):
    point_type: Literal["prefill", "decode"]
    benchmark_id: Int
    total_prefill_tokens: Int
    total_kv_read_tokens: Int
    batch_size: Int
    expected_cudagraph_mode: str
    expected_capture_size: Int | None
    padding_tokens: Int | None
    sample_reasons: list[str]
    partition: dict[str, Any] | None
    rows: list[list[Int]] | None
    dp_rank: Int | UnsetType = UNSET


class Row(Struct, frozen=True):
    """One point on one rank; Dynamo's oldest artifacts say nothing of its seed regime."""

    point: NativePoint
    kv_seed_regime: str | None
    fpms: list[Fpm]


class RankResult(Struct, frozen=True):
    dp_rank: Int
    fpms: list[Fpm]


class IterationGroup(Struct, frozen=True):
    """One point over all data-parallel ranks; `wall_time` is the slowest rank's, in seconds."""

    benchmark_id: Int
    point: NativePoint
    expected_dp_ranks: list[Int]
    complete: bool
    wall_time: float
    rank_results: list[RankResult]


class ArtifactTiming(Struct, frozen=True):
    started_at: str
    completed_at: str
    benchmark_elapsed_seconds: float
    measured_iteration_seconds: float
    rank_benchmark_elapsed_seconds: dict[str, float] | UnsetType = UNSET


class Coverage(Struct, frozen=True):
    expected_points: Int
    completed_points: Int
    skipped_points: Int


class DpRank(Struct, frozen=True):
    rank: Int
    size: Int


class Session(Struct, frozen=True):
    """One engine start of a cell: how long it took, and how many points it finished until when."""

    session: Int
    started_at: str
    engine_start_seconds: float
    points: Int
    last_point_at: str | None


class RankArtifact(Struct, frozen=True, kw_only=True):
    """`benchmark.json` (rank 0) or `benchmark_dp<r>.json`.

    Dynamo 1.6.1 has neither `measurement_protocol` nor `warmup_evidence`, nor a measurement in any value.
    """

    schema_version: Int
    kvwarm: dict[str, Any] | UnsetType = UNSET
    artifact_type: Literal["rank"]
    status: Literal["complete", "partial", "failed"]
    valid: bool
    usable: bool
    stop_reason: str | None
    timing_valid: bool
    run_id: str
    grid_digest: str | None
    timing: ArtifactTiming
    dp: DpRank
    synchronization: dict[str, Any]
    coverage: Coverage
    config: dict[str, Any]
    limits: dict[str, Int]
    recurrent_state: dict[str, Any]
    measurement_protocol: dict[str, Any] | UnsetType = UNSET
    warmup_evidence: dict[str, Any] | UnsetType = UNSET
    measurement_policy: dict[str, str]
    synthetic_prompts: dict[str, Any]
    capacity: dict[str, Any]
    cudagraph: dict[str, Any]
    engine: dict[str, Any] | UnsetType = UNSET
    results: list[Row]
    iteration_groups: list[IterationGroup]
    skipped_points: list[Any]
    missing_phases: list[str]
    error: str | None
    sessions: list[Session] | UnsetType = UNSET


class CellReceipt(Struct, frozen=True):
    """`receipt.json`: the files of a finished cell by digest, and where its seconds went, as rank 0 saw it.

    `breakdown` adds up to `measuring_seconds`; `idle_fraction` is the part of it outside engine steps.
    `writing_seconds` went into the journal, between points. `overhead` is the producer's own code: seconds, forwards,
    microseconds a forward.
    """

    schema_version: Int
    cell_digest: str
    files: dict[str, str]
    sessions: list[Session]
    engine_start_seconds: float
    measuring_seconds: float
    writing_seconds: float
    breakdown: dict[str, float]
    idle_fraction: float
    seeding: dict[str, float]
    rejected_repetitions: Int
    overhead: dict[str, float]


def read_struct(cls: type[T], path: Path, what: str) -> T:
    """`path` as a struct, strictly: a bool is no int, NaN is refused, unknown keys are refused."""
    try:
        return msgspec.json.decode(read_bytes(path, what), type=cls)
    except msgspec.MsgspecError as error:
        raise Refusal(what, f"a {cls.__name__}", str(error), path) from None


def struct_bytes(struct: Struct) -> bytes:
    """The file of a struct: JSON with two spaces, keys in the order of the fields."""
    return msgspec.json.format(msgspec.json.encode(struct), indent=2)


def write_struct(path: Path, struct: Struct) -> str:
    """Write `struct`, atomically; returns the sha256 of the file."""
    data = struct_bytes(struct)
    write_atomic(path, data)
    return sha256(data)
