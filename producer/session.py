"""How a point is measured: a conversation with the engine, free of any engine import.

`measure` yields submissions (requests that enter the engine together) and is sent the steps in which they ran.
It decides nothing about the engine: it checks that what the engine's own record shows is what the point says.
Data-parallel ranks hold the same conversation, each with its own engine, and agree wherever one could differ.
"""

from array import array
from collections.abc import Callable, Generator, Iterable
from typing import NamedTuple

import msgspec

from producer.contracts import Contract
from producer.exclusive import utc_now
from producer.partition import RequestShape, request_shapes
from producer.seeding import execution_order
from producer.tokens import TokenStream, ids_sha256
from schemas.canonical import digest
from schemas.journal import PointLine, RankPoint, Repetition, SeedLine, Span, decode_rank_point
from schemas.native import CudagraphObservation, PromptDigest, Prompts, RejectedRepetition, ScheduledRequests
from schemas.points import DecodePoint, Phase, Point, PrefillPoint, point_key

DECODE_MAX_TOKENS = 3
"""The prefill's token, the first decode step's, and the second decode step's: the measured one."""


SAMPLING_TEMPERATURE = 1.0
"""As servers and Dynamo's self-benchmark sample. A step ends with sampling, and greedy sampling is the cheaper one."""

SEED_ROUNDS = 3
"""How often lost prefixes are seeded before a repetition: in a tight pool one slot's seed can cost another's prefix."""


class RequestSpec(NamedTuple):
    """One request to submit: its prompt, `prefix` tokens of which its slot shares, and how many tokens it generates."""

    slot: int
    prompt: "array[int]"
    max_tokens: int
    prefix: int = 0


class Submission(NamedTuple):
    """Requests that enter the engine together, and the forwards they should take (0: as many as it needs).

    Data-parallel ranks do not wait for each other within those forwards.
    """

    requests: tuple[RequestSpec, ...]
    expected_steps: int = 0


class Chunk(NamedTuple):
    """What one request did in one step: tokens computed before it, tokens scheduled in it, its prompt's length."""

    computed: int
    scheduled: int
    prompt: int


class Step(NamedTuple):
    """One non-empty forward pass as the engine's scheduler recorded it; seconds of the monotonic clock.

    `start` is the end of scheduling, `end` the arrival of the output, `previous_end` the arrival before it.
    `overhead` is the time that our own code took since `previous_end`.
    """

    forward_index: int
    chunks: dict[int, Chunk]
    start: float
    end: float
    previous_end: float | None
    overhead: float
    cudagraph: CudagraphObservation


class MeasurementFailed(Exception):
    """A point could not be measured as planned."""


Conversation = Generator[Submission, list[Step], None]


class Spent(NamedTuple):
    """What the scheduler counted so far: seconds in our overrides, and forwards."""

    overhead_seconds: float
    steps: int


class Host(NamedTuple):
    """What the conversation asks of the process that it runs in.

    `cached_tokens` is the prefix of a request that the engine would find in its cache now; `exchange` gives every
    rank's value, in rank order; `started` and `rejected` tell a watcher; `finish` writes a line (rank 0 alone does)
    and returns the seconds that took.
    """

    clock: Callable[[], float]
    spent: Callable[[], Spent]
    cached_tokens: Callable[[RequestSpec], int]
    exchange: Callable[[bytes], list[bytes]]
    device_state: Callable[[], dict[str, float] | None]
    started: Callable[[int], None]
    rejected: Callable[[], None]
    finish: Callable[[PointLine], float]


def _variance(values: list[int]) -> float:
    if not values:
        return 0.0
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / len(values)


def scheduled_requests(step: Step) -> ScheduledRequests:
    """The FPM counts of a step: a request is prefill until its prompt is computed."""
    prefill = [chunk for chunk in step.chunks.values() if chunk.computed < chunk.prompt]
    decode = [chunk.computed for chunk in step.chunks.values() if chunk.computed >= chunk.prompt]
    return ScheduledRequests(
        num_prefill_requests=len(prefill),
        sum_prefill_tokens=sum(chunk.scheduled for chunk in prefill),
        var_prefill_length=_variance([chunk.prompt for chunk in prefill]),
        sum_prefill_kv_tokens=sum(chunk.computed for chunk in prefill),
        num_decode_requests=len(decode),
        sum_decode_kv_tokens=sum(decode),
        var_decode_kv_tokens=_variance(decode),
    )


def expected_chunks(point: Point, shape: RequestShape) -> list[tuple[int, int]]:
    """(computed, scheduled) of one request in each step of a repetition of `point`."""
    first = (shape.prefix, shape.new_tokens)
    if isinstance(point, PrefillPoint):
        return [first]
    return [first, (shape.prompt, 1), (shape.prompt + 1, 1)]


def _mismatch(point: Point, shapes: tuple[RequestShape, ...], steps: list[Step]) -> str:
    """Why the steps of a repetition are not the point's; empty when they are."""
    expected = [expected_chunks(point, shape) for shape in shapes]
    if len(steps) != len(expected[0]):
        return f"expected {len(expected[0])} steps, found {len(steps)}"
    for number, step in enumerate(steps):
        if set(step.chunks) != set(range(len(shapes))):
            return f"step {number}: expected {len(shapes)} requests, found {len(step.chunks)}"
        for slot, chunk in step.chunks.items():
            wanted, found = expected[slot][number], (chunk.computed, chunk.scheduled)
            if found != wanted:
                return f"step {number} slot {slot}: expected (cached, scheduled) {wanted}, found {found}"
    return ""


def kv_seed_regime(point: Point) -> str:
    """The native regime of a point seeded with real tokens."""
    if isinstance(point, DecodePoint):
        return "real_kv"
    return "real_prefix" if point.total_kv_read_tokens else "not_applicable"


def prompts_of(requests: Iterable[RequestSpec]) -> Prompts:
    """The digests of a repetition's prompts."""
    digests = [
        PromptDigest(slot=request.slot, num_tokens=len(request.prompt), sha256=ids_sha256(request.prompt))
        for request in requests
    ]
    outer = digest([{"slot": d.slot, "num_tokens": d.num_tokens, "sha256": d.sha256} for d in digests])
    return Prompts(status="recorded", requests=digests, sha256=outer)


def repetition_requests(
    stream: TokenStream, phase: Phase, point: Point, shapes: tuple[RequestShape, ...], ordinal: int
) -> tuple[RequestSpec, ...]:
    """The requests of repetition `ordinal` of a point: derived from the specification alone."""
    key = point_key(phase, point)
    max_tokens = DECODE_MAX_TOKENS if isinstance(point, DecodePoint) else 1
    return tuple(
        RequestSpec(slot, stream.prompt(key, ordinal, slot, shape.prefix, shape.prompt), max_tokens, shape.prefix)
        for slot, shape in enumerate(shapes)
    )


class Attempts:
    """Numbers the seed requests of an engine, so that no two are the same."""

    def __init__(self) -> None:
        self._last = 0

    def next(self) -> int:
        self._last += 1
        return self._last


def _agreed(host: Host, slots: list[int]) -> list[int]:
    """The slots that any rank names."""
    everyone = [msgspec.json.decode(data, type=list[int]) for data in host.exchange(msgspec.json.encode(slots))]
    return sorted(set().union(*everyone))


def _rejection(host: Host, reason: str) -> str:
    """Why any rank rejects the repetition; empty when none does. All ranks then run it again."""
    reasons = [data.decode() for data in host.exchange(reason.encode())]
    if len(reasons) == 1:
        return reasons[0]
    return "; ".join(f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason)


def _seed(
    stream: TokenStream, attempts: Attempts, shapes: tuple[RequestShape, ...], missing: list[int]
) -> Generator[Submission, list[Step], tuple[list[SeedLine], Span, float]]:
    """Build the prefixes of the slots `missing`: one request a slot, all at once."""
    attempt = attempts.next()
    requests = tuple(
        RequestSpec(slot, stream.seed_prompt(slot, shapes[slot].prefix, attempt), 1, shapes[slot].prefix)
        for slot in missing
    )
    steps = yield Submission(requests)
    seeds = []
    for slot in missing:
        chunks = [step.chunks[slot] for step in steps if slot in step.chunks]
        seeds.append(
            SeedLine(
                slot=slot,
                prefix_tokens=shapes[slot].prefix,
                attempt=attempt,
                cached_tokens=chunks[0].computed,
                computed_tokens=sum(chunk.scheduled for chunk in chunks),
            )
        )
    return seeds, _span("real_prefix_seed", steps), _busy(steps)


def _busy(steps: list[Step]) -> float:
    return sum(step.end - step.start for step in steps)


def _span(kind: str, steps: list[Step]) -> Span:
    return Span(
        kind=kind,  # type: ignore[arg-type]
        forward_index_start=steps[0].forward_index,
        forward_index_end=steps[-1].forward_index + 1,
        first=scheduled_requests(steps[0]),
        last=scheduled_requests(steps[-1]),
    )


class _PointRecord:
    """What a point's line collects on one rank while it runs."""

    def __init__(self) -> None:
        self.seeds: list[SeedLine] = []
        self.warmups: list[Span] = []
        self.warmup_ordinals: list[int] = []
        self.repetitions: list[Repetition] = []
        self.rejections: list[RejectedRepetition] = []
        self.prompts: Prompts | None = None
        self.seconds = {"seeding": 0.0, "warmup": 0.0, "scaffolding": 0.0, "measured": 0.0, "rejected": 0.0}


def measure_point(
    stream: TokenStream,
    contract: Contract,
    host: Host,
    attempts: Attempts,
    phase: Phase,
    point: Point,
    shapes: tuple[RequestShape, ...],
) -> Generator[Submission, list[Step], _PointRecord]:
    """Seed, warm up, and measure one point.

    Before each repetition the engine is asked which prefixes it still has, and the lost ones are seeded again. A
    repetition whose steps are not the point's is recorded with its reason and run again under a new ordinal,
    `contract.max_rejections` times at most.

    Raises:
        MeasurementFailed: too many rejected repetitions.
    """
    record = _PointRecord()
    measurement = contract.measurement
    steps_of_repetition = len(expected_chunks(point, shapes[0]))
    ordinal = 0
    while len(record.repetitions) < measurement.measurement_repeats:
        requests = repetition_requests(stream, phase, point, shapes, ordinal)
        for _ in range(SEED_ROUNDS):
            missing = [r.slot for r in requests if host.cached_tokens(r) < shapes[r.slot].prefix]
            if not (missing := _agreed(host, missing)):
                break
            seeds, span, busy = yield from _seed(stream, attempts, shapes, missing)
            record.seeds += seeds
            record.warmups.append(span)
            record.seconds["seeding"] += busy
        prompts = prompts_of(requests)
        steps = yield Submission(requests, steps_of_repetition)
        busy = _busy(steps)
        reason = _rejection(host, _mismatch(point, shapes, steps))
        if reason:
            record.seconds["rejected"] += busy
            chunks = [[[c.computed, c.scheduled] for _, c in sorted(step.chunks.items())] for step in steps]
            record.rejections.append(RejectedRepetition(ordinal=ordinal, reason=reason, chunks=chunks))
            host.rejected()
            if len(record.rejections) > contract.max_rejections:
                raise MeasurementFailed(f"{len(record.rejections)} rejected repetitions: {reason}")
        elif len(record.warmup_ordinals) < measurement.warmup_repeats:
            record.warmup_ordinals.append(ordinal)
            record.warmups.append(_span("eager_shape", steps))
            record.seconds["warmup"] += busy
        else:
            repetition = _measured(steps, ordinal, isinstance(point, DecodePoint), prompts)
            if len(record.repetitions) == 1:
                record.prompts = prompts
            record.repetitions.append(repetition)
            record.seconds["measured"] += steps[-1].end - steps[-1].start
            record.seconds["scaffolding"] += busy - (steps[-1].end - steps[-1].start)
        ordinal += 1
    return record


def _measured(steps: list[Step], ordinal: int, is_decode: bool, prompts: Prompts) -> Repetition:
    step = steps[-1]
    start = step.previous_end if is_decode else step.start
    assert start is not None
    assert prompts.sha256 is not None
    return Repetition(
        ordinal=ordinal,
        forward_index=step.forward_index,
        basis="inter_output" if is_decode else "schedule_to_output",
        start_monotonic=start,
        end_monotonic=step.end,
        overhead_seconds=step.overhead if is_decode else 0.0,  # a prefill's interval starts after our code
        scheduled_requests=scheduled_requests(step),
        cudagraph=step.cudagraph,
        prompts_sha256=prompts.sha256,
    )


def measure(
    stream: TokenStream,
    contract: Contract,
    host: Host,
    phase: Phase,
    points: tuple[Point, ...],
    hit_alignment: int,
    finished: frozenset[int],
    session: int,
) -> Conversation:
    """Measure every point that is not `finished`, in generational order; `host.finish` is called after each."""
    attempts = Attempts()
    writing = 0.0
    for index in execution_order(points, hit_alignment):
        if index + 1 in finished:
            continue
        host.started(index + 1)
        point, began, before = points[index], host.clock(), host.spent()
        shapes = request_shapes(point, hit_alignment)
        record = yield from measure_point(stream, contract, host, attempts, phase, point, shapes)
        assert record.prompts is not None
        wall, spent = host.clock() - began, host.spent()
        own = RankPoint(
            seeds=record.seeds,
            warmups=record.warmups,
            warmup_ordinals=record.warmup_ordinals,
            repetitions=record.repetitions,
            rejections=record.rejections,
            prompts=record.prompts,
            steps=spent.steps - before.steps,
            seconds={
                **record.seconds,
                "wall": wall,
                "overhead": spent.overhead_seconds - before.overhead_seconds,
                "writing": writing,
            },
            device_state=host.device_state(),
        )
        writing = host.finish(
            PointLine(
                previous_sha256="",
                benchmark_id=index + 1,
                session=session,
                kv_seed_regime=kv_seed_regime(point),
                ranks=[decode_rank_point(data) for data in host.exchange(msgspec.json.encode(own))],
                completed_at=utc_now(),
            )
        )
