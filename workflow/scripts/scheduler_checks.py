"""What a scheduler's record says of its settings, limits and blocks, against what it was launched as.

Its groups, its pool and its concurrency are checked in cache_groups.
"""

from collections.abc import Iterator
from math import gcd, lcm

from producer.adapters import adapter_of
from producer.engine import Launch
from producer.launch_checks import MODELLED
from producer.record import RECURRENT
from schemas.observation import CacheGroup, SchedulerRecord
from schemas.request import Request, ResolvedDeployment

from launch_settings import block_doubts, setting_doubts
from record_differences import differ
from spec_checks import RING
from worker_checks import chunk_findings, runtime_findings, step_tokens

CHUNKED = "scheduler_config.enable_chunked_prefill"

MAY_BE_OFF = ("cache_config.enable_prefix_caching", CHUNKED)
"""Settings that a platform may switch off (MLA on the CPU): the profile says so, and planning refuses it."""

BLOCK_FACTS = ("block_size", "cache_config.block_size", "hash_block_size", "recurrent_block_sizes")
"""What `launch` says of blocks, beside the settings of `MODELLED`."""

NULL_BLOCK = 0
"""The block that no request gets: the first one of the pool (0.32.0, v1/core/block_pool.py)."""


def recurrent_blocks(groups: tuple[CacheGroup, ...]) -> tuple[int, ...]:
    """Tokens of a block of each recurrent group, also of one that bundles several layers' specs."""
    return tuple(
        group.block_size_tokens
        for group in groups
        if any(spec.spec_type == RECURRENT for spec in group.layer_specs.values())
    )


def hashed_blocks(groups: tuple[CacheGroup, ...]) -> list[int]:
    """Blocks of the groups whose content is found again by its hash: no ring, no window that is replayed
    (0.33.0, v1/kv_cache_interface.py `prefix_cacheable`)."""
    return [
        group.block_size_tokens
        for group in groups
        if not any(spec.spec_type == RING or spec.bounded_replay for spec in group.layer_specs.values())
    ]


def launch_findings(version: str, scheduler: SchedulerRecord) -> Iterator[str]:
    """Nothing that no rule of the planner describes; and the facts are those of the record itself."""
    launch = scheduler.launch
    known = {*MODELLED, *BLOCK_FACTS}
    for name in sorted(known ^ launch.keys()):
        expected, found = ("a value", "none") if name in known else ("no such setting", launch[name])
        yield f"launch.{name}: expected {expected}, found {found}"
    if known - launch.keys():
        return
    doubts = list(setting_doubts(version, launch))
    if isinstance(launch["recurrent_block_sizes"], tuple):  # what else it is, is said below
        doubts += block_doubts(launch)
    for setting, expected, found in doubts:
        if setting not in MAY_BE_OFF or found is not False:
            yield f"launch.{setting}: expected {expected}, found {found}"
    own = {
        "block_size": scheduler.block_size,
        "cache_config.block_size": scheduler.block_size,
        "hash_block_size": scheduler.hash_block_size,
        "cache_config.enable_prefix_caching": scheduler.enable_prefix_caching,
        "cache_config.prefix_cache_retention_interval": scheduler.prefix_cache_retention_interval,
        "recurrent_block_sizes": recurrent_blocks(scheduler.groups),
    }
    yield from differ({f"launch.{name}": (value, launch[name]) for name, value in own.items()})


def block_findings(scheduler: SchedulerRecord) -> Iterator[str]:
    """Block, hash block and granularity of hits, as the engine makes them of its groups
    (0.32.0 and 0.33.0, v1/core/kv_cache_utils.py `resolve_kv_cache_block_sizes`)."""
    groups, block, hashed = scheduler.groups, scheduler.block_size, scheduler.hash_block_size
    for size in dict.fromkeys(recurrent_blocks(groups)):
        for field, found in (("block_size", block), ("hash_block_size", hashed)):
            if found != size:
                yield f"{field}: expected the recurrent groups' block {size}, found {found}"
    blocks = [group.block_size_tokens for group in groups]
    if block != lcm(*blocks):
        yield f"block_size: expected {lcm(*blocks)}, the least common multiple of {blocks}, found {block}"
    cached = hashed_blocks(groups) if scheduler.enable_prefix_caching and len(groups) > 1 else []
    expected = gcd(*cached) if cached else block
    if hashed != expected:
        yield f"hash_block_size: expected {expected} of blocks {cached or [block]}, found {hashed}"
    alignment = scheduler.cache_hit_alignment_tokens
    if alignment % hashed:
        yield f"cache_hit_alignment_tokens: expected a multiple of the hash block {hashed}, found {alignment}"
    elif alignment != block:  # hits inside a block are unmodelled
        yield f"cache_hit_alignment_tokens: expected the scheduler's block {block}, found {alignment}"


def expected_coordinator(scheduler: SchedulerRecord) -> str:
    """Class of the coordinator (0.32.0 and 0.33.0, v1/core/kv_cache_coordinator.py `get_kv_cache_coordinator`)."""
    if not scheduler.enable_prefix_caching:
        return "KVCacheCoordinatorNoPrefixCache"
    return "UnitaryKVCacheCoordinator" if len(scheduler.groups) == 1 else "HybridKVCacheCoordinator"


def mamba_modes(launch: Launch, scheduler: SchedulerRecord) -> tuple[str, ...]:
    """The mode that the engine makes of prefix caching where there is recurrent state (0.32.0 and 0.33.0,
    model_executor/models/config.py `MambaModelConfig`); elsewhere none, or what was asked for (0.32.0 alone)."""
    if recurrent_blocks(scheduler.groups):
        return ("align",) if scheduler.enable_prefix_caching else ("none",)
    return ("none", *filter(None, [launch.engine.mamba_cache_mode]))


def scheduling_findings(version: str, launch: Launch, scheduler: SchedulerRecord) -> Iterator[str]:
    """Settings, limits and blocks of one scheduler against its launch, on the engine of a version."""
    device, limits = adapter_of(version, "launch").device, launch.limits
    yield from launch_findings(version, scheduler)
    yield from block_findings(scheduler)
    chunked = scheduler.launch.get(CHUNKED) is not False
    for line in chunk_findings(device, scheduler.enable_prefix_caching, chunked):
        yield f"launch.{CHUNKED}: {line}"
    yield from differ(
        {
            "coordinator": (expected_coordinator(scheduler), scheduler.coordinator),
            "permanent_reserved_block_ids": ((NULL_BLOCK,), scheduler.permanent_reserved_block_ids),
            "watermark_blocks": (0, scheduler.watermark_blocks),
            "max_num_scheduled_tokens": (step_tokens(device, limits, chunked), scheduler.max_num_scheduled_tokens),
            "max_num_running_reqs": (limits.max_batch_size, scheduler.max_num_running_reqs),
            "max_model_len": (limits.max_model_len, scheduler.max_model_len),
        }
    )
    modes = mamba_modes(launch, scheduler)
    if scheduler.mamba_cache_mode not in modes:
        yield f"mamba_cache_mode: expected {' or '.join(modes)}, found {scheduler.mamba_cache_mode}"
    if scheduler.max_concurrency < 1:
        found = scheduler.max_concurrency
        yield f"max_concurrency: expected room for one request of {limits.max_model_len} tokens, found {found}"


def scheduler_findings(request: Request, deployment: ResolvedDeployment, scheduler: SchedulerRecord) -> Iterator[str]:
    """Each doubt about one scheduler's settings, limits and blocks: `field: expected X, found Y`."""
    if scheduler.unresolved_fields:
        yield f"unresolved_fields: expected none, found {', '.join(scheduler.unresolved_fields)}"
    yield from runtime_findings(adapter_of(request.runtime_backend_version, "request"), scheduler.runtime)
    yield from scheduling_findings(request.runtime_backend_version, deployment, scheduler)
