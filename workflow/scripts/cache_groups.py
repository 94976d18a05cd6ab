"""Cache groups: of which kind, whether each spec's numbers follow from its fields, and whether the pool adds up."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from producer.adapters import (
    CONVOLUTION_LAYER,
    CONVOLUTION_WINDOW,
    REFUSED_SPECS,
    SPEC_MANAGERS,
    UNIFORM_SPEC,
    group_kinds,
)
from producer.capacity import startup_blocks_of_request
from producer.record import RECURRENT
from schemas.errors import Refusal
from schemas.observation import CacheGroup, CacheMemory, LayerSpec, SchedulerRecord, WorkerRecord
from schemas.plan import CellIdentity
from schemas.profile import ProfileGroup
from schemas.request import ResolvedDeployment

from record_differences import differ, differences
from spec_checks import MODES, RING, WINDOWED, spec_findings
from spec_pages import pool_block_bytes

CACHE_ELEMENTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "bfloat16": ("NONE", ("bfloat16",)),
    "half": ("NONE", ("float16",)),
    "fp8": ("FP8_PER_TENSOR", ("uint8", "float8_e4m3fn")),
}
"""Label of the KV cache -> quantization and dtypes of an attention layer's cache."""


def _one_value(specs: Iterable[LayerSpec], of: str, *fields: str) -> Iterator[str]:
    for field in fields:
        values = {getattr(spec, field) for spec in specs}
        if len(values) > 1:
            yield f"{field}: expected one value of {of}, found {', '.join(sorted(map(str, values)))}"


def distinct_specs(group: CacheGroup) -> dict[LayerSpec, str]:
    """Each spec of a group's layers -> the first layer that has it; layers of a group hardly differ."""
    found: dict[LayerSpec, str] = {}
    before: LayerSpec | None = None
    for layer in group.layer_names:
        spec = group.layer_specs.get(layer)
        if spec is not None and spec != before:  # most are the one before, which costs less than its hash
            found.setdefault(spec, layer)
            before = spec
    return found


def first_class(group: CacheGroup) -> str:
    """The class by which a scheduler manages a group: that of its first layer's spec."""
    spec = group.layer_specs.get(group.layer_names[0])
    return group.spec_type if spec is None else spec.spec_type


def _unsupported(spec_type: str) -> ValueError:
    why = f", which {REFUSED_SPECS[spec_type]}" if spec_type in REFUSED_SPECS else ""
    return ValueError(f"unsupported runtime cache spec {spec_type}{why}")


def _layer_kind(spec: LayerSpec, layer_class: str | None, kinds: Mapping[str, str]) -> str:
    name = spec.spec_type
    if name not in kinds:
        raise _unsupported(name)
    if layer_class != CONVOLUTION_LAYER:
        return kinds[name]
    asked = ("SlidingWindowSpec", CONVOLUTION_WINDOW, "bfloat16")
    found = (name, spec.sliding_window, spec.dtype)
    if found != asked:
        of = f"unsupported runtime cache spec {name} of {CONVOLUTION_LAYER}"
        raise ValueError(f"{of}: expected class, window and dtype {asked}, found {found}")
    return "convolution"


def kind_of(runtime_version: str, group: CacheGroup, layer_classes: Mapping[str, str]) -> str:
    """The kind of a group, from the classes of its layers' specs: attention, state or convolution.

    A group that bundles its layers' specs has their kind. `layer_classes` is layer -> class of its module.

    Raises:
        ValueError: `unsupported runtime cache spec <class>` and why, or layers of several kinds.
        Refusal: the runtime version is not qualified.
    """
    kinds = group_kinds(runtime_version, "probe record")
    if group.spec_type != UNIFORM_SPEC and group.spec_type not in kinds:
        raise _unsupported(group.spec_type)
    specs = group.layer_specs
    pairs = dict.fromkeys((specs[layer], layer_classes.get(layer)) for layer in group.layer_names if layer in specs)
    found = sorted({_layer_kind(spec, layer_class, kinds) for spec, layer_class in pairs})
    if len(found) != 1:
        raise ValueError(f"kind: expected one of all layers, found {', '.join(found) or 'no layer'}")
    return found[0]


def group_findings(runtime_version: str, cache: CacheMemory) -> Iterator[str]:
    """Each group by itself: its kind, its layers, each spec's page; and the recurrent groups with one another."""
    owners: dict[str, int] = {}
    for index, group in enumerate(cache.groups):
        for line in _layer_findings(group, cache.layer_classes):
            yield f"groups[{index}].{line}"
        for layer in dict.fromkeys(group.layer_names):
            if owners.setdefault(layer, index) != index:
                yield f"groups[{index}].layer_names: expected {layer} in one group, found it in groups[{owners[layer]}]"
        try:
            kind_of(runtime_version, group, cache.layer_classes)
        except ValueError as problem:
            yield f"groups[{index}]: {problem}"
            continue
        for line in dict.fromkeys(_member_findings(group)):
            yield f"groups[{index}].{line}"
        for spec, layer in distinct_specs(group).items():
            yield from (f"groups[{index}].layer_specs.{layer}.{line}" for line in spec_findings(spec))
    if outside := sorted(cache.layer_classes.keys() - owners.keys()):
        yield f"layer_classes: expected layers of the groups, found {', '.join(outside)} too"
    # The align rule knows one block, one mode and one checkpoint for all recurrent groups (producer/align.py).
    recurrent = [spec for group in cache.groups for spec in distinct_specs(group) if spec.spec_type == RECURRENT]
    checkpoint = ("num_prefill_checkpoint_blocks", "prefill_checkpoint_alignment")
    yield from _one_value(recurrent, f"all {RECURRENT} layers", "block_size", "mamba_cache_mode", *checkpoint)


def _layer_findings(group: CacheGroup, layer_classes: Mapping[str, str]) -> Iterator[str]:
    yield from differ(
        {
            "layer_specs": (sorted(group.layer_names), sorted(group.layer_specs)),
            "is_eagle_group": (False, group.is_eagle_group),
            "host_resident": (False, group.host_resident),
            "role": ("default", group.role),
        }
    )
    for layer in group.layer_names:
        if layer not in layer_classes:
            yield f"layer_names: expected a class of {layer}, found none"


def _member_findings(group: CacheGroup) -> Iterator[str]:
    """What the layers of one group must have in common, and with their group."""
    specs = list(distinct_specs(group))
    if group.spec_type == UNIFORM_SPEC:
        pages = sum(spec.page_size_bytes for spec in group.layer_specs.values())
        yield from differ({"spec_page_size_bytes": (pages, group.spec_page_size_bytes)})
    else:
        if len(specs) != 1:
            yield f"layer_specs: expected one spec of a group of {group.spec_type}, found {len(specs)}"
        for spec in specs:
            yield from differ(
                {
                    "spec_type": (spec.spec_type, group.spec_type),
                    "spec_page_size_bytes": (spec.page_size_bytes, group.spec_page_size_bytes),
                }
            )
    for spec in specs:
        yield from differ({"block_size_tokens": (spec.block_size, group.block_size_tokens)})
    yield from _one_value(specs, "all layers", "sliding_window", "dcp_sharded", "mamba_cache_mode", "tp_replicated")
    if any(spec.spec_type in (RECURRENT, RING) for spec in specs):
        yield from _one_value(specs, "a state group's layers", "spec_type")


def profile_groups(runtime_version: str, cache: CacheMemory, page_size_bytes: int) -> tuple[ProfileGroup, ...]:
    """Cache groups as the planner counts them: the page of every group is a whole block of the pool.

    Raises:
        ValueError: a group of no kind.
        Refusal: the runtime version is not qualified.
    """
    return tuple(
        _profile_group(kind_of(runtime_version, group, cache.layer_classes), index, group, page_size_bytes)
        for index, group in enumerate(cache.groups)
    )


def _profile_group(kind: str, index: int, group: CacheGroup, page_size_bytes: int) -> ProfileGroup:
    specs = list(distinct_specs(group))
    first = specs[0]
    return ProfileGroup.model_validate(
        {
            "name": f"runtime_group_{index}",
            "kind": kind,
            "spec_type": "+".join(sorted({spec.spec_type for spec in specs})),
            "num_layers": len(group.layer_names),
            "block_size_tokens": group.block_size_tokens,
            "page_size_bytes": page_size_bytes,
            "sliding_window": first.sliding_window if first.spec_type in WINDOWED else None,
            "blocks_per_request": 1 + (first.num_speculative_blocks or 0) if kind == "state" else None,
            "prefill_checkpoint_blocks": first.num_prefill_checkpoint_blocks or None,
            "prefill_checkpoint_alignment": first.prefill_checkpoint_alignment,
        }
    )


def memory_findings(
    deployment: ResolvedDeployment | CellIdentity, workers: Sequence[WorkerRecord], scheduler: SchedulerRecord
) -> Iterator[str]:
    """One data-parallel rank: the scheduler gives out the blocks that its workers hold, by the rules of planning.

    Unlike those of other modules, these lines begin with the label of the process that they are about.
    """
    own = [*_pool_findings(scheduler), *_caching_findings(scheduler), *_size_findings(workers, scheduler)]
    if workers:
        own += _startup_findings(workers[0], scheduler)
    if deployment.precision.kv_cache not in CACHE_ELEMENTS:
        planned = ", ".join(CACHE_ELEMENTS)
        own.append(f"precision.kv_cache: expected one of {planned}, found {deployment.precision.kv_cache}")
    yield from (f"{scheduler.label}: {line}" for line in own)
    for worker in workers:
        lines = (
            *_copy_findings(worker, scheduler),
            *_worker_findings(deployment, worker, scheduler),
            *_budget_findings(worker),
        )
        yield from (f"{worker.label}: {line}" for line in lines)


def _pool_findings(scheduler: SchedulerRecord) -> Iterator[str]:
    """All blocks but the reserved ones are free, and the null block 0 is reserved (v1/core/block_pool.py:187)."""
    reserved = scheduler.permanent_reserved_block_ids
    yield from differ(
        {
            "reserved blocks": (len(reserved), scheduler.num_blocks - scheduler.initial_free_blocks),
            "permanent_reserved_block_ids": (tuple(sorted({0, *reserved})), reserved),
        }
    )
    if max(reserved, default=0) >= scheduler.num_blocks:
        yield f"permanent_reserved_block_ids: expected numbers below {scheduler.num_blocks}, found {max(reserved)}"


def _size_findings(workers: Sequence[WorkerRecord], scheduler: SchedulerRecord) -> Iterator[str]:
    """As many blocks as the bytes of the worker with the fewest hold (`get_kv_cache_configs`,
    v1/core/kv_cache_planning.py:1563 of 0.33.0, v1/core/kv_cache_utils.py:1627 and :2665 of 0.32.0).

    A worker's bytes are those that were asked for, of each worker, or what its profiling left. The CPU engine's worker
    keeps no record of the latter.
    """
    held = []
    for worker in workers:
        budget = worker.cache.available_cache_bytes
        if worker.settings.kv_cache_memory_bytes is not None:
            budget = worker.settings.kv_cache_memory_bytes
        try:
            block = pool_block_bytes(worker.cache)
        except ValueError:
            return  # `_worker_findings` says why
        if budget is None or not block:
            return  # `_budget_findings` and `_layer_findings` say so
        held.append((budget // block, f"{budget} bytes in blocks of {block}, {worker.label}"))
    for blocks, of in sorted(held)[:1]:
        if blocks != scheduler.num_blocks:
            yield f"num_blocks: expected {blocks} ({of}), found {scheduler.num_blocks}"


def _budget_findings(worker: WorkerRecord) -> Iterator[str]:
    """Where one worker's bytes for the cache come from: asked for, or left of its part of the device.

    Memory is profiled on CUDA alone, and only where no bytes are asked for (v1/worker/gpu_worker.py:656 of 0.33.0); a
    part is at most the utilization's (`request_memory`, v1/worker/utils.py:716).
    """
    settings, hardware, available = worker.settings, worker.hardware, worker.cache.available_cache_bytes
    asked = settings.kv_cache_memory_bytes is not None
    profiled = hardware.device_type == "cuda" and not asked
    if profiled and available is None:
        yield "cache.available_cache_bytes: expected what profiling left without kv_cache_memory_bytes, found none"
    if not profiled and available is not None:
        why = "with kv_cache_memory_bytes" if asked else f"on {hardware.device_type}"
        yield f"cache.available_cache_bytes: expected none {why}, found {available}"
    if asked:
        return
    part = math.ceil(settings.gpu_memory_utilization * hardware.total_memory_bytes)
    allocated = sum(storage.size_bytes for storage in worker.cache.storages)
    for field, size in (("available_cache_bytes", available or 0), ("storages (bytes)", allocated)):
        if size > part:
            of = f"{settings.gpu_memory_utilization} of {hardware.total_memory_bytes} bytes"
            yield f"cache.{field}: expected at most {part} ({of}), found {size}"


def _caching_findings(scheduler: SchedulerRecord) -> Iterator[str]:
    """Who manages each group, and that recurrent states are kept for prefixes only where there are any."""
    mode = scheduler.mamba_cache_mode
    if mode not in MODES:
        yield f"mamba_cache_mode: expected one of {', '.join(MODES)}, found {mode}"
    if mode == "align" and not scheduler.enable_prefix_caching:
        yield "enable_prefix_caching: expected True with mamba_cache_mode align, found False"
    classes = [first_class(group) for group in scheduler.groups]
    managers = tuple(SPEC_MANAGERS.get(name, f"none of {name}") for name in classes)
    yield from differ({"managers": (managers, scheduler.managers)})


def _copy_findings(worker: WorkerRecord, scheduler: SchedulerRecord) -> Iterator[str]:
    """The scheduler's groups are this worker's: a bundle's first spec stands there for all of it
    (`generate_scheduler_kv_cache_config`, v1/core/kv_cache_utils.py:1096 of 0.33.0)."""
    groups = worker.cache.groups
    yield from differ({"cache.groups (number)": (len(scheduler.groups), len(groups))})
    for index, (own, kept) in enumerate(zip(groups, scheduler.groups, strict=False)):
        first = own.layer_names[0]
        if first not in own.layer_specs:
            continue  # `group_findings` says so
        spec = own.layer_specs[first]
        update: dict[str, Any] = {"layer_specs": {first: spec}}
        if own.spec_type == UNIFORM_SPEC:
            update |= {"spec_type": spec.spec_type, "spec_page_size_bytes": spec.page_size_bytes}
        copy = own.model_copy(update=update)
        place = f"cache.groups[{index}]"
        yield from map(str, differences(kept.model_dump(exclude_none=True), copy.model_dump(exclude_none=True), place))


def _worker_findings(
    deployment: ResolvedDeployment | CellIdentity, worker: WorkerRecord, scheduler: SchedulerRecord
) -> Iterator[str]:
    """One worker's cache: as many blocks as its scheduler gives out, the bytes that they take, and their elements."""
    cache = worker.cache
    yield from differ(
        {
            "cache.num_blocks": (scheduler.num_blocks, cache.num_blocks),
            "settings.enable_prefix_caching": (scheduler.enable_prefix_caching, worker.settings.enable_prefix_caching),
            "cache.kv_tp_replicas": (_replicas(cache, deployment.topology.tp), cache.kv_tp_replicas),
        }
    )
    allocated = sum(storage.size_bytes for storage in cache.storages)
    try:
        yield from differ({"cache.storages (bytes)": (pool_block_bytes(cache) * cache.num_blocks, allocated)})
    except ValueError as problem:
        yield f"cache.groups: {problem}"
    elements = CACHE_ELEMENTS.get(deployment.precision.kv_cache)
    for index, group in enumerate(cache.groups):
        for spec, layer in distinct_specs(group).items():
            place = f"cache.groups[{index}].layer_specs.{layer}"
            if spec.spec_type == RECURRENT:
                modes = (scheduler.mamba_cache_mode, spec.mamba_cache_mode)
                yield from differ({f"{place}.mamba_cache_mode": modes})
            elif elements is not None and _holds_keys(spec, cache.layer_classes.get(layer)):
                quantization, dtypes = elements
                yield from differ({f"{place}.kv_quant_mode": (quantization, spec.kv_quant_mode)})
                if spec.dtype not in dtypes:
                    yield f"{place}.dtype: expected one of {', '.join(dtypes)}, found {spec.dtype}"


def _holds_keys(spec: LayerSpec, layer_class: str | None) -> bool:
    """Whether the precision of the KV cache says anything of this layer: of rings, indexers and convolutions not."""
    return spec.spec_type != RING and spec.cache_role != "indexer" and layer_class != CONVOLUTION_LAYER


def _replicas(cache: CacheMemory, tensor_parallel: int) -> int:
    """Tensor-parallel ranks that hold the same bytes for every layer (`kv_cache_groups_tp_replicas`,
    v1/core/kv_cache_planning.py:1241 of 0.33.0)."""
    shards = {spec.max_tp_shards for group in cache.groups for spec in distinct_specs(group)}
    return math.gcd(tensor_parallel, *(max(1, tensor_parallel // count) if count else 1 for count in shards))


def _startup_findings(worker: WorkerRecord, scheduler: SchedulerRecord) -> Iterator[str]:
    """What the engine reserves for its longest request, group by group, and the concurrency that this makes
    (`get_max_concurrency_for_kv_cache_config`, v1/core/kv_cache_utils.py:1061 of 0.33.0). It does not start where one
    such request does not fit beside the null block (`_check_enough_kv_cache_memory`, v1/core/kv_cache_planning.py:50).
    """
    try:
        groups = profile_groups(worker.runtime.version, worker.cache, 1)
    except (ValueError, Refusal):
        return  # `group_findings` and `worker_checks` say why
    limits = (scheduler.max_model_len, scheduler.max_num_scheduled_tokens)
    blocks = [startup_blocks_of_request((group,), *limits, scheduler.mamba_cache_mode) for group in groups]
    for index, (expected, group) in enumerate(zip(blocks, scheduler.groups, strict=False)):
        found = group.startup_blocks_per_request
        yield from differ({f"groups[{index}].startup_blocks_per_request": (expected, found)})
    if scheduler.initial_free_blocks < sum(blocks):
        wanted = f"at least the {sum(blocks)} of a request of {scheduler.max_model_len} tokens"
        yield f"initial_free_blocks: expected {wanted}, found {scheduler.initial_free_blocks}"
    concurrency = scheduler.num_blocks / sum(blocks)
    if scheduler.max_concurrency != concurrency:
        expected_text = f"{scheduler.num_blocks} blocks / {sum(blocks)} of a request = {concurrency}"
        yield f"max_concurrency: expected {expected_text}, found {scheduler.max_concurrency}"
