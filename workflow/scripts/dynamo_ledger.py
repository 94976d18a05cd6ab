"""Dynamo's warm-ups (native artifact, 6.5) and the digest of the grid (1.3), held against the measured points."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from schemas.canonical import digest
from schemas.native import NativePoint, RankArtifact, Row, ScheduledRequests

from dynamo_blocks import Blocks, Ledger, WarmupRecord, read_block, same
from dynamo_points import STAMPS, Shape, decode_step, planned_steps, prefill_step, shape_of, step_difference

GLOBAL_PROMPT = 256
"""Tokens of the one request that warms the whole engine up."""

MOST_GRIDS = 64
"""Declared grids that are tried for one digest when points were clamped."""


def eager_points(ledger: Ledger) -> list[NativePoint]:
    """The discarded replicas that the ledger shows."""
    shapes = (record.requested_shape for record in ledger.records if record.kind == "eager_shape")
    read = (read_block(NativePoint, shape, "requested_shape") for shape in shapes)
    return [point for point in read if isinstance(point, NativePoint)]


def replicas(points: Sequence[NativePoint]) -> list[NativePoint]:
    """One discarded replica of each shape that runs without a graph, by its first point, with ids after the last."""
    first: dict[int, NativePoint] = {}
    for point in points:
        if point.expected_capture_size is None:
            key = point.total_prefill_tokens if point.point_type == "prefill" else point.batch_size
            first.setdefault(key, point)
    return [
        msgspec.structs.replace(point, benchmark_id=len(points) + number, sample_reasons=["eager_warmup"])
        for number, point in enumerate(first.values(), 1)
    ]


def declared(point: NativePoint) -> list[NativePoint]:
    """The points of the grid that may have become this row: without stamps, and before its total was changed."""
    kv, batch = point.total_kv_read_tokens, point.batch_size
    totals: Sequence[int] = (kv,)
    if "context_clamped" in point.sample_reasons:
        totals = range(batch, min(kv, 2 * batch))
    elif "giant_fake_off_by_batch" in point.sample_reasons:
        totals = (kv + batch,)
    reasons = [reason for reason in point.sample_reasons if reason not in STAMPS]
    return [msgspec.structs.replace(point, sample_reasons=reasons, total_kv_read_tokens=total) for total in totals]


def grid_gap(rows: Sequence[Row], blocks: Blocks) -> str:
    """Why the grid cannot be made again; empty when it can."""
    if math.prod(max(1, len(declared(row.point))) for row in rows) > MOST_GRIDS:
        return "too many points were clamped"
    recorded = blocks.ledger is not None and blocks.ledger.status == "recorded"
    if not recorded and blocks.kvwarm is not None and blocks.kvwarm.warm_eligible:
        return "its replicas are not recorded and real KV reorders points"
    return ""


def grid_failures(artifact: RankArtifact, blocks: Blocks) -> Iterator[str]:
    """`grid_digest` covers every point as it was declared, with the discarded replicas at the head."""
    if grid_gap(artifact.results, blocks):
        return
    recorded = blocks.ledger is not None and blocks.ledger.status == "recorded"
    found = ""
    for points in itertools.product(*(declared(row.point) for row in artifact.results)):
        head = eager_points(blocks.ledger) if blocks.ledger is not None and recorded else replicas(points)
        found = digest(msgspec.to_builtins([*head, *points]))
        if found == artifact.grid_digest:
            return
    yield f"grid_digest: expected {found} of the points and their replicas, found {artifact.grid_digest}"


def ledger_failures(
    where: str, artifact: RankArtifact, blocks: Blocks, shapes: Sequence[Shape], hash_block_size: int
) -> Iterator[str]:
    """Every record's shape, status, range and order; each point's reference into the ledger; clocks that rise."""
    ledger = blocks.ledger
    if ledger is None:
        return
    if ledger.status == "unavailable":
        if ledger.records:
            yield f"{where}warmup_evidence.records: expected none when unavailable, found {len(ledger.records)}"
        yield from reference_failures(where, artifact.results, None)
        return
    wanted = int(blocks.config.warmup_iterations > 0)
    if (found := sum(record.kind == "global" for record in ledger.records)) != wanted:
        yield f"{where}warmup_evidence global records: expected {wanted}, found {found}"
    for index, record in enumerate(ledger.records):
        name = f"{where}warmup record {index}"
        yield from status_failures(name, record)
        if record.kind == "global":
            yield from global_failures(name, index, record, blocks)
        elif record.kind == "eager_shape":
            yield from eager_failures(name, record, ledger, blocks, len(artifact.results), hash_block_size)
        else:
            yield from prefix_failures(name, record, blocks, artifact.results, shapes, hash_block_size)
    yield from replica_failures(where, artifact.results, eager_points(ledger))
    yield from order_failures(where, ledger.records)
    yield from reference_failures(where, artifact.results, ledger.records)


def status_failures(where: str, record: WarmupRecord) -> Iterator[str]:
    """Status, validation and range agree (13.13)."""
    start, end, validation = record.forward_index_start, record.forward_index_end, record.validation
    if (record.status == "running") != (end is None):
        expected_end = "none" if record.status == "running" else "a number"
        yield f"{where} forward_index_end: expected {expected_end} when {record.status}, found {end}"
    if end is not None and record.observed_forward_count != end - start:
        yield f"{where} observed_forward_count: expected {end - start}, found {record.observed_forward_count}"
    expected = {"passed": "completed", "failed": "failed"}.get(validation.status, record.status)
    if record.status != expected:
        yield f"{where} status: expected {expected} when {validation.status}, found {record.status}"
    if validation.status == "passed" and validation.reason is not None:
        yield f"{where} validation.reason: expected none when passed, found {validation.reason}"
    if record.status == "completed" and validation.reason is not None and validation.status == "not_performed":
        yield f"{where} validation.reason: expected none of a completed one, found {validation.reason}"
    grouped = record.kind == "eager_shape" and validation.status != "not_performed"
    if grouped != (validation.scope is not UNSET) or grouped != (validation.failed_dp_rank is not UNSET):
        words = "scope and failed_dp_rank" if grouped else "neither scope nor failed_dp_rank"
        yield f"{where} validation: expected {words}, found others"
    elif grouped and (validation.failed_dp_rank is not None) != (validation.status == "failed"):
        yield f"{where} validation.failed_dp_rank: expected one only when failed, found {validation.failed_dp_rank}"
    ran = record.observed_forward_count
    for name in ("first_scheduled_requests", "last_scheduled_requests"):
        if ran and getattr(record, name) is None:
            yield f"{where} {name}: expected a step of {ran} forwards, found none"
    if record.status == "completed" and not ran:
        yield f"{where} observed_forward_count: expected some of a completed one, found {ran}"
    if ran == 1 and record.first_scheduled_requests != record.last_scheduled_requests:
        yield f"{where} last_scheduled_requests: expected the first of one forward, found another"


def steps_failures(
    where: str, record: WarmupRecord, first: ScheduledRequests | None, last: ScheduledRequests | None
) -> Iterator[str]:
    """First and last step of a record against what its shape asks for."""
    for name, expected, found in (
        ("first", first, record.first_scheduled_requests),
        ("last", last, record.last_scheduled_requests),
    ):
        if expected is not None and found is not None and (difference := step_difference(expected, found)):
            yield f"{where} {name}_scheduled_requests {difference}"


def before_failures(where: str, record: WarmupRecord, expected: int) -> Iterator[str]:
    """Warm-ups of a replica come before every point, those of a point before it."""
    if record.completed_points_before != expected:
        yield f"{where} completed_points_before: expected {expected}, found {record.completed_points_before}"


def global_failures(where: str, index: int, record: WarmupRecord, blocks: Blocks) -> Iterator[str]:
    """One request of 256 tokens before all else: a prefill and warmup_iterations - 1 decode steps (2.3)."""
    count = blocks.config.warmup_iterations
    shape = {"prompt_lengths": [GLOBAL_PROMPT], "max_tokens": count}
    if not same(shape, record.requested_shape):
        yield f"{where} requested_shape: expected {shape}, found {record.requested_shape}"
    if index or record.forward_index_start:
        yield f"{where} forward_index_start: expected 0 of the first record, found {record.forward_index_start}"
    yield from before_failures(where, record, 0)
    limits = blocks.limits
    if limits.max_num_scheduled_tokens < GLOBAL_PROMPT or limits.max_model_len < GLOBAL_PROMPT + count:
        return
    if record.status == "completed" and record.observed_forward_count != count:
        yield f"{where} observed_forward_count: expected {count}, found {record.observed_forward_count}"
    first = prefill_step([(GLOBAL_PROMPT, 0)])
    yield from steps_failures(where, record, first, decode_step([GLOBAL_PROMPT + count - 2]) if count > 1 else first)


def eager_failures(
    where: str, record: WarmupRecord, ledger: Ledger, blocks: Blocks, points: int, hash_block_size: int
) -> Iterator[str]:
    """A replica runs as its point does."""
    point = read_block(NativePoint, record.requested_shape, f"{where} requested_shape")
    if isinstance(point, str):
        yield point
        return
    yield from before_failures(where, record, 0)
    if point.point_type != blocks.config.mode or point.benchmark_id <= points:
        expected = f"a {blocks.config.mode} point after {points}"
        yield f"{where} requested_shape: expected {expected}, found {point.point_type} {point.benchmark_id}"
    eager = ("NONE", None, None, ["eager_warmup"])
    found = (point.expected_cudagraph_mode, point.expected_capture_size, point.padding_tokens, point.sample_reasons)
    if found != eager:
        yield f"{where} requested_shape: expected an eager_warmup without a graph, found {found}"
    shape = replica_shape_of(point, blocks, hash_block_size)
    if shape is None:
        most = blocks.limits.max_num_running_reqs
        yield f"{where} requested_shape: expected totals of 1..{most} requests, found other ones of {point.batch_size}"
        return
    if record.status != "completed":
        return
    count = record.observed_forward_count or 0
    if point.point_type == "decode":
        regime = "real_kv" if blocks.kvwarm and blocks.kvwarm.warm_eligible else None
        allowed = {1 + steps for steps in planned_steps(point, regime, shape, blocks)}
        allowed |= {1 + steps for steps in planned_steps(point, None, shape, blocks)} if regime else set()
        if allowed and not 2 <= count <= max(allowed):
            yield f"{where} observed_forward_count: expected 2..{max(allowed)}, found {count}"
        yield from steps_failures(where, record, shape.first, shape.step(count - 1))
        return
    inner = [each for each in ledger.records if each is not record and _within(each, record)]
    expected_count = 1 + sum(each.observed_forward_count or 0 for each in inner)
    if count != expected_count:
        yield f"{where} observed_forward_count: expected {expected_count}, found {count}"
    first = inner[0].first_scheduled_requests if inner else shape.first
    yield from steps_failures(where, record, first, shape.first)


def replica_shape_of(point: NativePoint, blocks: Blocks, hash_block_size: int) -> Shape | None:
    """A replica's requests; a decode total below two tokens a request is measured at two (3.3)."""
    if not 1 <= point.batch_size <= blocks.limits.max_num_running_reqs:
        return None
    if point.point_type == "decode" and point.batch_size <= point.total_kv_read_tokens < 2 * point.batch_size:
        point = msgspec.structs.replace(point, total_kv_read_tokens=2 * point.batch_size)
    try:
        return shape_of(point, hash_block_size)
    except ValueError:
        return None


def prefix_failures(
    where: str,
    record: WarmupRecord,
    blocks: Blocks,
    rows: Sequence[Row],
    shapes: Sequence[Shape],
    hash_block_size: int,
) -> Iterator[str]:
    """A real prefix is seeded slot by slot where it is missing, then its whole shape runs once."""
    asked = record.requested_shape
    lengths = asked.get("prompt_lengths")
    point = read_block(NativePoint, asked.get("point"), f"{where} requested_shape.point")
    if isinstance(point, str) or set(asked) != {"point", "prompt_lengths"}:
        yield point if isinstance(point, str) else f"{where} requested_shape: expected point and prompt_lengths"
        return
    if 1 <= point.benchmark_id <= len(rows):
        row, shape = rows[point.benchmark_id - 1], shapes[point.benchmark_id - 1]
        expected, before = row.point, point.benchmark_id - 1
    else:
        replicas_run = eager_points(blocks.ledger) if blocks.ledger else []
        named = [replica for replica in replicas_run if replica.benchmark_id == point.benchmark_id]
        replica_shape = replica_shape_of(named[0], blocks, hash_block_size) if named else None
        if replica_shape is None:
            yield f"{where} requested_shape.point: expected a point or a replica, found id {point.benchmark_id}"
            return
        shape, before = replica_shape, 0
        expected = msgspec.structs.replace(named[0], sample_reasons=["eager_warmup", "prefill_real_seed"])
    if point != expected:
        yield f"{where} requested_shape.point: expected the point {point.benchmark_id}, found another"
    yield from before_failures(where, record, before)
    if record.kind == "real_prefix_shape":
        if not same(shape.lengths, lengths):
            yield f"{where} prompt_lengths: expected {shape.lengths}, found {lengths}"
        yield from steps_failures(where, record, shape.first, shape.first)
        return
    cached = [kv for _, kv in shape.requests]
    if not isinstance(lengths, list) or not lengths or any(length not in cached for length in lengths):
        yield f"{where} prompt_lengths: expected of {sorted(set(cached))}, found {lengths}"
        return
    step = record.first_scheduled_requests
    if record.observed_forward_count == 1 and step is not None:
        total = step.sum_prefill_tokens + step.sum_prefill_kv_tokens
        plan = prefill_step([(length, 0) for length in lengths])
        found = msgspec.structs.replace(step, sum_prefill_tokens=total, sum_prefill_kv_tokens=0)
        if difference := step_difference(plan, found):
            yield f"{where} first_scheduled_requests {difference}"
        if step.sum_prefill_kv_tokens % hash_block_size:
            expected_kv = f"a multiple of {hash_block_size}"
            yield f"{where} sum_prefill_kv_tokens: expected {expected_kv}, found {step.sum_prefill_kv_tokens}"


def replica_failures(where: str, rows: Sequence[Row], found: Sequence[NativePoint]) -> Iterator[str]:
    """Ids of replicas follow the last point's, and no shape has two."""
    ids = [point.benchmark_id for point in found]
    expected = list(range(len(rows) + 1, len(rows) + 1 + len(ids)))
    if ids != expected:
        yield f"{where}replicas: expected ids {expected}, found {ids}"
    keys = [point.total_prefill_tokens or point.batch_size for point in found]
    if sorted(keys) != sorted(
        {
            row.point.total_prefill_tokens or row.point.batch_size
            for row in rows
            if row.point.expected_capture_size is None
        }
    ):
        yield f"{where}replicas: expected one of each shape without a graph, found {keys}"


def _within(record: WarmupRecord, outer: WarmupRecord) -> bool:
    """A real prefix is prepared inside the record of its replica."""
    if not record.kind.startswith("real_prefix") or record.forward_index_end is None or outer.forward_index_end is None:
        return False
    return (
        outer.forward_index_start <= record.forward_index_start and record.forward_index_end <= outer.forward_index_end
    )


def order_failures(where: str, records: Sequence[WarmupRecord]) -> Iterator[str]:
    """Records stand in the order of their starts and share no forward, but for a replica's own prefixes."""
    last, outer = 0, None
    for index, record in enumerate(records):
        if outer is not None and _within(record, outer):
            same_point = outer.requested_shape.get("benchmark_id") == _id_of(record.requested_shape.get("point"))
            if not same_point:
                yield f"{where}warmup record {index}: expected a prefix of the replica around it, found another's"
            inside = max(outer.forward_index_start, _end(records[index - 1]) if records[index - 1] is not outer else 0)
            if record.forward_index_start < inside:
                yield f"{where}warmup record {index} forward_index_start: expected at least {inside}, found less"
            continue
        if record.forward_index_start < last:
            found = record.forward_index_start
            yield f"{where}warmup record {index} forward_index_start: expected at least {last}, found {found}"
        last = max(last, _end(record))
        outer = record if record.kind == "eager_shape" else None


def _id_of(point: Any) -> Any:
    return point.get("benchmark_id") if isinstance(point, dict) else None


def _end(record: WarmupRecord) -> int:
    return record.forward_index_start if record.forward_index_end is None else record.forward_index_end


def reference_failures(where: str, rows: Sequence[Row], records: Sequence[WarmupRecord] | None) -> Iterator[str]:
    """Each point names the records before it: they are finished, the others begin after its last forward."""
    for row in rows:
        measurement = row.fpms[0].benchmark_measurement
        if measurement is UNSET or not measurement.raw_fpms:
            continue
        name = f"{where}benchmark_id={row.point.benchmark_id} warmup_records_before"
        found = measurement.preparation.warmup_records_before
        if records is None:
            if found is not None:
                yield f"{name}: expected none without a ledger, found {found}"
            continue
        forwards = [raw.benchmark_sample.forward_index for raw in measurement.raw_fpms]
        expected = sum(record.forward_index_start < forwards[0] for record in records)
        if found != expected:
            yield f"{name}: expected {expected}, found {found}"
        if forwards != list(range(forwards[0], forwards[0] + len(forwards))):
            yield f"{where}benchmark_id={row.point.benchmark_id} forward_index: expected to follow on, found {forwards}"
        for index, record in enumerate(records):
            started = record.forward_index_start
            if started < forwards[0] < _end(record) or forwards[0] <= started <= forwards[-1]:
                yield f"{where}warmup record {index}: expected no forward of {row.point.benchmark_id}, found some"
        if any(record.status == "running" for record in records[:expected]):
            yield f"{name}: expected finished records, found a running one"


def clock_failures(where: str, artifact: RankArtifact) -> Iterator[str]:
    """One clock: samples follow each other over the file, inside the seconds that the benchmark took."""
    begin: float | None = None
    end = -math.inf
    for row in artifact.results:
        measurement = row.fpms[0].benchmark_measurement
        if measurement is UNSET:
            continue
        for raw in measurement.raw_fpms:
            timing = raw.benchmark_sample.timing
            start = timing.end_monotonic - raw.wall_time if timing.start_monotonic is None else timing.start_monotonic
            name = f"{where}benchmark_id={row.point.benchmark_id} raw sample {raw.benchmark_sample.sample_index}"
            if start < end - 1e-6 or timing.end_monotonic <= start:
                yield f"{name} timing: expected after {end}, found {start}..{timing.end_monotonic}"
            end = timing.end_monotonic
            begin = start if begin is None else begin
    elapsed = artifact.timing.benchmark_elapsed_seconds
    if begin is not None and end - begin > elapsed:
        yield f"{where}timing: expected samples within {elapsed} s, found {end - begin} s of them"


def ledger_gaps(artifact: RankArtifact, blocks: Blocks) -> Iterator[str]:
    """Warm-ups that are not recorded, did not complete, or forwards that no record and no sample holds."""
    ledger = blocks.ledger
    if ledger is None:
        return
    if ledger.status == "unavailable":
        yield "warm-ups: unavailable"
        return
    if unfinished := [record.kind for record in ledger.records if record.status != "completed"]:
        yield f"warm-ups: {len(unfinished)} not completed ({', '.join(sorted(set(unfinished)))})"
    spans = [(record.forward_index_start, _end(record)) for record in ledger.records]
    for row in artifact.results:
        measurement = row.fpms[0].benchmark_measurement
        if measurement is not UNSET:
            forwards = [raw.benchmark_sample.forward_index for raw in measurement.raw_fpms]
            spans += [(forward, forward + 1) for forward in forwards]
    missing = last = 0
    for start, end in sorted(spans):
        missing, last = missing + max(0, start - last), max(last, end)
    if missing:
        yield f"forwards in no record: {missing}"
