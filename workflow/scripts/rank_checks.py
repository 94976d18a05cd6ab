"""What must hold of the rank artifacts of one run before they are merged: every finding, as a refusal.

The words are those of Dynamo's launcher where it has some (native artifact contract, merge). It does not check shapes
against points, regimes against stamps, prompt digests, the upper bound of samples, positive times, versions and unknown
keys; here they are checked.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET

from schemas.canonical import sha256
from schemas.errors import Refusal
from schemas.layout import rank_file
from schemas.native import SCHEMA_VERSION, BenchmarkMeasurement, Fpm, IterationGroup, NativePoint, RankArtifact, Row

from seed_regime import stamp_conflict

MUST_AGREE = (
    "status",
    "stop_reason",
    "run_id",
    "grid_digest",
    "coverage",
    "config",
    "measurement_protocol",
    "measurement_policy",
    "synthetic_prompts",
    "recurrent_state",
    "cudagraph",
)
"""Fields that are the same in every rank's file. A rank's own block limit may differ; `config` but for its path."""

KVWARM_MUST_AGREE = ("enabled", "warm_eligible", "skip_reason")


_plain = msgspec.json.Encoder(order="sorted").encode


def same(a: Any, b: Any) -> bool:
    """Equal as JSON: in Python True is 1."""
    return a is b or (a is not UNSET and b is not UNSET and _plain(a) == _plain(b))


def close(a: float, b: float) -> bool:
    """Equal but for the way of adding up."""
    return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12)


def check_complete(artifact: RankArtifact, file: Path) -> Iterator[Refusal]:
    """A rank's own words: complete, valid, usable, nothing skipped, and arithmetic that adds up."""
    coverage, timing = artifact.coverage, artifact.timing
    status: object = artifact.status
    if artifact.status == "partial":
        status = f"partial ({artifact.stop_reason}, {coverage.completed_points} of {coverage.expected_points} points)"
    if artifact.status == "failed":
        status = f"failed ({artifact.error})"
    wanted: dict[str, tuple[Any, Any]] = {
        "schema_version": (SCHEMA_VERSION, artifact.schema_version),
        "status": ("complete", status),
        "valid": (True, artifact.valid),
        "usable": (True, artifact.usable),
        "timing_valid": (True, artifact.timing_valid),
        "stop_reason": (None, artifact.stop_reason),
        "error": (None, artifact.error),
        "skipped_points": ([], artifact.skipped_points),
        "missing_phases": ([], artifact.missing_phases),
        "coverage.completed_points": (coverage.expected_points, coverage.completed_points),
        "coverage.skipped_points": (0, coverage.skipped_points),
        "number of results": (coverage.completed_points, len(artifact.results)),
        "number of iteration_groups": (coverage.completed_points, len(artifact.iteration_groups)),
    }
    for field, (expected, found) in wanted.items():
        if expected != found:
            yield Refusal(field, expected, found, file)
    for field, text in (("run_id", artifact.run_id), ("grid_digest", artifact.grid_digest)):
        if not text:
            yield Refusal(field, "a text", repr(text), file)
    if file.name != rank_file(artifact.dp.rank):
        yield Refusal("dp.rank", f"the rank of {file.name}", artifact.dp.rank, file)
    if (artifact.measurement_protocol is UNSET) != (artifact.warmup_evidence is UNSET):
        yield Refusal("warmup_evidence", "with measurement_protocol, or neither of them", "one of them", file)
    total = sum(group.wall_time for group in artifact.iteration_groups)
    if not close(timing.measured_iteration_seconds, total):
        yield Refusal("timing.measured_iteration_seconds", total, timing.measured_iteration_seconds, file)
    if timing.measured_iteration_seconds > timing.benchmark_elapsed_seconds + 1e-12:
        least = f"at least measured_iteration_seconds {timing.measured_iteration_seconds}"
        yield Refusal("timing.benchmark_elapsed_seconds", least, timing.benchmark_elapsed_seconds, file)
    ids = sorted(group.benchmark_id for group in artifact.iteration_groups)
    if ids != list(range(1, len(ids) + 1)):
        yield Refusal("benchmark_id", f"1..{len(ids)}, each once", ids, file)


def engine_of_all(engine: dict[str, Any]) -> dict[str, Any]:
    """The engine block without the one value that tells ranks apart."""
    parallel = engine.get("parallel", {})
    if not isinstance(parallel, dict):
        return engine
    return engine | {"parallel": parallel | {"data_parallel_rank": None}}


def check_agreement(artifact: RankArtifact, reference: RankArtifact, file: Path, first: Path) -> Iterator[Refusal]:
    """All ranks ran one benchmark with one engine configuration, and hold the same groups."""
    if artifact.dp.size != reference.dp.size:
        yield Refusal("dp.size", reference.dp.size, artifact.dp.size, file)
    for field in MUST_AGREE:
        expected, found = getattr(reference, field), getattr(artifact, field)
        if field == "config":
            expected, found = expected | {"output_path": None}, found | {"output_path": None}
        if not same(expected, found):
            if field == "measurement_protocol":
                field = "Self-benchmark measurement protocol mismatch: measurement_protocol"
            shown = isinstance(expected, str | int | None)
            yield Refusal(
                field, expected if shown else f"the value of {first.name}", found if shown else "another", file
            )
    if (artifact.kvwarm is UNSET) != (reference.kvwarm is UNSET):
        yield Refusal("kvwarm", f"as in {first.name}", "a block on one of them", file)
    elif artifact.kvwarm is not UNSET and reference.kvwarm is not UNSET:
        for field in KVWARM_MUST_AGREE:
            wanted, has = reference.kvwarm.get(field), artifact.kvwarm.get(field)
            if not same(wanted, has):
                yield Refusal(f"kvwarm.{field}", f"{wanted} of {first.name}", has, file)
    groups = artifact.iteration_groups  # the very same list when the files have the same bytes
    if groups is not reference.iteration_groups and groups != reference.iteration_groups:
        yield Refusal("iteration_groups", f"the value of {first.name}", "another", file)
    if artifact.engine is UNSET or reference.engine is UNSET:
        if artifact.engine is not reference.engine:
            yield Refusal("engine provenance mismatch: engine", f"as in {first.name}", "on one of them", file)
        return
    engine, wanted_engine = engine_of_all(artifact.engine), engine_of_all(reference.engine)
    for field in sorted(wanted_engine.keys() | engine.keys()):
        if not same(wanted_engine.get(field, UNSET), engine.get(field, UNSET)):
            name = f"engine provenance mismatch: engine.{field}"
            yield Refusal(name, wanted_engine.get(field, "nothing"), engine.get(field, "nothing"), file)


def check_groups(reference: RankArtifact, file: Path) -> Iterator[Refusal]:
    """Each point ran on every rank, once, as it says, and the slowest rank's time is the point's."""
    world = list(range(reference.dp.size))
    has_protocol = reference.measurement_protocol is not UNSET
    last_forward = dict.fromkeys(world, -1)
    for group in reference.iteration_groups:
        number = group.benchmark_id
        if number != group.point.benchmark_id:
            yield Refusal("point.benchmark_id", number, group.point.benchmark_id, file)
        ranks = [result.dp_rank for result in group.rank_results]
        if group.expected_dp_ranks != world or not group.complete or ranks != world:
            field = f"iteration group is incomplete for benchmark_id={number}"
            yield Refusal(field, world, ranks if group.complete else f"{ranks}, complete false", file)
            continue
        retained = []
        for rank, result in zip(world, group.rank_results, strict=True):
            if len(result.fpms) != 1:
                field = "Each self-benchmark rank-point must contain exactly one FPM: "
                yield Refusal(f"{field}rank={rank} benchmark_id={number}", 1, len(result.fpms), file)
                continue
            (fpm,) = result.fpms
            retained.append(fpm.wall_time)
            yield from check_fpm(fpm, group.point, rank, file)
            measurement = fpm.benchmark_measurement
            where = f"rank={rank} benchmark_id={number}"
            if (measurement is UNSET) == has_protocol:
                field = (
                    "measurement evidence has no shared protocol"
                    if not has_protocol
                    else ("measurement evidence missing or invalid")
                )
                wanted = "benchmark_measurement" if has_protocol else "nothing without a measurement_protocol"
                yield Refusal(f"{field}: {where}", wanted, "nothing" if has_protocol else "a measurement", file)
            elif measurement is not UNSET:
                yield from check_measurement(fpm, measurement, group.point, where, last_forward[rank], file)
                for raw in measurement.raw_fpms[-1:]:
                    last_forward[rank] = raw.benchmark_sample.forward_index
        if retained and group.wall_time != max(retained):
            yield Refusal(
                f"iteration wall time mismatch for benchmark_id={number}", max(retained), group.wall_time, file
            )


def counted(point: NativePoint) -> tuple[int, int, int, int, int]:
    """What the scheduler counts in the forward pass of a point: requests, tokens and cached tokens of prefill, then
    requests and contexts of decode."""
    if point.point_type == "prefill":
        return point.batch_size, point.total_prefill_tokens, point.total_kv_read_tokens, 0, 0
    return 0, 0, 0, point.batch_size, point.total_kv_read_tokens


def check_fpm(fpm: Fpm, point: NativePoint, rank: int, file: Path) -> Iterator[Refusal]:
    """A retained value: whose it is, a time, and the point's own shape."""
    where = f"rank={rank} benchmark_id={point.benchmark_id}"
    if (fpm.counter_id, fpm.dp_rank, fpm.version) != (point.benchmark_id, rank, 1):
        field = f"measurement identity mismatch: {where}: counter_id, dp_rank, version"
        yield Refusal(field, (point.benchmark_id, rank, 1), (fpm.counter_id, fpm.dp_rank, fpm.version), file)
    if fpm.wall_time <= 0:
        yield Refusal(f"wall_time {where}", "a positive number of seconds", fpm.wall_time, file)
    scheduled = fpm.scheduled_requests
    found = (
        scheduled.num_prefill_requests,
        scheduled.sum_prefill_tokens,
        scheduled.sum_prefill_kv_tokens,
        scheduled.num_decode_requests,
        scheduled.sum_decode_kv_tokens,
    )
    if counted(point) != found:
        yield Refusal(f"scheduled_requests {where}", counted(point), found, file)
    if point.point_type == "decode" and (point.total_prefill_tokens or point.total_kv_read_tokens < point.batch_size):
        found_totals = f"{point.total_prefill_tokens} and {point.total_kv_read_tokens}"
        yield Refusal(f"point {where}: tokens", f"0 new and at least {point.batch_size} read", found_totals, file)


def check_measurement(
    fpm: Fpm, measurement: BenchmarkMeasurement, point: NativePoint, where: str, last_forward: int, file: Path
) -> Iterator[Refusal]:
    """A retained value against its raw samples (native artifact, raw sample and reductions)."""
    evidence = f"Self-benchmark execution evidence is invalid: {where}"
    raw, expected_samples = measurement.raw_fpms, measurement.expected_internal_samples
    if (measurement.schema_version, measurement.dp_rank) != (1, fpm.dp_rank):
        found: object = (measurement.schema_version, measurement.dp_rank)
        yield Refusal(f"measurement identity mismatch: {where}: schema_version, dp_rank", (1, fpm.dp_rank), found, file)
    if not 1 <= len(raw) <= expected_samples:
        yield Refusal(f"{evidence}: raw samples", f"1..{expected_samples}", len(raw), file)
        return
    for index, sample in enumerate(raw):
        own = sample.benchmark_sample
        if own.sample_index != index:
            yield Refusal(f"{evidence}: sample_index", index, own.sample_index, file)
        if (sample.counter_id, sample.dp_rank, sample.worker_id) != (fpm.counter_id, fpm.dp_rank, fpm.worker_id):
            yield Refusal(f"{evidence}: raw sample {index}", where, (sample.counter_id, sample.dp_rank), file)
        if own.forward_index <= last_forward:
            yield Refusal(f"{evidence}: forward_index", f"more than {last_forward}", own.forward_index, file)
        last_forward = own.forward_index
        if sample.wall_time <= 0:
            yield Refusal(f"{evidence}: raw sample {index} wall_time", "a positive number", sample.wall_time, file)
        if own.timing.start_monotonic is not None:
            interval = own.timing.end_monotonic - own.timing.start_monotonic
            if not math.isclose(sample.wall_time, interval, rel_tol=1e-9, abs_tol=1e-9):
                field = f"{evidence}: raw sample {index} contradicts its timing interval: wall_time"
                yield Refusal(field, interval, sample.wall_time, file)
        graph = own.cudagraph
        tokens = (graph.num_unpadded_tokens, graph.num_padded_tokens, graph.num_paddings)
        if graph.status == "observed":
            if graph.runtime_mode is None or None in tokens or tokens[1] - tokens[0] != tokens[2] or tokens[2] < 0:  # type: ignore[operator]
                field = f"{evidence}: raw sample {index} has invalid observed graph data"
                yield Refusal(field, "mode, and padded - unpadded = paddings", (graph.runtime_mode, *tokens), file)
        elif (graph.runtime_mode, *tokens) != (None,) * 4:
            field = f"{evidence}: raw sample {index} contradicts its graph observation status"
            yield Refusal(field, "nothing of an unavailable observation", (graph.runtime_mode, *tokens), file)
    yield from check_reduction(fpm, measurement, evidence, file)
    yield from check_prompts(measurement, point, where, file)


def check_reduction(fpm: Fpm, measurement: BenchmarkMeasurement, evidence: str, file: Path) -> Iterator[Refusal]:
    """The retained value is what its reduction gives of the raw samples, its counts those of the sample it is from.

    Of a sequence of decode steps each reads one token more of every request than the one before.
    """
    raw, expected_samples = measurement.raw_fpms, measurement.expected_internal_samples
    last, method = len(raw) - 1, measurement.estimate.method
    allowed: dict[str, tuple[bool, list[int], int]] = {
        "single_step": (last == 0, [0], 0),
        "last_step": (expected_samples > 1 and len(raw) == expected_samples, [last], last),
        "adjacent_upper_median": (expected_samples > 2 and last >= 1, list(range(1, len(raw))), 1),
    }
    applies, indices, retained = allowed[method]
    if not applies or measurement.estimate.raw_sample_indices != indices:
        of = f"{len(raw)} of {expected_samples} samples"
        wanted = f"{method} over {indices} of {of}" if applies else f"another method than {method} for {of}"
        yield Refusal(f"{evidence}: reduction", wanted, (method, measurement.estimate.raw_sample_indices), file)
        return
    walls = sorted([raw[index].wall_time for index in indices])
    value = walls[len(walls) // 2]
    if not math.isclose(fpm.wall_time, value, rel_tol=1e-9):
        field = f"{evidence}: retained wall time contradicts the raw reduction inputs: wall_time"
        yield Refusal(field, value, fpm.wall_time, file)
    for index in indices:
        sample, scheduled = raw[index], fpm.scheduled_requests
        if sample.queued_requests != fpm.queued_requests:
            yield Refusal(f"{evidence}: raw sample {index} queued_requests", "the retained ones", "others", file)
        if sample.scheduled_requests != scheduled:
            steps = (index - retained) * scheduled.num_decode_requests
            grown = scheduled.sum_decode_kv_tokens + steps
            if sample.scheduled_requests != msgspec.structs.replace(scheduled, sum_decode_kv_tokens=grown):
                wanted = "the retained ones, or a token more of every request for each step"
                yield Refusal(f"{evidence}: raw sample {index} scheduled_requests", wanted, "others", file)


def check_prompts(measurement: BenchmarkMeasurement, point: NativePoint, where: str, file: Path) -> Iterator[Refusal]:
    """A digest for each request of the point, and one over them all."""
    prompts = measurement.prompts
    if prompts.status == "unavailable":
        if prompts.sha256 is not None or prompts.requests:
            yield Refusal(f"prompts {where}", "nothing where they are unavailable", "digests", file)
        return
    slots = [request.slot for request in prompts.requests]
    if slots != list(range(point.batch_size)):
        yield Refusal(f"prompts {where}: slots", f"0..{point.batch_size - 1}", slots, file)
    expected = sha256(_plain(prompts.requests))
    if prompts.sha256 != expected:
        yield Refusal(f"prompts {where}: sha256", f"{expected} of the requests", prompts.sha256, file)


def check_rows(artifact: RankArtifact, groups: Sequence[IterationGroup], file: Path) -> Iterator[Refusal]:
    """A rank's own rows are its entries in the groups, in the same order; regime and stamps agree."""
    rank = artifact.dp.rank
    if [row.point.benchmark_id for row in artifact.results] != [group.benchmark_id for group in groups]:
        yield Refusal("results", "the points of the iteration groups, in their order", "others", file)
        return
    for row, group in zip(artifact.results, groups, strict=True):
        entry = group.rank_results[rank].fpms if rank < len(group.rank_results) else None
        if row.point != group.point or row.fpms != entry:
            field = f"local result differs from synchronized group: rank={rank} benchmark_id={group.benchmark_id}"
            yield Refusal(field, "the group's entry", "another", file)
        conflict = row_conflict(row)
        if conflict is not None:
            yield Refusal(f"benchmark_id={group.benchmark_id} kv_seed_regime", *conflict, file)


def row_conflict(row: Row) -> tuple[str, str] | None:
    """Where the native regime of a row and its stamps contradict each other: expected and found."""
    if row.kv_seed_regime is None:
        return None
    conflict = stamp_conflict(row.kv_seed_regime, row.point.sample_reasons)
    return None if conflict is None else ("what its stamps say", conflict)


def check_regimes(artifacts: Sequence[RankArtifact], file: Path) -> Iterator[Refusal]:
    """One regime for a point, over all ranks."""
    for rows in zip(*(artifact.results for artifact in artifacts), strict=False):
        regimes = {row.kv_seed_regime for row in rows}
        if len(regimes) > 1:
            field = f"kv_seed_regime benchmark_id={rows[0].point.benchmark_id}"
            yield Refusal(field, "one regime over all ranks", sorted(map(str, regimes)), file)
