"""What one data-parallel rank did for a point, against the point, its contract, and what it did before."""

import math
from collections.abc import Iterator
from itertools import groupby, pairwise
from statistics import pvariance

from producer.contracts import GLM53FLASH, Contract
from producer.partition import RequestShape
from producer.session import expected_chunks, prompts_of, repetition_requests
from producer.tokens import TokenStream
from schemas.journal import RankPoint, SeedLine, Span
from schemas.native import CudagraphObservation, ScheduledRequests
from schemas.plan import FrozenCell
from schemas.points import DecodePoint, Point

from rank_checks import close

BUSY = ("seeding", "warmup", "scaffolding", "measured", "rejected")
"""Seconds of a point's steps, by kind (`measure_point`)."""

SECONDS = {*BUSY, "wall", "overhead", "writing"}


def counts(requests: list[tuple[int, int, int]]) -> ScheduledRequests:
    """What the engine's scheduler counts in a step of requests (prompt, computed before, scheduled in it)."""
    prefill = [(prompt, computed, scheduled) for prompt, computed, scheduled in requests if computed < prompt]
    contexts = [computed for prompt, computed, _ in requests if computed >= prompt]
    return ScheduledRequests(
        num_prefill_requests=len(prefill),
        sum_prefill_tokens=sum(scheduled for _, _, scheduled in prefill),
        var_prefill_length=float(pvariance(prompt for prompt, _, _ in prefill)) if prefill else 0.0,
        sum_prefill_kv_tokens=sum(computed for _, computed, _ in prefill),
        num_decode_requests=len(contexts),
        sum_decode_kv_tokens=sum(contexts),
        var_decode_kv_tokens=float(pvariance(contexts)) if contexts else 0.0,
    )


def differences(expected: ScheduledRequests, found: ScheduledRequests) -> str:
    """The counts that differ, in words; variances to the last bits that their way of adding up leaves open."""
    return ", ".join(
        f"{field} expected {want}, found {have}"
        for field in expected.__struct_fields__
        if not math.isclose(want := getattr(expected, field), have := getattr(found, field), rel_tol=1e-9)
    )


def steps_of(point: Point) -> int:
    """Forwards of a repetition: a decode one computes its prompt's tail, then two decode steps."""
    return 3 if isinstance(point, DecodePoint) else 1


def check_warmup(
    where: str, span: Span, first: ScheduledRequests, last: ScheduledRequests, length: int
) -> Iterator[str]:
    """A warm-up repetition ran the steps of a measured one."""
    if span.forward_index_end - span.forward_index_start != length:
        found_length = span.forward_index_end - span.forward_index_start
        yield f"{where} warm-up: expected {length} forwards, found {found_length}"
    for name, expected, found in (("first", first, span.first), ("last", last, span.last)):
        if difference := differences(expected, found):
            yield f"{where} warm-up {name} step: {difference}"


def check_dispatch(where: str, seen: CudagraphObservation, tokens: int, eager: bool) -> Iterator[str]:
    """What was seen of the graph of a step of so many tokens; an eager launch has none and pads nothing.

    That an observation agrees with itself is asked of the artifact (rank_checks).
    """
    if seen.status == "unavailable":
        return
    if seen.num_unpadded_tokens != tokens:
        yield f"{where} cudagraph.num_unpadded_tokens: expected {tokens}, found {seen.num_unpadded_tokens}"
    mode = str(seen.runtime_mode).rsplit(".", 1)[-1]  # `NONE` or `CUDAGraphMode.NONE`, by release
    if eager and (mode, seen.num_paddings) != ("NONE", 0):
        found = (seen.runtime_mode, seen.num_paddings)
        yield f"{where} cudagraph (mode, paddings): expected ('NONE', 0) of an eager launch, found {found}"


def check_repetitions(
    where: str, own: RankPoint, point: Point, shapes: tuple[RequestShape, ...], eager: bool
) -> Iterator[str]:
    """Every step that is recorded, not only the kept one: the point's counts, in order, none twice."""
    decode, length = isinstance(point, DecodePoint), steps_of(point)
    first = counts([(shape.prompt, shape.prefix, shape.new_tokens) for shape in shapes])
    # Decode: the prompt is one token short of the context, and the second step after it reads the whole context.
    measured = counts([(shape.prompt, shape.prompt + 1, 1) for shape in shapes]) if decode else first
    tokens = measured.sum_prefill_tokens + measured.num_decode_requests
    basis = "inter_output" if decode else "schedule_to_output"
    forwards: list[tuple[int, int, str]] = []
    for span in own.warmups:
        forwards.append((span.forward_index_start, span.forward_index_end, f"{span.kind} span"))
        if span.kind == "eager_shape":
            yield from check_warmup(where, span, first, measured, length)
    if forwards != sorted(forwards):
        yield f"{where} warm-ups: expected forwards that rise, found {[start for start, _, _ in forwards]}"
    warm = max((span.forward_index_end for span in own.warmups if span.kind == "eager_shape"), default=0)
    last_end = 0.0
    for repetition in own.repetitions:
        name = f"{where} repetition {repetition.ordinal}"
        forwards.append((repetition.forward_index + 1 - length, repetition.forward_index + 1, name))
        if difference := differences(measured, repetition.scheduled_requests):
            yield f"{name} scheduled_requests: {difference}"
        yield from check_dispatch(name, repetition.cudagraph, tokens, eager)
        if repetition.basis != basis:
            yield f"{name} basis: expected {basis}, found {repetition.basis}"
        if repetition.forward_index < warm:
            yield f"{name} forward_index: expected at least {warm}, found {repetition.forward_index}"
        if not last_end <= repetition.start_monotonic < repetition.end_monotonic < math.inf:
            found_interval = (repetition.start_monotonic, repetition.end_monotonic)
            yield f"{name} interval: expected to rise from {last_end}, found {found_interval}"
        elif not 0 <= repetition.overhead_seconds <= repetition.end_monotonic - repetition.start_monotonic:
            yield f"{name} overhead_seconds: expected a part of the interval, found {repetition.overhead_seconds}"
        elif not decode and repetition.overhead_seconds:
            yield f"{name} overhead_seconds: expected 0.0 in a prefill step, found {repetition.overhead_seconds}"
        last_end = repetition.end_monotonic
    indices = [repetition.forward_index for repetition in own.repetitions]
    if indices != sorted(indices):
        yield f"{where} forward_index: expected to rise, found {indices}"
    for (start, end, name), (next_start, _, next_name) in pairwise(sorted(forwards)):
        if not start < end <= next_start:
            yield f"{where} forwards: expected {name} [{start}, {end}) to end before {next_name} at {next_start}"
    ran = sum(end - start for start, end, _ in forwards) + sum(len(rejection.chunks) for rejection in own.rejections)
    if own.steps != ran:
        yield f"{where} steps: expected {ran} of its warm-ups, repetitions and rejections, found {own.steps}"


def check_ordinals(where: str, own: RankPoint) -> Iterator[str]:
    """Submissions were numbered as they came: warm-ups, then measurements, and rejected ones in between."""
    warm, rejected = own.warmup_ordinals, [rejection.ordinal for rejection in own.rejections]
    measured = [repetition.ordinal for repetition in own.repetitions]
    ordinals = [*warm, *measured, *rejected]
    if sorted(ordinals) != list(range(len(ordinals))):
        yield f"{where} ordinals: expected each of 0..{len(ordinals) - 1} once, found {sorted(ordinals)}"
    accepted = [*warm, *measured]
    if accepted != sorted(accepted):
        yield f"{where} ordinals: expected warm-ups and then measurements in order, found {warm} and {measured}"
    if rejected != sorted(rejected) or any(ordinal > max(measured, default=0) for ordinal in rejected):
        yield f"{where} rejections: expected ordinals that rise before the last measurement, found {rejected}"


def check_point(
    cell: FrozenCell,
    contract: Contract,
    stream: TokenStream,
    where: str,
    own: RankPoint,
    point: Point,
    shapes: tuple[RequestShape, ...],
) -> Iterator[str]:
    """One rank's point ran as often as its contract says, with the prompts that its specification gives."""
    measurement = contract.measurement
    warmups = sum(span.kind == "eager_shape" for span in own.warmups)
    for name, found, expected in (
        ("measurements", len(own.repetitions), measurement.measurement_repeats),
        ("warm-ups", len(own.warmup_ordinals), measurement.warmup_repeats),
        ("recorded warm-up spans", warmups, measurement.warmup_repeats),
    ):
        if found != expected:
            yield f"{where} {name}: expected {expected}, found {found}"
    if len(own.rejections) > contract.max_rejections:
        yield f"{where} rejections: expected at most {contract.max_rejections}, found {len(own.rejections)}"
    yield from check_ordinals(where, own)
    yield from check_repetitions(where, own, point, shapes, cell.identity.engine.enforce_eager)
    for index, repetition in enumerate(own.repetitions):
        if contract == GLM53FLASH and repetition.cudagraph.status != "observed":
            yield f"{where} repetition {repetition.ordinal} cudagraph.status: expected observed of {contract.name}"
        requests = repetition_requests(stream, cell.identity.phase, point, shapes, repetition.ordinal)
        derived = prompts_of(requests)
        if derived.sha256 != repetition.prompts_sha256:
            yield f"{where} repetition {repetition.ordinal}: prompts are not those of the specification"
        if index == 1 and derived != own.prompts:
            yield f"{where}: recorded prompts are not those of measurement 1"


def check_seconds(where: str, own: RankPoint, decode: bool, writes: bool) -> Iterator[str]:
    """Where the seconds of a point went: none twice, and those of its measurements are their intervals'.

    `writes`: the rank wrote the line of the point before it.
    """
    seconds = own.seconds
    if seconds.keys() != SECONDS:
        yield f"{where} seconds: expected {sorted(SECONDS)}, found {sorted(seconds)}"
        return
    ran = {
        "seeding": any(span.kind == "real_prefix_seed" for span in own.warmups),
        "warmup": bool(own.warmup_ordinals),
        "scaffolding": decode,  # the steps of a repetition before the measured one
        "measured": bool(own.repetitions),
        "rejected": bool(own.rejections),
        "overhead": True,
        "writing": writes,
    }
    for kind, expected in ran.items():
        if not (0 < seconds[kind] < math.inf if expected else seconds[kind] == 0):
            yield f"{where} seconds.{kind}: expected {'more than 0' if expected else 0}, found {seconds[kind]}"
    spent = sum(seconds[kind] for kind in BUSY) + seconds["overhead"]
    if not (spent <= seconds["wall"] < math.inf or close(spent, seconds["wall"])):
        yield f"{where} seconds.wall: expected at least {spent} of its steps, found {seconds['wall']}"
    least = sum(repetition.overhead_seconds for repetition in own.repetitions)
    if seconds["overhead"] < least and not close(seconds["overhead"], least):
        yield f"{where} seconds.overhead: expected at least {least} of its repetitions, found {seconds['overhead']}"
    intervals = sum(r.end_monotonic - r.start_monotonic - r.overhead_seconds for r in own.repetitions)
    # A decode interval begins before its step is scheduled, a prefill one after.
    if not (close(seconds["measured"], intervals) or (decode and seconds["measured"] < intervals)):
        bound = "at most " if decode else ""
        yield f"{where} seconds.measured: expected {bound}{intervals} of its intervals, found {seconds['measured']}"


def check_seeds(
    where: str, own: RankPoint, shapes: tuple[RequestShape, ...], attempt: int, budget: int
) -> Iterator[str]:
    """Seeds of one attempt ran together in one span; attempts count on from `attempt`, the last before the point.

    `budget` is the largest step, in tokens.
    """
    together = [list(seeds) for _, seeds in groupby(own.seeds, lambda seed: seed.attempt)]
    spans = [span for span in own.warmups if span.kind == "real_prefix_seed"]
    expected, found = [attempt + 1 + number for number in range(len(spans))], [seeds[0].attempt for seeds in together]
    if expected != found:
        yield f"{where} seed attempts: expected {expected} of its spans, found {found}"
        return
    for seeds, span in zip(together, spans, strict=True):
        slots = [seed.slot for seed in seeds]
        if slots != sorted(set(slots)) or not 0 <= slots[0] <= slots[-1] < len(shapes):
            yield f"{where} seeds: expected rising slots of {len(shapes)}, found {slots}"
            continue
        for seed in seeds:
            name = f"{where} seed of slot {seed.slot}"
            if not 0 < seed.prefix_tokens == shapes[seed.slot].prefix:
                yield f"{name}: expected a prefix of {shapes[seed.slot].prefix} tokens, found {seed.prefix_tokens}"
            total = seed.cached_tokens + seed.computed_tokens
            if seed.cached_tokens < 0 or seed.computed_tokens < 1 or total != seed.prefix_tokens + 1:
                ran = f"{seed.cached_tokens} cached and {seed.computed_tokens} computed"
                yield f"{name}: expected {seed.prefix_tokens} tokens and one more, found {ran}"
        yield from check_seed_span(f"{where} seed attempt {seeds[0].attempt}", span, seeds, budget)


def within(least: float, found: float, most: float) -> bool:
    """Between two bounds, but for the way of adding up."""
    return least <= found <= most or close(least, found) or close(most, found)


def check_seed_span(where: str, span: Span, seeds: list[SeedLine], budget: int) -> Iterator[str]:
    """The first and the last step of prefixes that are computed together.

    Requests enter in the order of their slots, as many as fit; those of the last step end with it. How prompts are
    split between steps is the engine's, so of the last step only bounds are known where not all are in it.
    """
    prompts = sorted(seed.prefix_tokens + 1 for seed in seeds)
    computed = sum(seed.computed_tokens for seed in seeds)
    for name, step in (("first", span.first), ("last", span.last)):
        requests, tokens, cached = step.num_prefill_requests, step.sum_prefill_tokens, step.sum_prefill_kv_tokens
        if not 1 <= requests <= len(seeds) or not requests <= tokens <= min(budget, computed):
            found = f"{requests} requests with {tokens} tokens"
            yield f"{where} {name} step: expected up to {len(seeds)} requests and {computed} tokens, found {found}"
            continue
        if step.num_decode_requests or step.sum_decode_kv_tokens or step.var_decode_kv_tokens:
            yield f"{where} {name} step: expected no decode requests, found {step.num_decode_requests}"
        if name == "first":
            entered = counts([(seed.prefix_tokens + 1, seed.cached_tokens, tokens) for seed in seeds[:requests]])
            total = (entered.sum_prefill_kv_tokens + tokens,) * 2
            variance = (entered.var_prefill_length,) * 2
        else:
            total = (sum(prompts[:requests]), sum(prompts[-requests:]))
            widest = (prompts[-1] - prompts[0]) ** 2 / 4 if requests > 1 else 0.0  # Popoviciu's inequality
            variance = (float(pvariance(prompts)),) * 2 if requests == len(seeds) else (0.0, widest)
        if not total[0] <= cached + tokens <= total[1]:
            yield f"{where} {name} step tokens: expected {total[0]} to {total[1]}, found {cached + tokens}"
        if not within(variance[0], step.var_prefill_length, variance[1]):
            wanted = f"{variance[0]} to {variance[1]}"
            yield f"{where} {name} step var_prefill_length: expected {wanted}, found {step.var_prefill_length}"
    steps = span.forward_index_end - span.forward_index_start
    if steps == 1 and (difference := differences(span.first, span.last)):
        yield f"{where}: expected one step, found two: {difference}"
    ends = span.first.sum_prefill_tokens + (span.last.sum_prefill_tokens if steps > 1 else 0)
    between = max(steps - 2, 0)
    if not ends + between <= computed <= ends + between * budget:
        yield f"{where}: expected {computed} tokens in {steps} steps, found {ends} in the first and the last"


def check_rejections(
    where: str, ranks: list[RankPoint], point: Point, shapes: tuple[RequestShape, ...]
) -> Iterator[str]:
    """Every rank rejects the same submissions, each since one rank's steps were not the point's."""
    for name, ordinals in (
        ("warm-ups", [own.warmup_ordinals for own in ranks]),
        ("repetitions", [[repetition.ordinal for repetition in own.repetitions] for own in ranks]),
        ("rejections", [[rejection.ordinal for rejection in own.rejections] for own in ranks]),
    ):
        if any(own != ordinals[0] for own in ordinals):
            yield f"{where} ordinals: expected the same {name} on every rank, found {ordinals}"
            return
    per_slot = [expected_chunks(point, shape) for shape in shapes]
    right = [[list(chunks[step]) for chunks in per_slot] for step in range(steps_of(point))]
    for rejections in zip(*(own.rejections for own in ranks), strict=True):
        ordinal, reasons = rejections[0].ordinal, {rejection.reason for rejection in rejections}
        if len(reasons) > 1 or not all(reasons):
            yield f"{where} rejection {ordinal}: expected one reason, found {sorted(reasons)}"
        if all(rejection.chunks == right for rejection in rejections):
            yield f"{where} rejection {ordinal}: expected steps that are not the point's, found {right}"
