"""What each point of a Dynamo rank artifact must look like: its requests, forward passes, samples, marks and stamps."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from msgspec import UNSET

from producer.partition import balanced, imbalanced
from schemas.canonical import digest
from schemas.native import (
    NONE_QUEUED,
    BenchmarkMeasurement,
    Fpm,
    NativePoint,
    RawFpm,
    Row,
    ScheduledRequests,
)
from schemas.points import Partition

from dynamo_blocks import Blocks, unequal

STAMPS = (
    "context_clamped",
    "giant_fake_off_by_batch",
    "prefill_real_seed",
    "prefill_fake_prefix",
    "kvwarm_real_kv",
    "kvwarm_fake_fallback",
)
"""Reasons that are added while a point runs; they follow those of the grid, which its digest covers."""

GRID_REASONS = frozenset(
    {"explicit", "imbalance", "capture", "post_capture", "cudagraph_disabled", "geometric_axis"}
    | {"eager_tail", "geometric_tail", "engine_limit"}
)

REAL_KV = ("real_kv", "real_attention_kv_random_kda")
FAKE_KV = ("fake_fallback", "fake_attention_kv_random_kda")


class Shape(NamedTuple):
    """A point's requests, [new, cached] tokens each (decode: [0, context]), and its first forward pass."""

    requests: list[tuple[int, int]]
    first: ScheduledRequests

    @property
    def lengths(self) -> list[int]:
        return [new + cached for new, cached in self.requests]

    def step(self, index: int) -> ScheduledRequests:
        """What sample `index` schedules: contexts of decode requests grow by one token a step."""
        first = self.first
        if not first.num_decode_requests or not index:
            return first
        total = first.sum_decode_kv_tokens + index * first.num_decode_requests
        return ScheduledRequests(0, 0, 0.0, 0, first.num_decode_requests, total, first.var_decode_kv_tokens)


def variance(lengths: Sequence[int]) -> float:
    """Population variance of token counts, without rounding on the way."""
    count, total = len(lengths), sum(lengths)
    return (count * sum(length * length for length in lengths) - total * total) / (count * count)


def prefill_step(requests: Sequence[tuple[int, int]]) -> ScheduledRequests:
    """One forward pass of whole prefill requests, [new, cached] tokens each."""
    new, cached = sum(new for new, _ in requests), sum(cached for _, cached in requests)
    return ScheduledRequests(len(requests), new, variance([sum(each) for each in requests]), cached, 0, 0, 0.0)


def decode_step(contexts: Sequence[int]) -> ScheduledRequests:
    return ScheduledRequests(0, 0, 0.0, 0, len(contexts), sum(contexts), variance(contexts))


def shape_of(point: NativePoint, hash_block_size: int) -> Shape:
    """A point's requests by its totals, partition or rows (native artifact, 1.1).

    A decode point is admitted with one token of each context missing; the second step reads the whole context (3.3).

    Raises:
        ValueError: the totals cannot be split so.
    """
    count, new, cached = point.batch_size, point.total_prefill_tokens, point.total_kv_read_tokens
    if point.point_type == "decode":
        contexts = balanced(cached, count, 1, 2)
        return Shape([(0, context) for context in contexts], decode_step([context - 1 for context in contexts]))
    if point.rows is not None:
        if [len(row) for row in point.rows] != [2] * count:
            raise ValueError(f"{len(point.rows)} rows")
        requests = [(row[0], row[1]) for row in point.rows]
    else:
        partition = None if point.partition is None else Partition.model_validate(point.partition)
        if partition is not None and partition.high_count >= count:
            raise ValueError(f"high_count {partition.high_count}")
        axis = "" if partition is None else partition.axis
        news = (
            imbalanced(new, count, 1, 1, partition)
            if partition is not None and axis in ("new", "both")
            else balanced(new, count, 1, 1)
        )
        if not cached:
            kvs = [0] * count
        elif partition is not None and axis in ("kv", "both"):
            kvs = imbalanced(cached, count, hash_block_size, 1, partition)
        else:
            kvs = balanced(cached, count, hash_block_size, 1)
        requests = list(zip(news, kvs, strict=True))
    return Shape(requests, prefill_step(requests))


def step_difference(expected: ScheduledRequests, found: ScheduledRequests) -> str:
    """The first count that differs, in words, or nothing; variances to the bits that their adding up leaves open."""
    if expected == found:
        return ""
    for field in expected.__struct_fields__:
        want, have = getattr(expected, field), getattr(found, field)
        if want != have and not (field.startswith("var") and math.isclose(want, have, rel_tol=1e-9, abs_tol=1e-9)):
            return f"{field}: expected {want}, found {have}"
    return ""


def planned_steps(point: NativePoint, regime: str | None, shape: Shape, blocks: Blocks) -> tuple[int, ...]:
    """How many steady steps a decode point may plan (3.3): real KV and giants repeat, as far as contexts can grow.

    Empty when the artifact does not say how often.
    """
    giants = blocks.kvwarm or (blocks.protocol.preparation if blocks.protocol else None)
    if giants is None:
        return ()
    real = regime in REAL_KV
    short = point.batch_size if "giant_fake_off_by_batch" in point.sample_reasons else 0
    if not real and point.total_kv_read_tokens + short < giants.giant_kv_threshold:
        return (1,)
    limits, deepest = blocks.limits, max(shape.lengths)
    repeats = max(1, min(giants.giant_kv_repeats, limits.max_model_len - 1 - deepest))
    groups = len(blocks.engine.kv_cache.groups) if blocks.engine else 1
    needed = point.batch_size * groups * (-(-(deepest + repeats) // limits.block_size) + 1)
    # A fake giant that lacks blocks runs one step; a declared total just below the threshold may have been clamped up.
    raised = "context_clamped" in point.sample_reasons and point.batch_size < giants.giant_kv_threshold
    once = not real and (needed > limits.num_gpu_blocks - 1 or raised)
    return (repeats, 1) if once and repeats > 1 else (repeats,)


def reason_failures(where: str, point: NativePoint, blocks: Blocks) -> Iterator[str]:
    """Reasons of the grid, then stamps, each once; and a clamped point is one whose contexts were below two."""
    reasons = point.sample_reasons
    stamps = [reason for reason in reasons if reason in STAMPS]
    if unknown := sorted(set(reasons) - GRID_REASONS - set(STAMPS)):
        yield f"{where} sample_reasons: expected reasons of a measured point, found {', '.join(unknown)}"
    late = "explicit" in reasons[1:]
    if late or len(set(reasons)) != len(reasons) or reasons[len(reasons) - len(stamps) :] != stamps:
        yield f"{where} sample_reasons: expected each once, explicit first, stamps last, found {reasons}"
    smallest = 2 * point.batch_size
    clamped = "context_clamped" in reasons
    if clamped and (point.point_type != "decode" or point.total_kv_read_tokens != smallest):
        found = f"{point.total_kv_read_tokens} of a {point.point_type} point"
        yield f"{where} context_clamped: expected {smallest} tokens of a decode point, found {found}"
    if point.point_type == "decode" and (point.total_prefill_tokens or point.partition or point.rows):
        yield f"{where} point: expected neither new tokens nor a partition or rows of a decode point, found some"
    if blocks.cudagraph.mode == "NONE":
        tokens = point.total_prefill_tokens if point.point_type == "prefill" else point.batch_size
        decode_limits = {blocks.limits.configured_max_batch_size, blocks.limits.feasible_max_batch_size}
        limit = {blocks.limits.max_num_scheduled_tokens} if point.point_type == "prefill" else decode_limits
        axis = "engine_limit" if tokens in limit else "geometric_axis"
        grid = [reason for reason in reasons if reason not in STAMPS and reason not in ("explicit", "imbalance")]
        if grid not in (["cudagraph_disabled", axis], ["cudagraph_disabled", "geometric_axis"]):
            yield f"{where} sample_reasons: expected cudagraph_disabled and {axis}, found {grid}"


def graph_failures(where: str, point: NativePoint, blocks: Blocks) -> Iterator[str]:
    """The smallest captured size that holds the point's tokens, and the padding up to it (3.1)."""
    graphs = blocks.cudagraph
    prefill = point.point_type == "prefill"
    tokens = point.total_prefill_tokens if prefill else point.batch_size
    sizes = graphs.prefill_capture_sizes if prefill else graphs.decode_capture_sizes
    capture = min((size for size in sizes if size >= tokens), default=None)
    mode = graphs.prefill_mode if prefill else graphs.decode_mode
    capture = None if mode == "NONE" else capture
    yield from unequal(
        f"{where} ",
        {
            "expected_cudagraph_mode": ("NONE" if capture is None else mode, point.expected_cudagraph_mode),
            "expected_capture_size": (capture, point.expected_capture_size),
            "padding_tokens": (None if capture is None else capture - tokens, point.padding_tokens),
        },
    )


def regime_failures(where: str, row: Row, blocks: Blocks) -> Iterator[str]:
    """The row's regime is one that the artifact's switches make (4)."""
    regime, point, kvwarm = row.kv_seed_regime, row.point, blocks.kvwarm
    if regime is None:
        return
    real_seed = blocks.protocol.preparation.prefill_real_seed if blocks.protocol else None
    if point.point_type == "prefill":
        if not point.total_kv_read_tokens:
            allowed = ["not_applicable"] if real_seed is False else ["not_applicable", "real_prefix"]
        elif real_seed is None:
            allowed = ["fake_prefix", "real_prefix"]
        else:
            allowed = ["real_prefix" if real_seed else "fake_prefix"]
    elif kvwarm is None:
        return
    elif not kvwarm.enabled:
        allowed = ["legacy"]
    else:
        random = blocks.config.randomize_kda_state
        if kvwarm.warm_eligible:
            allowed = [REAL_KV[random], FAKE_KV[random]]
        else:
            # 1.6.1 stamps every point that has no real KV; 1.7 gives the reason of the whole configuration.
            allowed = [f"skip:{kvwarm.skip_reason}" if blocks.protocol else FAKE_KV[random]]
    if regime not in allowed:
        yield f"{where} kv_seed_regime: expected {' or '.join(allowed)}, found {regime}"


def mark_failures(where: str, fpm: Fpm, decode: bool, steps: tuple[int, ...]) -> Iterator[str]:
    """`kvwarm_steady_sample` on every decode value, `kvwarm_giant_median_of` where steady steps repeat."""
    if fpm.kvwarm_steady_sample is not (True if decode else UNSET):
        expected = "True" if decode else "nothing"
        yield f"{where} kvwarm_steady_sample: expected {expected}, found {fpm.kvwarm_steady_sample}"
    of = fpm.kvwarm_giant_median_of
    if not decode or not steps:
        if not decode and of is not UNSET:
            yield f"{where} kvwarm_giant_median_of: expected nothing, found {of}"
        return
    measurement = fpm.benchmark_measurement
    if measurement is not UNSET:
        repeated = measurement.expected_internal_samples > 2
        expected_of = len(measurement.raw_fpms) - 1 if repeated else UNSET
        yield from unequal(f"{where} ", {"kvwarm_giant_median_of": (expected_of, of)})
    elif of is UNSET:
        if 1 not in steps:
            yield f"{where} kvwarm_giant_median_of: expected at most {max(steps)}, found nothing"
    elif max(steps) == 1 or not 1 <= of <= max(steps):
        expected = "nothing" if max(steps) == 1 else f"1..{max(steps)}"
        yield f"{where} kvwarm_giant_median_of: expected {expected}, found {of}"


def measurement_failures(
    where: str, row: Row, position: int, shape: Shape, steps: tuple[int, ...], grid_digest: str | None
) -> Iterator[str]:
    """The evidence of one retained value (6.2, 6.3), beyond what every merge checks."""
    fpm, point = row.fpms[0], row.point
    measurement = fpm.benchmark_measurement
    if measurement is UNSET:
        return
    decode = point.point_type == "decode"
    key = digest(
        {
            "point_type": point.point_type,
            "batch_size": point.batch_size,
            "total_prefill_tokens": point.total_prefill_tokens,
            "total_kv_read_tokens": point.total_kv_read_tokens,
            "partition": point.partition,
            "rows": point.rows,
        }
    )
    preparation = measurement.preparation
    yield from unequal(
        f"{where} ",
        {
            "point_key": (key, measurement.point_key),
            "preparation.grid_digest": (grid_digest, preparation.grid_digest),
            "preparation.completed_points_before": (position, preparation.completed_points_before),
            "preparation.kv_seed_regime": (row.kv_seed_regime, preparation.kv_seed_regime),
            "estimate.method": (method_of(measurement), measurement.estimate.method),
        },
    )
    allowed = [step + 1 for step in steps] if decode else [1]
    if allowed and measurement.expected_internal_samples not in allowed:
        expected = " or ".join(map(str, allowed))
        yield f"{where} expected_internal_samples: expected {expected}, found {measurement.expected_internal_samples}"
    least = 2 if decode else 1
    if not least <= len(measurement.raw_fpms) <= measurement.expected_internal_samples:
        expected = f"{least}..{measurement.expected_internal_samples}"
        yield f"{where} raw_fpms: expected {expected}, found {len(measurement.raw_fpms)}"
        return
    yield from sample_failures(where, fpm, measurement, point, shape)


def method_of(measurement: BenchmarkMeasurement) -> str:
    """The reduction that a number of planned samples has (6.4)."""
    if measurement.expected_internal_samples > 2:
        return "adjacent_upper_median"
    return "last_step" if measurement.expected_internal_samples == 2 else "single_step"


def sample_failures(
    where: str, fpm: Fpm, measurement: BenchmarkMeasurement, point: NativePoint, shape: Shape
) -> Iterator[str]:
    """Every sample's step is the point's, and follows the one before; the retained value is a copy of one of them."""
    decode = point.point_type == "decode"
    tokens = point.batch_size if decode else point.total_prefill_tokens
    end: float | None = None
    for index, raw in enumerate(measurement.raw_fpms):
        sample = raw.benchmark_sample
        # The admission step of a giant that was measured short of its total is nowhere described.
        if index or "giant_fake_off_by_batch" not in point.sample_reasons:
            difference = step_difference(shape.step(index), raw.scheduled_requests)
            if difference:
                yield f"{where} raw sample {index} {difference}"
        yield from fpm_failures(f"{where} raw sample {index}", raw, fpm.worker_id)
        for name in ("repetition", "producer_overhead_seconds"):
            if getattr(sample, name) is not UNSET:
                yield f"{where} raw sample {index} {name}: expected nothing, found {getattr(sample, name)}"
        basis = "inter_output" if decode and index else "schedule_to_output"
        if sample.timing.basis != basis:
            yield f"{where} raw sample {index} timing.basis: expected {basis}, found {sample.timing.basis}"
        start = sample.timing.start_monotonic
        if basis == "inter_output" and start is not None and start != end:
            yield f"{where} raw sample {index} start_monotonic: expected {end}, the output before, found {start}"
        end = sample.timing.end_monotonic
        graph = sample.cudagraph
        if graph.status == "observed" and graph.num_unpadded_tokens != tokens:
            found = graph.num_unpadded_tokens
            yield f"{where} raw sample {index} num_unpadded_tokens: expected {tokens}, found {found}"
        mode = str(graph.runtime_mode).rsplit(".", 1)[-1]
        if graph.status == "observed" and mode == "NONE" and graph.num_paddings != 0:
            yield f"{where} raw sample {index} num_paddings: expected 0 without a graph, found {graph.num_paddings}"
    for name in ("repetition_line_sha256", "session", "rejections", "device_state"):
        if getattr(measurement, name) is not UNSET:
            yield f"{where} benchmark_measurement.{name}: expected nothing in an artifact of Dynamo, found a value"


def fpm_failures(where: str, fpm: Fpm | RawFpm, worker_id: str) -> Iterator[str]:
    """One worker's record of version 1, with no request waiting."""
    if fpm.version != 1:
        yield f"{where} version: expected 1, found {fpm.version}"
    if fpm.worker_id != worker_id:
        yield f"{where} worker_id: expected {worker_id!r}, found {fpm.worker_id!r}"
    if fpm.queued_requests != NONE_QUEUED:
        yield f"{where} queued_requests: expected none, found some"


def eager_dispatch_failures(where: str, measurement: BenchmarkMeasurement) -> Iterator[str]:
    """Of an engine without graphs no sample shows one."""
    for index, raw in enumerate(measurement.raw_fpms):
        mode = raw.benchmark_sample.cudagraph.runtime_mode
        if mode is not None and mode.rsplit(".", 1)[-1] != "NONE":
            yield f"{where} raw sample {index} runtime_mode: expected NONE of an eager engine, found {mode}"
