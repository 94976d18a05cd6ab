"""The evidence of a cell that Dynamo's self-benchmark measured: every leaf against what else witnesses it.

The artifacts have passed the merge: complete, ids 1..n, groups alike on all ranks, retained values reduced again from
their samples. Free remain, since nothing in the artifact or the cell says them a second time:

| leaf | why |
|---|---|
| run_id, started_at with completed_at, wall times and timings that move together | the measurement itself |
| config.timeout, the five sample limits, output_path | no effect on explicit points |
| config.hybrid_live_state, collect_imbalanced without imbalanced points | options without a trace |
| capacity.common.grid_invariants_digest | its recipe is not known |
| synchronization.port | a socket |
| measurement_protocol.unobserved, content_seed and pool tag where no prompt is derivable | Dynamo's own words |
| kvwarm.dataset, build_seconds, depth of a shared chain | the text that chains were seeded with |
| engine.attention, eplb_config, all2all_backend, model names, layout, heads, windows | not held by the frozen cell |
| versions.dynamo, python, vllm_build_commit | named for the reader |
| prompts of real seeds | their text is not in the artifact: reported as a gap |
| in 1.6.1: samples, prompts, warm-ups | not recorded: reported as a gap |
"""

from collections.abc import Iterator, Sequence

from msgspec import UNSET

from schemas.native import RankArtifact
from schemas.plan import FrozenCell

from dynamo_blocks import Blocks, read_blocks
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
    kvwarm_failures,
    protocol_failures,
    rank_failures,
    setting_gaps,
)


def failures(cell: FrozenCell, artifacts: Sequence[RankArtifact]) -> Iterator[str]:
    """Each contradiction between the artifacts (in rank order), or of one with the cell, as one line."""
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
    yield from rank_failures(artifacts, ranks)
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


def row_failures(
    where: str, rank: int, artifact: RankArtifact, blocks: Blocks, shapes: Sequence[Shape]
) -> Iterator[str]:
    """Every point of one rank."""
    worker_id = artifact.results[0].fpms[0].worker_id if artifact.results else ""
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
    for rank, artifact in enumerate(artifacts):
        blocks = read_blocks(artifact)
        if isinstance(blocks, list):
            continue
        lines = [*setting_gaps(cell, artifact, blocks), *prompt_gaps(artifact.results, blocks)]
        lines += [*ledger_gaps(artifact, blocks), *sample_gaps(artifact, blocks)]
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
