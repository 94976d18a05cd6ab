"""What a Dynamo rank artifact says of its engine and its options, against the cell and against itself."""

from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

from msgspec import UNSET

from schemas.native import NativePoint, RankArtifact
from schemas.plan import FrozenCell

from dynamo_blocks import Blocks, Engine, leaves, unequal
from rank_checks import same
from session_checks import CUDAGRAPH_MODES

PLAIN_GROUPS = ("FullAttentionSpec", "SlidingWindowSpec")
"""Cache groups whose blocks hold keys and values of one kind: these say so."""

EPLB_DEFAULTS = {
    "window_size": 1000,
    "step_interval": 3000,
    "num_redundant_experts": 0,
    "log_balancedness": False,
    "log_balancedness_interval": 1,
    "use_async": True,
    "policy": "default",
    "communicator": None,
    "enable_migration_batching": False,
}
"""The engine's expert balancing (vllm/config/parallel.py:66-108 of 0.32.0): what stands there while it is off."""

UNOBSERVED = (
    "sampled_continuation_token_ids",
    "kv_cache_tensors",
    "recurrent_state_tensors",
    "execution_history_equivalence",
    "warmup_graph_kernel_and_cache_equivalence",
    "decode_real_kv_chain_warmup_history",
)
"""What Dynamo 1.7 says that it does not observe."""

CLOCK_SLACK = 0.001
"""Seconds by which a wall clock and a monotonic one may differ over one benchmark, beside a thousandth of it."""


def config_failures(where: str, cell: FrozenCell, rank: int, artifact: RankArtifact, blocks: Blocks) -> Iterator[str]:
    """Options and limits are the cell's, and each other's."""
    config, limits, identity = blocks.config, blocks.limits, cell.identity
    running = limits.max_num_running_reqs
    yield from unequal(
        where,
        {
            "config.mode": (identity.phase, config.mode),
            "limits.max_num_scheduled_tokens": (identity.limits.max_num_tokens, limits.max_num_scheduled_tokens),
            "limits.max_num_running_reqs": (identity.limits.max_batch_size, running),
            "limits.max_model_len": (identity.limits.max_model_len, limits.max_model_len),
            "limits.block_size": (cell.block_size, limits.block_size),
            "limits.configured_max_batch_size": (
                min(config.max_batch_size or running, running),
                limits.configured_max_batch_size,
            ),
            "synthetic_prompts.vocab_size": (cell.vocab_size, blocks.synthetic_prompts.vocab_size),
            "measurement_policy": (
                {"decode": "steady_state_second_step", "prefill": "single_step"},
                artifact.measurement_policy,
            ),
            "synchronization.enabled": (artifact.dp.size > 1, blocks.synchronization.enabled),
            "timing.rank_benchmark_elapsed_seconds": (UNSET, artifact.timing.rank_benchmark_elapsed_seconds),
            "sessions": (UNSET, artifact.sessions),
        },
    )
    if identity.warmup_iterations is not None and config.warmup_iterations != identity.warmup_iterations:
        expected = identity.warmup_iterations
        yield f"{where}config.warmup_iterations: expected {expected}, found {config.warmup_iterations}"
    if not blocks.synchronization.enabled and blocks.synchronization.port is not None:
        yield f"{where}synchronization.port: expected none of one rank, found {blocks.synchronization.port}"
    if config.randomize_kda_state and config.hybrid_live_state:
        yield f"{where}config.hybrid_live_state: expected False with randomize_kda_state, found True"
    random = (
        ("random", "uniform-request-layer-rank-v1", 0.01) if config.randomize_kda_state else ("unchanged", None, None)
    )
    state = blocks.recurrent_state
    if (found := (state.initialization, state.policy, state.uniform_bound)) != random:
        yield f"{where}recurrent_state: expected {random}, found {found}"
    if len(artifact.run_id) != 32 or set(artifact.run_id) - set("0123456789abcdef"):
        yield f"{where}run_id: expected 32 hex digits, found {artifact.run_id}"
    if rank and not Path(config.output_path).stem.endswith(f"_dp{rank}"):
        yield f"{where}config.output_path: expected _dp{rank} at its end, found {config.output_path}"
    uneven = [row.point.benchmark_id for row in artifact.results if is_uneven(row.point)]
    if uneven and not config.collect_imbalanced:
        yield f"{where}config.collect_imbalanced: expected True with imbalanced points {uneven}, found False"
    explicit = {"explicit" in row.point.sample_reasons for row in artifact.results}
    if len(explicit) > 1:
        yield f"{where}sample_reasons: expected explicit of all points or of none, found of some"
    yield from capacity_failures(where, artifact, blocks)
    yield from timing_failures(where, artifact)


def is_uneven(point: NativePoint) -> bool:
    """A partition, or rows that are not all alike."""
    return point.partition is not None or any(row != (point.rows or [[]])[0] for row in point.rows or ())


def capacity_failures(where: str, artifact: RankArtifact, blocks: Blocks) -> Iterator[str]:
    """The largest batch, and whether real KV was agreed on."""
    limits, common = blocks.limits, blocks.capacity.common
    feasible, configured = limits.feasible_max_batch_size, limits.configured_max_batch_size
    if blocks.config.mode == "prefill":
        if feasible:
            yield f"{where}limits.feasible_max_batch_size: expected 0 of a prefill cell, found {feasible}"
    else:
        largest = max((row.point.batch_size for row in artifact.results), default=0)
        groups = len(blocks.engine.kv_cache.groups) if blocks.engine else 1
        # Requests of one block each: where they all fit, nothing but the option bounds the batch.
        least = configured if (limits.num_gpu_blocks - 1) >= 2 * groups * configured else largest
        if not least <= feasible <= configured:
            yield f"{where}limits.feasible_max_batch_size: expected {least}..{configured}, found {feasible}"
    eligible = blocks.kvwarm is not None and blocks.kvwarm.warm_eligible is True
    if common is not None and common.kvwarm_eligible != eligible:
        yield f"{where}capacity.common.kvwarm_eligible: expected {eligible}, found {common.kvwarm_eligible}"


def timing_failures(where: str, artifact: RankArtifact) -> Iterator[str]:
    """RFC 3339 in UTC with microseconds, in order."""
    timing = artifact.timing
    for name in ("started_at", "completed_at"):
        if instant(text := getattr(timing, name)) is None:
            yield f"{where}timing.{name}: expected YYYY-MM-DDThh:mm:ss.uuuuuuZ, found {text}"
    if wall_seconds(artifact) < 0:
        yield f"{where}timing.completed_at: expected after {timing.started_at}, found {timing.completed_at}"


def instant(text: str) -> datetime | None:
    try:
        read = datetime.strptime(text, "%Y-%m-%dT%H:%M:%S.%fZ")
    except ValueError:
        return None
    return read if read.strftime("%Y-%m-%dT%H:%M:%S.%fZ") == text else None


def wall_seconds(artifact: RankArtifact) -> float:
    """Seconds between the two time stamps; 0 when one cannot be read."""
    started, completed = instant(artifact.timing.started_at), instant(artifact.timing.completed_at)
    return (completed - started).total_seconds() if started and completed else 0.0


def graph_block_failures(where: str, cell: FrozenCell, blocks: Blocks) -> Iterator[str]:
    """Modes and sizes of one engine mode; none at all exactly when the cell is eager."""
    graphs = blocks.cudagraph
    modes = CUDAGRAPH_MODES[graphs.mode]
    running = blocks.limits.max_num_running_reqs
    sizes = graphs.capture_sizes
    yield from unequal(
        where,
        {
            "cudagraph.prefill_mode": (modes[0], graphs.prefill_mode),
            "cudagraph.decode_mode": (modes[1], graphs.decode_mode),
            "cudagraph.max_capture_size": (max(sizes, default=0), graphs.max_capture_size),
            "cudagraph.capture_sizes": (sorted(set(sizes)), sizes),
            "cudagraph.decode_capture_sizes": (
                [size for size in sizes if size <= running],
                graphs.decode_capture_sizes,
            ),
        },
    )
    # Where prefill has no graphs nothing tells whether sizes are listed: then none counts.
    if graphs.prefill_capture_sizes != sizes and (graphs.prefill_capture_sizes or modes[0] != "NONE"):
        yield f"{where}cudagraph.prefill_capture_sizes: expected {sizes}, found {graphs.prefill_capture_sizes}"
    if graphs.mode == "NONE" and sizes:
        yield f"{where}cudagraph.capture_sizes: expected none with mode NONE, found {sizes}"
    settings = cell.identity.engine
    eager = settings.enforce_eager or (settings.graph is not None and settings.graph.cudagraph_mode == "NONE")
    if eager != (graphs.mode == "NONE") and (eager or cell.device_name != "cpu"):
        expected = "NONE of an eager cell" if eager else "graphs, which the cell has"
        yield f"{where}cudagraph.mode: expected {expected}, found {graphs.mode}"
    if blocks.engine is not None:
        mode = str(blocks.engine.graph.cudagraph_mode).rsplit(".", 1)[-1]
        if eager and (mode != "NONE" or blocks.engine.graph.cudagraph_capture_sizes):
            yield f"{where}engine.graph: expected NONE of an eager cell, found {mode}"


def engine_failures(where: str, cell: FrozenCell, rank: int, artifact: RankArtifact, blocks: Blocks) -> Iterator[str]:
    """The engine of a rank is the one that the cell's identity describes."""
    engine, identity, limits = blocks.engine, cell.identity, blocks.limits
    if engine is None:
        return
    parallel, scheduler, topology = engine.parallel, engine.scheduler, identity.topology
    yield from unequal(
        f"{where}engine.",
        {
            "versions.vllm": (identity.runtime_backend_version, engine.versions.vllm),
            "scheduler.max_num_batched_tokens": (
                limits.max_num_scheduled_tokens,
                scheduler.max_num_batched_tokens,
            ),
            "scheduler.max_num_seqs": (limits.max_num_running_reqs, scheduler.max_num_seqs),
            "scheduler.async_scheduling": (False, scheduler.async_scheduling),
            "parallel.data_parallel_size": (topology.dp, parallel.data_parallel_size),
            "parallel.data_parallel_rank": (rank, parallel.data_parallel_rank),
            "parallel.tensor_parallel_size": (topology.tp, parallel.tensor_parallel_size),
            "parallel.pipeline_parallel_size": (topology.pp, parallel.pipeline_parallel_size),
            "parallel.prefill_context_parallel_size": (topology.cp, parallel.prefill_context_parallel_size),
            "parallel.decode_context_parallel_size": (topology.cp, parallel.decode_context_parallel_size),
            "parallel.enable_eplb": (False, parallel.enable_eplb),
            "speculative": (None, engine.speculative),
        },
    )
    # On one GPU the flag shares nothing out: it only tells Dynamo that contents matter.
    if topology.gpus > 1 and parallel.enable_expert_parallel != (topology.moe_ep > 1):
        expected, found = topology.moe_ep > 1, parallel.enable_expert_parallel
        yield f"{where}engine.parallel.enable_expert_parallel: expected {expected}, found {found}"
    cached = any(row.point.point_type == "prefill" and row.point.total_kv_read_tokens for row in artifact.results)
    if cached and not engine.kv_cache.enable_prefix_caching:
        yield f"{where}engine.kv_cache.enable_prefix_caching: expected True with cached prefixes, found False"
    old = engine.versions.dynamo.startswith("1.6.")
    if old == (blocks.protocol is not None):
        words = "none before 1.7" if old else "one since 1.7"
        yield f"{where}measurement_protocol: expected {words}, found otherwise in {engine.versions.dynamo}"
    yield from cache_failures(where, cell, engine, limits.block_size)


def cache_failures(where: str, cell: FrozenCell, engine: Engine, block_size: int) -> Iterator[str]:
    """Cache groups of the scheduler's blocks, of the types and quantization that the cell's labels name."""
    precision, cache, quantization = cell.identity.precision, engine.kv_cache, engine.quantization
    attention = [group for group in leaves(cache.groups) if "Mamba" not in group.type]
    wanted = {"bfloat16": ("auto", "bfloat16"), "half": ("auto", "half", "float16")}.get(precision.kv_cache)
    fits = cache.cache_dtype in wanted if wanted else cache.cache_dtype.startswith(precision.kv_cache)
    if not fits:
        yield f"{where}engine.kv_cache.cache_dtype: expected {precision.kv_cache}, found {cache.cache_dtype}"
    dtype = {"bfloat16": "bfloat16", "half": "float16"}.get(precision.kv_cache)
    if not cache.groups:
        yield f"{where}engine.kv_cache.groups: expected at least one, found none"
    for index, group in enumerate(attention):
        said = (group.dtype, group.head_size, group.num_kv_heads, group.block_size)
        if group.type in PLAIN_GROUPS and UNSET in said:
            wanted_keys = "dtype, head_size, num_kv_heads and block_size"
            yield f"{where}engine.kv_cache.groups.{index}: expected {wanted_keys}, found not all of them"
        if dtype is not None and group.dtype not in (dtype, UNSET):
            yield f"{where}engine.kv_cache.groups.{index}.dtype: expected {dtype}, found {group.dtype}"
    sizes = {cache.block_size} | {group.block_size for group in leaves(cache.groups) if group.block_size is not UNSET}
    # Groups of several kinds may differ in their blocks; the scheduler's is then none of them.
    if (len(cache.groups) == 1 or len(sizes) == 1) and sizes != {block_size}:
        yield f"{where}engine.kv_cache block_size: expected {block_size} everywhere, found {sorted(sizes)}"
    if dtype == "bfloat16" and cache.cache_dtype == "auto" and engine.model.dtype != dtype:
        yield f"{where}engine.model.dtype: expected {dtype} of the cache, found {engine.model.dtype}"
    plain = precision.gemm == precision.moe == "bfloat16"
    if (quantization.method is None) != plain:
        expected = "none" if plain else f"one for gemm {precision.gemm}, moe {precision.moe}"
        yield f"{where}engine.quantization.method: expected {expected}, found {quantization.method}"
    if quantization.method is None and (quantization.checkpoint_config or quantization.quant_config_class):
        yield f"{where}engine.quantization: expected neither config nor class without a method, found one"


def protocol_failures(where: str, artifact: RankArtifact, blocks: Blocks) -> Iterator[str]:
    """The protocol repeats the options; it, the ledger and the measurements stand together or not at all (13.14)."""
    protocol = blocks.protocol
    if (protocol is None) != (blocks.ledger is None):
        expected = "none" if protocol is None else "one"
        yield f"{where}warmup_evidence: expected {expected}, as of measurement_protocol, found otherwise"
    measured = [row.fpms[0].benchmark_measurement is not UNSET for row in artifact.results]
    if protocol is None:
        if any(measured):
            yield f"{where}benchmark_measurement: expected none without a protocol, found {sum(measured)}"
        return
    if not all(measured):
        yield f"{where}benchmark_measurement: expected one of each point, found {sum(measured)} of {len(measured)}"
    preparation, kvwarm = protocol.preparation, blocks.kvwarm
    wanted = {"warmup_iterations": (blocks.config.warmup_iterations, preparation.warmup_iterations)}
    if kvwarm is not None:
        wanted |= {
            "giant_kv_threshold": (kvwarm.giant_kv_threshold, preparation.giant_kv_threshold),
            "giant_kv_repeats": (kvwarm.giant_kv_repeats, preparation.giant_kv_repeats),
            "decode_real_kv_warmup": (kvwarm.enabled, preparation.decode_real_kv_warmup),
        }
    yield from unequal(f"{where}measurement_protocol.preparation.", wanted)
    zeros = (protocol.synthetic_content == "zeros", blocks.synthetic_prompts.mode == "zeros")
    if zeros[0] != zeros[1]:
        expected = "zeros" if zeros[0] else "salted_random"
        yield f"{where}synthetic_prompts.mode: expected {expected}, found {blocks.synthetic_prompts.mode}"


def rank_failures(ranks: Sequence[Blocks]) -> Iterator[str]:
    """What the ranks of one run agreed on: a port, and the least of their capacities."""
    reference = ranks[0]
    for rank, blocks in enumerate(ranks):
        where = "" if len(ranks) == 1 else f"rank {rank} "
        for name in ("synchronization", "capacity"):
            if getattr(blocks, name) != getattr(reference, name):
                yield f"{where}{name}: expected that of rank 0, found another"
    if reference.capacity.common is None:
        return
    least = {
        field: (min(getattr(blocks.limits, field) for blocks in ranks), getattr(reference.capacity.common, field))
        for field in ("max_model_len", "max_num_scheduled_tokens", "max_num_running_reqs")
    }
    usable = min(blocks.limits.num_gpu_blocks for blocks in ranks) - 1
    common = reference.capacity.common
    least["usable_blocks_without_watermark"] = (usable, common.usable_blocks_without_watermark)
    yield from unequal("capacity.common.", least)
    if common.usable_blocks_with_watermark > usable:
        found = common.usable_blocks_with_watermark
        yield f"capacity.common.usable_blocks_with_watermark: expected at most {usable}, found {found}"


def setting_gaps(cell: FrozenCell, artifact: RankArtifact, blocks: Blocks) -> Iterator[str]:
    """Settings that nothing in the artifact establishes."""
    if blocks.engine is None:
        yield "engine: not recorded"
    elif blocks.engine.capture_error is not UNSET:
        yield f"engine.capture_error: {blocks.engine.capture_error}"
    elif not same(blocks.engine.parallel.eplb_config, EPLB_DEFAULTS):
        yield "engine.parallel.eplb_config: not the defaults of an engine that balances no experts"
    if blocks.protocol is not None and blocks.protocol.unobserved != list(UNOBSERVED):
        yield f"measurement_protocol.unobserved: {', '.join(blocks.protocol.unobserved) or 'nothing'}"
    common = blocks.capacity.common
    between, elapsed = wall_seconds(artifact), artifact.timing.benchmark_elapsed_seconds
    if abs(between - elapsed) > CLOCK_SLACK + 1e-3 * elapsed:
        yield f"timing: {between} s by the time stamps, {elapsed} s by the monotonic clock"
    if common is None:
        yield "capacity: not recorded"
    elif common.usable_blocks_with_watermark < common.usable_blocks_without_watermark:
        kept = common.usable_blocks_without_watermark - common.usable_blocks_with_watermark
        yield f"capacity: {kept} blocks kept as a watermark"
    if blocks.limits.num_gpu_blocks - 1 < cell.free_blocks:
        yield f"capacity: {blocks.limits.num_gpu_blocks - 1} blocks, the accepted profile has {cell.free_blocks}"
    if unsaid := sum(row.kv_seed_regime is None for row in artifact.results):
        yield f"seed regime of {unsaid} points: none recorded"
