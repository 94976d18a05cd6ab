"""The `kvwarm` block of a decode cell that Dynamo measured (native artifact, 5): verdict, gate, counters, chains."""

from collections.abc import Iterator, Sequence

from msgspec import UNSET

from schemas.native import RankArtifact
from schemas.plan import FrozenCell

from dense_policy import DENSE_SKIP
from dynamo_blocks import Blocks, Kvwarm, leaves
from dynamo_ledger import eager_points
from dynamo_points import REAL_KV, Shape
from seed_regime import BALANCED_MOE, kvwarm_findings

SKIP_REASONS = (
    "flag_off",
    DENSE_SKIP,
    BALANCED_MOE,
    "prefix_caching_disabled",
    "hybrid_state_layers_unsupported",
    "dataset_empty",
    "peer_ineligible",
)
SKIP_PREFIXES = ("dataset_unavailable: ", "tokenizer_unavailable: ", "content_too_shallow: ")


def kvwarm_failures(
    where: str, cell: FrozenCell, artifact: RankArtifact, blocks: Blocks, shapes: Sequence[Shape]
) -> Iterator[str]:
    """The verdict on real KV, its reason, its counters and its chains (5)."""
    kvwarm, phase = blocks.kvwarm, cell.identity.phase
    block = None if artifact.kvwarm is UNSET else artifact.kvwarm
    for line in kvwarm_findings(block, phase, cell.identity.parallel_strategy):
        yield f"{where}{line}"
    if kvwarm is None:
        return
    if phase == "prefill":
        yield f"{where}kvwarm: expected none of a prefill cell, found one"
        return
    reason = kvwarm.skip_reason
    if reason is not None and reason not in SKIP_REASONS and not reason.startswith(SKIP_PREFIXES):
        yield f"{where}kvwarm.skip_reason: expected a known one, found {reason}"
    if kvwarm.enabled == (reason == "flag_off"):
        yield f"{where}kvwarm.enabled: expected {not kvwarm.enabled} with skip_reason {reason}, found {kvwarm.enabled}"
    yield from gate_failures(where, blocks, kvwarm)
    if bool(kvwarm.warm_eligible) != (kvwarm.dataset is not None) and reason != "peer_ineligible":
        expected = "one" if kvwarm.warm_eligible else "none"
        yield f"{where}kvwarm.dataset: expected {expected}, found otherwise"
    if (kvwarm.points_gate_skipped is UNSET) == (blocks.protocol is not None):
        yield f"{where}kvwarm.points_gate_skipped: expected since 1.7, found otherwise"
    yield from counter_failures(where, artifact, blocks, kvwarm)
    yield from stage_failures(where, artifact, blocks, kvwarm, shapes)


def gate_failures(where: str, blocks: Blocks, kvwarm: Kvwarm) -> Iterator[str]:
    """The engine has what Dynamo's gate asks of it, or lacks what the reason says (5)."""
    if blocks.engine is None:
        return
    cache, expert = blocks.engine.kv_cache, blocks.engine.parallel.enable_expert_parallel
    native, why = kvwarm.initialization_strategy is not UNSET, kvwarm.skip_reason or "real KV"
    caching = {"prefix_caching_disabled": False}.get(why)
    experts = {BALANCED_MOE: False}.get(why)
    if kvwarm.warm_eligible and not native:
        caching, experts = True, None if blocks.config.randomize_kda_state else True
    if caching not in (None, cache.enable_prefix_caching):
        yield f"{where}engine.kv_cache.enable_prefix_caching: expected {caching} with {why}, found {not caching}"
    if experts not in (None, expert):
        yield f"{where}engine.parallel.enable_expert_parallel: expected {experts} with {why}, found {expert}"
    kinds = [each for each in leaves(cache.groups) if "Mamba" in each.type or isinstance(each.sliding_window, int)]
    if native and not kinds:
        yield f"{where}engine.kv_cache.groups: expected a window or a recurrent state with native chains, found neither"


def replicas_of(artifact: RankArtifact, blocks: Blocks) -> tuple[int, int]:
    """The least and the most decode replicas that ran: with a ledger those that completed, and all."""
    if blocks.ledger is None or blocks.ledger.status == "unavailable":
        return 0, len({row.point.batch_size for row in artifact.results})
    eager = [record.status for record in blocks.ledger.records if record.kind == "eager_shape"]
    return eager.count("completed"), len(eager)


def counted(artifact: RankArtifact, kvwarm: Kvwarm) -> dict[str, tuple[int, int]]:
    """Counter -> (rows that it must count, what it holds)."""
    regimes = [row.kv_seed_regime or "" for row in artifact.results]
    fake = sum("fake" in regime for regime in regimes)
    skipped = sum(regime.startswith("skip:") for regime in regimes)
    rows = {
        "points_real_kv": (sum(regime in REAL_KV for regime in regimes), kvwarm.points_real_kv),
        "points_fake_fallback": (fake, kvwarm.points_fake_fallback),
    }
    if kvwarm.points_gate_skipped is not UNSET:
        rows["points_gate_skipped"] = (skipped, kvwarm.points_gate_skipped)
    return rows


def counter_failures(where: str, artifact: RankArtifact, blocks: Blocks, kvwarm: Kvwarm) -> Iterator[str]:
    """Counters hold the rows of their regime, and together all decode points that ran, replicas too."""
    if not kvwarm.enabled or any(row.kv_seed_regime is None for row in artifact.results):
        return
    least_replicas, most_replicas = replicas_of(artifact, blocks)
    rows = counted(artifact, kvwarm)
    for name, (least, found) in rows.items():
        # Without real KV all points are of one kind; with it a replica may be of another kind than every row.
        most = least + most_replicas if least or kvwarm.warm_eligible else 0
        if not least <= found <= most:
            expected = f"{least}..{most}" if most else 0
            yield f"{where}kvwarm.{name}: expected {expected}, found {found}"
    points, total = len(artifact.results), sum(found for _, found in rows.values())
    if not points + least_replicas <= total <= points + most_replicas:
        expected = f"{points} points and {least_replicas}..{most_replicas} replicas"
        yield f"{where}kvwarm counters: expected {expected}, found {total}"


def stage_failures(
    where: str, artifact: RankArtifact, blocks: Blocks, kvwarm: Kvwarm, shapes: Sequence[Shape]
) -> Iterator[str]:
    """Chains of real KV: of a batch that ran, deep enough for its contexts, inside the limits."""
    if kvwarm.stages and not kvwarm.warm_eligible:
        yield f"{where}kvwarm.stages: expected none of an ineligible configuration, found {len(kvwarm.stages)}"
    rows = artifact.results
    batches = {row.point.batch_size for row in rows}
    native = kvwarm.initialization_strategy is not UNSET
    for index, stage in enumerate(kvwarm.stages):
        name = f"{where}kvwarm.stages.{index}"
        if stage.batch not in batches:
            yield f"{name}.batch: expected of {sorted(batches)}, found {stage.batch}"
            continue
        if (stage.build_seconds is UNSET) != (stage.failed is not UNSET):
            yield f"{name}: expected build_seconds or failed, found otherwise"
        if stage.build_seconds is not UNSET and stage.build_seconds > artifact.timing.benchmark_elapsed_seconds:
            yield f"{name}.build_seconds: expected within the benchmark, found {stage.build_seconds}"
        if native != (stage.benchmark_id is not UNSET) or native != (stage.total_kv_read_tokens is not UNSET):
            yield f"{name}.benchmark_id: expected {'one' if native else 'none'}, found otherwise"
        if not native and stage.depth > blocks.limits.max_model_len:
            yield f"{name}.depth: expected at most {blocks.limits.max_model_len}, found {stage.depth}"
    if native:
        yield from native_stage_failures(where, artifact, blocks, kvwarm)
    for row, shape in zip(rows, shapes, strict=True):
        depth = max(shape.lengths) - 1
        built = [each for each in kvwarm.stages if each.failed is UNSET and each.batch == row.point.batch_size]
        if row.kv_seed_regime in REAL_KV and not any(each.depth >= depth for each in built):
            yield f"{where}benchmark_id={row.point.benchmark_id} kvwarm.stages: expected a chain of {depth}, found none"


def native_stage_failures(where: str, artifact: RankArtifact, blocks: Blocks, kvwarm: Kvwarm) -> Iterator[str]:
    """A native chain is of one point: its batch, its tokens, its longest context without the last token."""
    points = [row.point for row in artifact.results] + (eager_points(blocks.ledger) if blocks.ledger else [])
    chains = {
        point.benchmark_id: (
            point.batch_size,
            point.total_kv_read_tokens,
            max(2, -(-point.total_kv_read_tokens // point.batch_size)) - 1,
        )
        for point in points
        if point.batch_size > 0
    }
    ids = [stage.benchmark_id for stage in kvwarm.stages]
    if len(set(ids)) != len(ids):
        yield f"{where}kvwarm.stages: expected one of each point, found {ids}"
    real = [row.point.benchmark_id for row in artifact.results if row.kv_seed_regime in REAL_KV]
    if alone := [number for number in real if number not in ids]:
        yield f"{where}kvwarm.stages: expected a chain of each real point, found none of {alone}"
    for index, stage in enumerate(kvwarm.stages):
        wanted = None if stage.benchmark_id is UNSET else chains.get(stage.benchmark_id)
        found = (stage.batch, stage.total_kv_read_tokens, stage.depth)
        if found != wanted:
            yield f"{where}kvwarm.stages.{index}: expected batch, tokens and depth {wanted}, found {found}"


def odd_stages(artifact: RankArtifact, kvwarm: Kvwarm) -> int:
    """Chains that are not as deep as a context of their batch with all its steps (as seen in both releases)."""
    deep: dict[int, set[int]] = {}
    for row in artifact.results:
        longest = -(-row.point.total_kv_read_tokens // max(1, row.point.batch_size))
        deep.setdefault(row.point.batch_size, set()).add(longest + kvwarm.giant_kv_repeats + 1)
    return sum(stage.depth not in deep.get(stage.batch, ()) for stage in kvwarm.stages)


def kvwarm_gaps(cell: FrozenCell, artifact: RankArtifact, blocks: Blocks) -> Iterator[str]:
    """What the block leaves open."""
    kvwarm = blocks.kvwarm
    if cell.identity.phase != "decode":
        return
    if kvwarm is None or kvwarm.warm_eligible is None:
        yield "kvwarm: no verdict on real KV recorded"
        return
    if kvwarm.initialization_strategy is UNSET and (odd := odd_stages(artifact, kvwarm)):
        yield f"kvwarm.stages: {odd} chains of another depth than their batch asks for"
    if failed := sum(stage.failed is not UNSET for stage in kvwarm.stages):
        yield f"kvwarm: {failed} chains of real KV failed"
    if blocks.ledger is None and kvwarm.enabled and blocks.cudagraph.mode == "NONE":
        most = len(artifact.results) + replicas_of(artifact, blocks)[1]
        total = sum(found for _, found in counted(artifact, kvwarm).values())
        if total != most:
            yield f"kvwarm counters: {total} points, not {most} with one replica of each batch"
