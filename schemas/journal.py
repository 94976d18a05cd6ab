"""repetitions.jsonl: what happened, line by line, synced before the next point starts.

A session line opens each engine start; a point line follows each finished point. The rank artifact is a pure
function of the cell and these lines.
"""

from typing import Any, Literal

import msgspec

from schemas.native import CudagraphObservation, Prompts, RejectedRepetition, ScheduledRequests, Struct


class RankSession(Struct, frozen=True):
    """One data-parallel rank's engine. `engine`, `limits`, `cudagraph` and `capacity` become blocks of its artifact.

    `runtime` holds the records of this launch (`schemas.observation`): `workers` and `scheduler`, without nulls.
    """

    dp_rank: int
    device_name: str
    engine_start_seconds: float
    engine: dict[str, Any]
    limits: dict[str, int]
    cudagraph: dict[str, Any]
    capacity: dict[str, Any]
    runtime: dict[str, Any]


class SessionLine(Struct, frozen=True, tag_field="kind", tag="session"):
    """One start of the engines of all data-parallel ranks, in rank order.

    `previous_sha256` is the sha256 of the line before, or of nothing for the first: a line that is edited or lost
    breaks the chain.
    """

    previous_sha256: str
    cell_digest: str
    session: int
    run_id: str
    started_at: str
    producer: dict[str, Any]
    ranks: list[RankSession]


class SeedLine(Struct, frozen=True):
    """One seed request, of `prefix_tokens` and one more: `cached_tokens` it found, `computed_tokens` it ran."""

    slot: int
    prefix_tokens: int
    attempt: int
    cached_tokens: int
    computed_tokens: int


class Span(Struct, frozen=True):
    """Forwards [forward_index_start, forward_index_end) of a warm-up, with the first and last of its steps."""

    kind: Literal["real_prefix_seed", "eager_shape"]
    forward_index_start: int
    forward_index_end: int
    first: ScheduledRequests
    last: ScheduledRequests


class Repetition(Struct, frozen=True):
    """One accepted repetition: its measured step. Times are seconds of the rank process's monotonic clock.

    `overhead_seconds` is what this producer's own code took of the interval.
    """

    ordinal: int
    forward_index: int
    basis: Literal["schedule_to_output", "inter_output"]
    start_monotonic: float
    end_monotonic: float
    overhead_seconds: float
    scheduled_requests: ScheduledRequests
    cudagraph: CudagraphObservation
    prompts_sha256: str


class RankPoint(Struct, frozen=True):
    """What one data-parallel rank did for a point.

    `seconds` by kind of step, beside `wall`, `overhead` (our code in all `steps` forwards) and `writing` (of the line
    before this one). `device_state` is what the device said of its clocks afterwards, None where nobody can ask it.
    """

    seeds: list[SeedLine]
    warmups: list[Span]
    warmup_ordinals: list[int]
    repetitions: list[Repetition]
    rejections: list[RejectedRepetition]
    prompts: Prompts
    steps: int
    seconds: dict[str, float]
    device_state: dict[str, float] | None


class PointLine(Struct, frozen=True, tag_field="kind", tag="point"):
    """One point that every rank finished, in rank order. `benchmark_id` is its place in the frozen list, from 1."""

    previous_sha256: str
    benchmark_id: int
    session: int
    kv_seed_regime: str
    ranks: list[RankPoint]
    completed_at: str


Line = SessionLine | PointLine

SESSIONS_AGREE = ("cell_digest", "run_id", "producer")
RANK_SESSIONS_AGREE = ("dp_rank", "device_name", "engine", "cudagraph")
"""What every session of a journal has in common; otherwise its points are of different engines."""

decode_rank_point = msgspec.json.Decoder(RankPoint).decode
decode_rank_session = msgspec.json.Decoder(RankSession).decode
decode_line = msgspec.json.Decoder(Line).decode
encode_line = msgspec.json.Encoder().encode
