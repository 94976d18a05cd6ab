"""Merge the rank artifacts of a cell: all ranks agree, the slowest rank's time counts."""

import argparse
import math
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET

from schemas.canonical import read_bytes, read_model, sha256
from schemas.errors import Refusal, run
from schemas.merged import MergedArtifact
from schemas.native import (
    SCHEMA_VERSION,
    CellReceipt,
    Coverage,
    Fpm,
    IterationGroup,
    RankArtifact,
    Row,
    read_struct,
    write_struct,
)
from schemas.plan import FrozenCell

MUST_AGREE = (
    "status",
    "stop_reason",
    "run_id",
    "grid_digest",
    "coverage",
    "config",
    "measurement_protocol",
    "iteration_groups",
    "kvwarm",
)
"""Fields that are the same in every rank's file; a rank's own block limit may differ."""


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12)


def check_complete(artifact: RankArtifact, file: Path) -> None:
    """A rank's own words: complete, valid, usable, nothing skipped, and arithmetic that adds up."""
    wanted: dict[str, tuple[Any, Any]] = {
        "schema_version": (SCHEMA_VERSION, artifact.schema_version),
        "status": ("complete", artifact.status),
        "valid": (True, artifact.valid),
        "usable": (True, artifact.usable),
        "timing_valid": (True, artifact.timing_valid),
        "stop_reason": (None, artifact.stop_reason),
        "error": (None, artifact.error),
        "skipped_points": ([], artifact.skipped_points),
        "missing_phases": ([], artifact.missing_phases),
        "coverage.completed_points": (artifact.coverage.expected_points, artifact.coverage.completed_points),
        "coverage.skipped_points": (0, artifact.coverage.skipped_points),
        "number of results": (artifact.coverage.completed_points, len(artifact.results)),
        "number of iteration_groups": (artifact.coverage.completed_points, len(artifact.iteration_groups)),
    }
    for field, (expected, found) in wanted.items():
        if expected != found:
            raise Refusal(field, expected, found, file)
    timing = artifact.timing
    total = sum(group.wall_time for group in artifact.iteration_groups)
    if not _close(timing.measured_iteration_seconds, total):
        raise Refusal("timing.measured_iteration_seconds", total, timing.measured_iteration_seconds, file)
    if timing.measured_iteration_seconds > timing.benchmark_elapsed_seconds + 1e-12:
        raise Refusal(
            "timing.benchmark_elapsed_seconds",
            f"at least measured_iteration_seconds {timing.measured_iteration_seconds}",
            timing.benchmark_elapsed_seconds,
            file,
        )
    ids = sorted(group.benchmark_id for group in artifact.iteration_groups)
    if ids != list(range(1, len(ids) + 1)):
        raise Refusal("benchmark_id", f"1..{len(ids)}, each once", ids, file)


def check_fpm(fpm: Fpm, rank: int, benchmark_id: int, last_forward: int, file: Path) -> int:
    """One retained value against its raw samples; returns the last forward index it used."""
    where = f"rank={rank} benchmark_id={benchmark_id}"
    evidence = f"Self-benchmark execution evidence is invalid: {where}"
    if (fpm.counter_id, fpm.dp_rank) != (benchmark_id, rank):
        raise Refusal(
            f"measurement identity mismatch: {where}", (benchmark_id, rank), (fpm.counter_id, fpm.dp_rank), file
        )
    if not (math.isfinite(fpm.wall_time) and fpm.wall_time > 0):
        raise Refusal(f"wall_time {where}", "a positive number of seconds", fpm.wall_time, file)
    measurement = fpm.benchmark_measurement
    if measurement is UNSET:
        raise Refusal(f"measurement evidence missing or invalid: {where}", "benchmark_measurement", "nothing", file)
    raw = measurement.raw_fpms
    if not 2 <= len(raw) <= measurement.expected_internal_samples:
        raise Refusal(f"{evidence}: raw samples", f"2..{measurement.expected_internal_samples}", len(raw), file)
    for index, sample in enumerate(raw):
        timing = sample.benchmark_sample.timing
        if sample.benchmark_sample.sample_index != index:
            raise Refusal(f"{evidence}: sample_index", index, sample.benchmark_sample.sample_index, file)
        if (sample.counter_id, sample.dp_rank) != (benchmark_id, rank):
            raise Refusal(f"{evidence}: raw sample {index}", where, (sample.counter_id, sample.dp_rank), file)
        if sample.benchmark_sample.forward_index <= last_forward:
            expected = f"more than {last_forward}"
            raise Refusal(f"{evidence}: forward_index", expected, sample.benchmark_sample.forward_index, file)
        last_forward = sample.benchmark_sample.forward_index
        if not (math.isfinite(sample.wall_time) and sample.wall_time > 0):
            raise Refusal(f"{evidence}: raw sample {index} wall_time", "a positive number", sample.wall_time, file)
        if sample.scheduled_requests != fpm.scheduled_requests:
            raise Refusal(f"{evidence}: raw sample {index} scheduled_requests", "the retained ones", "others", file)
        if timing.start_monotonic is not None:
            interval = timing.end_monotonic - timing.start_monotonic
            if not math.isclose(sample.wall_time, interval, rel_tol=1e-9, abs_tol=1e-9):
                raise Refusal(f"{evidence}: raw sample {index} timing interval", interval, sample.wall_time, file)
    estimate = measurement.estimate
    if estimate.method != "adjacent_upper_median" or estimate.raw_sample_indices != list(range(1, len(raw))):
        expected = f"adjacent_upper_median over 1..{len(raw) - 1}"
        raise Refusal(f"{evidence}: reduction", expected, (estimate.method, estimate.raw_sample_indices), file)
    walls = sorted(raw[index].wall_time for index in estimate.raw_sample_indices)
    if not math.isclose(fpm.wall_time, walls[len(walls) // 2], rel_tol=1e-9):
        raise Refusal(f"{evidence}: retained wall time", walls[len(walls) // 2], fpm.wall_time, file)
    return last_forward


def check_shape(fpm: Fpm, group: IterationGroup, rank: int, file: Path) -> None:
    """The scheduled requests are the point's, on every rank."""
    point, scheduled = group.point, fpm.scheduled_requests
    prefill = point.point_type == "prefill"
    expected = (
        (point.batch_size, point.total_prefill_tokens, point.total_kv_read_tokens, 0, 0)
        if prefill
        else (0, 0, 0, point.batch_size, point.total_kv_read_tokens)
    )
    found = (
        scheduled.num_prefill_requests,
        scheduled.sum_prefill_tokens,
        scheduled.sum_prefill_kv_tokens,
        scheduled.num_decode_requests,
        scheduled.sum_decode_kv_tokens,
    )
    if expected != found:
        raise Refusal(f"scheduled_requests rank={rank} benchmark_id={group.benchmark_id}", expected, found, file)


def elapsed_seconds(artifact: RankArtifact) -> float:
    return artifact.timing.benchmark_elapsed_seconds


def engine_of_all(engine: dict[str, Any]) -> dict[str, Any]:
    """The engine block without the one value that tells ranks apart."""
    return engine | {"parallel": engine.get("parallel", {}) | {"data_parallel_rank": None}}


def check_engine(artifact: RankArtifact, reference: RankArtifact, file: Path) -> None:
    """All ranks ran one engine configuration."""
    expected, found = engine_of_all(reference.engine), engine_of_all(artifact.engine)
    for field in sorted(expected.keys() | found.keys()):
        if expected.get(field) != found.get(field):
            name = f"engine provenance mismatch: engine.{field}"
            raise Refusal(name, expected.get(field), found.get(field), file)


def merge(cell: FrozenCell, ranks: dict[Path, RankArtifact], sources: dict[str, str]) -> MergedArtifact:
    """All ranks of one cell as one artifact.

    Raises:
        Refusal: a rank that is missing, incomplete, or disagrees; names the field and the file.
    """
    by_rank: dict[int, tuple[Path, RankArtifact]] = {}
    for file, artifact in ranks.items():
        check_complete(artifact, file)
        if artifact.dp.rank in by_rank:
            raise Refusal("dp.rank", "each rank once", artifact.dp.rank, file)
        by_rank[artifact.dp.rank] = (file, artifact)
    world = list(range(cell.identity.topology.dp))
    if sorted(by_rank) != world:
        raise Refusal("dp ranks", world, sorted(by_rank), next(iter(ranks)).parent)
    reference_file, reference = by_rank[0]
    if reference.config.get("mode") != cell.identity.phase:
        raise Refusal("config.mode", cell.identity.phase, reference.config.get("mode"), reference_file)
    if reference.warmup_evidence.get("status") != "recorded":
        raise Refusal("warmup_evidence.status", "recorded", reference.warmup_evidence.get("status"), reference_file)
    for file, artifact in by_rank.values():
        if artifact.dp.size != len(world):
            raise Refusal("dp.size", len(world), artifact.dp.size, file)
        for field in MUST_AGREE:
            if getattr(artifact, field) != getattr(reference, field):
                raise Refusal(field, f"the value of {reference_file}", "another", file)
        check_engine(artifact, reference, file)

    last_forward = dict.fromkeys(world, -1)
    for group in reference.iteration_groups:
        if group.expected_dp_ranks != world or not group.complete:
            field = f"iteration group is incomplete for benchmark_id={group.benchmark_id}"
            raise Refusal(field, world, group.expected_dp_ranks, reference_file)
        if [result.dp_rank for result in group.rank_results] != world:
            field = f"rank_results benchmark_id={group.benchmark_id}"
            raise Refusal(field, world, [result.dp_rank for result in group.rank_results], reference_file)
        for rank, result in zip(world, group.rank_results, strict=True):
            if len(result.fpms) != 1:
                field = f"Each self-benchmark rank-point must contain exactly one FPM: rank={rank}"
                raise Refusal(field, 1, len(result.fpms), reference_file)
            fpm = result.fpms[0]
            last_forward[rank] = check_fpm(fpm, rank, group.benchmark_id, last_forward[rank], reference_file)
            check_shape(fpm, group, rank, reference_file)
        slowest = max(result.fpms[0].wall_time for result in group.rank_results)
        if group.wall_time != slowest:
            field = f"iteration wall time mismatch for benchmark_id={group.benchmark_id}"
            raise Refusal(field, slowest, group.wall_time, reference_file)

    results = _flatten(by_rank, reference.iteration_groups)
    slowest_rank = max((artifact for _, artifact in by_rank.values()), key=elapsed_seconds)
    return MergedArtifact(
        schema_version=SCHEMA_VERSION,
        kvwarm=reference.kvwarm,
        artifact_type="merged",
        status="complete",
        run_id=reference.run_id,
        grid_digest=reference.grid_digest,
        cell_digest=cell.digest,
        source_sha256=sources,
        timing=msgspec.structs.replace(
            slowest_rank.timing,
            rank_benchmark_elapsed_seconds={
                str(rank): artifact.timing.benchmark_elapsed_seconds for rank, (_, artifact) in sorted(by_rank.items())
            },
        ),
        dp={"ranks": world, "source_ranks": world, "managed_size": len(world), "global_size": len(world)},
        coverage=Coverage(
            expected_points=reference.coverage.expected_points * len(world),
            completed_points=reference.coverage.completed_points * len(world),
            skipped_points=0,
        ),
        config=reference.config,
        limits=reference.limits,
        measurement_protocol=reference.measurement_protocol,
        rank_warmup_evidence={str(rank): artifact.warmup_evidence for rank, (_, artifact) in sorted(by_rank.items())},
        engine=engine_of_all(reference.engine),
        results=results,
        iteration_groups=reference.iteration_groups,
    )


def _flatten(by_rank: dict[int, tuple[Path, RankArtifact]], groups: list[IterationGroup]) -> list[Row]:
    """Rows by id, then rank; each must be its group's entry, and the ranks must agree on the point's regime."""
    rows: list[Row] = []
    local = {rank: {row.point.benchmark_id: row for row in a.results} for rank, (_, a) in by_rank.items()}
    for group in sorted(groups, key=lambda group: group.benchmark_id):
        regimes = set()
        for rank, (file, _) in sorted(by_rank.items()):
            row = local[rank].get(group.benchmark_id)
            if row is None or row.point != group.point or row.fpms != group.rank_results[rank].fpms:
                field = f"local result differs from synchronized group: rank={rank} benchmark_id={group.benchmark_id}"
                raise Refusal(field, "the group's entry", "another" if row else "nothing", file)
            regimes.add(row.kv_seed_regime)
            rows.append(msgspec.structs.replace(row, point=msgspec.structs.replace(row.point, dp_rank=rank)))
        if len(regimes) != 1:
            field = f"kv_seed_regime benchmark_id={group.benchmark_id}"
            raise Refusal(field, "one regime over all ranks", sorted(regimes), by_rank[0][0])
    return rows


def merge_files(cell: FrozenCell, receipt_file: Path, files: list[Path]) -> MergedArtifact:
    """Read, compare with the receipt's digests, and merge."""
    receipt = read_struct(CellReceipt, receipt_file, "receipt")
    if receipt.cell_digest != cell.digest:
        raise Refusal("cell_digest", cell.digest, receipt.cell_digest, receipt_file)
    sources = {}
    for file in files:
        sources[file.name] = sha256(read_bytes(file, "rank artifact"))
        if receipt.files.get(file.name) != sources[file.name]:
            raise Refusal(f"sha256 of {file.name}", receipt.files.get(file.name), sources[file.name], file)
    return merge(cell, {file: read_struct(RankArtifact, file, "rank artifact") for file in files}, sources)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cell", type=Path, required=True)
    parser.add_argument("--receipt", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("ranks", type=Path, nargs="+")
    arguments = parser.parse_args()
    cell = read_model(FrozenCell, arguments.cell, "frozen cell")
    write_struct(arguments.output, merge_files(cell, arguments.receipt, arguments.ranks))


if __name__ == "__main__":
    run(main)
