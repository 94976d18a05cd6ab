"""The evidence of a cell that Dynamo's self-benchmark measured: every leaf against what else witnesses it.

The artifacts have passed the merge: complete, ids 1..n, groups alike on all ranks, retained values reduced again from
their samples. What nothing in the artifact or the cell says a second time stays free (the test lists the same leaves):

| leaf | why |
|---|---|
| run_id; time stamps, clocks and wall times that move together | the measurement itself |
| config.timeout, sample limits, output_path, hybrid_live_state, collect_imbalanced | no trace at explicit points |
| capacity.common.grid_invariants_digest, synchronization.port | no recipe; a socket |
| giant_kv_threshold and _repeats that no point reaches; switches of the other phase | without effect |
| content_seed and synthetic_pool_tag where no prompt is derivable | nothing shows them |
| kvwarm.dataset, build_seconds of a chain | text and time of seeding |
| engine: attention, cache groups' layout, prefix caching and experts where no rule asks for them, chunking, model \
names, versions of Dynamo, Python and the build | the frozen cell does not hold them |
| prompts of real seeds; in 1.6.1 samples, prompts and warm-ups | not in the artifact: reported as gaps |
"""

from collections.abc import Iterator, Sequence

from msgspec import UNSET

from schemas.native import RankArtifact
from schemas.plan import FrozenCell

from dynamo_blocks import Blocks, read_blocks
from dynamo_kvwarm import kvwarm_failures, kvwarm_gaps
from dynamo_ledger import clock_failures, grid_failures, grid_gap, ledger_failures, ledger_gaps
from dynamo_points import (
    Shape,
    eager_dispatch_failures,
    fpm_failures,
    graph_failures,
    mark_failures,
    measurement_failures,
    planned_steps,
    reason_failures,
    regime_failures,
    shape_of,
    step_difference,
)
from dynamo_prompts import prompt_failures, prompt_gaps
from dynamo_settings import (
    config_failures,
    engine_failures,
    graph_block_failures,
    protocol_failures,
    rank_failures,
    setting_gaps,
)


def failures(cell: FrozenCell, artifacts: Sequence[RankArtifact]) -> Iterator[str]:
    """Each contradiction between the artifacts (in rank order), or of one with the cell, as one line.

    Of artifacts that no merge takes it says nothing: their rows are not told apart.
    """
    if not mergeable(artifacts):
        return
    ranks: list[Blocks] = []
    for rank, artifact in enumerate(artifacts):
        blocks = read_blocks(artifact)
        if isinstance(blocks, list):
            yield from (_rank(rank, artifacts) + finding for finding in blocks)
        else:
            ranks.append(blocks)
    if len(ranks) < len(artifacts):
        return
    shapes: list[Shape] = []
    for position, row in enumerate(artifacts[0].results):
        limit = ranks[0].limits.max_num_running_reqs
        if row.point.benchmark_id != position + 1:
            yield f"results: expected benchmark_id {position + 1} at its place, found {row.point.benchmark_id}"
            return
        if not 1 <= row.point.batch_size <= limit:
            yield f"benchmark_id={position + 1} batch_size: expected 1..{limit}, found {row.point.batch_size}"
            return
        try:
            shapes.append(shape_of(row.point, cell.hash_block_size))
        except ValueError as error:
            yield f"benchmark_id={position + 1}: expected totals that its requests add up to, found {error}"
            return
    yield from rank_failures(ranks)
    yield from grid_failures(artifacts[0], ranks[0])
    for rank, (artifact, blocks) in enumerate(zip(artifacts, ranks, strict=True)):
        where = _rank(rank, artifacts)
        yield from config_failures(where, cell, rank, artifact, blocks)
        yield from graph_block_failures(where, cell, blocks)
        yield from engine_failures(where, cell, rank, artifact, blocks)
        yield from protocol_failures(where, artifact, blocks)
        yield from kvwarm_failures(where, cell, artifact, blocks, shapes)
        yield from ledger_failures(where, artifact, blocks, shapes, cell.hash_block_size)
        yield from clock_failures(where, artifact)
        yield from row_failures(where, rank, artifact, blocks, shapes)


def mergeable(artifacts: Sequence[RankArtifact]) -> bool:
    """Every rank has the same points, one value of each."""
    points = [[row.point.benchmark_id for row in artifact.results] for artifact in artifacts]
    single = all(len(row.fpms) == 1 for artifact in artifacts for row in artifact.results)
    return single and bool(points) and bool(points[0]) and all(each == points[0] for each in points)


def row_failures(
    where: str, rank: int, artifact: RankArtifact, blocks: Blocks, shapes: Sequence[Shape]
) -> Iterator[str]:
    """Every point of one rank."""
    worker_id = artifact.results[0].fpms[0].worker_id
    for position, (row, shape) in enumerate(zip(artifact.results, shapes, strict=True)):
        name = f"{where}benchmark_id={row.point.benchmark_id}"
        fpm, decode = row.fpms[0], row.point.point_type == "decode"
        steps = planned_steps(row.point, row.kv_seed_regime, shape, blocks) if decode else ()
        if rank == 0:
            yield from reason_failures(name, row.point, blocks)
            yield from graph_failures(name, row.point, blocks)
        yield from regime_failures(name, row, blocks)
        yield from fpm_failures(name, fpm, worker_id)
        if difference := step_difference(shape.step(1), fpm.scheduled_requests):
            yield f"{name} scheduled_requests {difference}"
        yield from mark_failures(name, fpm, decode, steps)
        yield from measurement_failures(name, row, position, shape, steps, artifact.grid_digest)
        yield from prompt_failures(name, row, rank, shape, blocks)
        if blocks.cudagraph.mode == "NONE" and fpm.benchmark_measurement is not UNSET:
            yield from eager_dispatch_failures(name, fpm.benchmark_measurement)


def gaps(cell: FrozenCell, artifacts: Sequence[RankArtifact]) -> Iterator[str]:
    """What the artifacts (in rank order) do not establish; reported, never a reason to refuse."""
    if not mergeable(artifacts):
        return
    for rank, artifact in enumerate(artifacts):
        blocks = read_blocks(artifact)
        if isinstance(blocks, list):
            continue
        lines = [*setting_gaps(cell, artifact, blocks), *kvwarm_gaps(cell, artifact, blocks)]
        lines += [*prompt_gaps(artifact.results, blocks), *ledger_gaps(artifact, blocks)]
        lines += sample_gaps(artifact, blocks)
        if blocks.protocol is None and not any(row.fpms[0].benchmark_measurement for row in artifact.results):
            version = blocks.engine.versions.dynamo if blocks.engine else "of an unknown version"
            lines.append(f"measurement evidence: none recorded by Dynamo {version}")
        if rank == 0 and (why := grid_gap(artifact.results, blocks)):
            lines.append(f"grid_digest: not derivable ({why})")
        yield from (_rank(rank, artifacts) + line for line in lines)


def sample_gaps(artifact: RankArtifact, blocks: Blocks) -> Iterator[str]:
    """Decode points whose steady steps stopped early."""
    short = 0
    for row in artifact.results:
        fpm = row.fpms[0]
        if fpm.benchmark_measurement is not UNSET:
            short += len(fpm.benchmark_measurement.raw_fpms) < fpm.benchmark_measurement.expected_internal_samples
        elif fpm.kvwarm_giant_median_of is not UNSET and blocks.kvwarm is not None:
            short += fpm.kvwarm_giant_median_of < blocks.kvwarm.giant_kv_repeats
    if short:
        yield f"samples: fewer than planned at {short} points"


def _rank(rank: int, artifacts: Sequence[RankArtifact]) -> str:
    return f"rank {rank} " if len(artifacts) > 1 else ""
