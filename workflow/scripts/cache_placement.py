"""Whether a worker's KV cache lies in memory as vLLM lays it out, each byte with one owner at a time.

The engine plans one backing allocation of whole blocks (v1/core/kv_cache_utils.py:1588 of 0.32.0,
v1/core/kv_cache_planning.py of 0.33.0) and lays every cache group over it from its first byte. That is sound because a
block id belongs to one group at a time, and unsound as soon as a page reaches into another block, or into another layer
of its own group. Blocks are not counted one by one: two layers meet at a range of distances between blocks.
"""

import itertools
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

from schemas.observation import CacheMemory, LayerSpec, TensorAllocation

from layer_views import LayerPlace, view_findings
from spec_pages import pool_page_bytes

LAYER_OUTERMOST = ("LBHNC", "LBNHC")
BLOCK_OUTERMOST = ("BLHNC", "BLNHC")
"""Layouts in which a page is one run of bytes (v1/kv_cache_layout.py). The two others, LHBNC and BHLNC, scatter it."""

LAYOUTS = LAYER_OUTERMOST + BLOCK_OUTERMOST
TOKENS_FIRST = ("LBNHC", "BLNHC")


class Page(NamedTuple):
    """One layer's pages: block b has the bytes [start + b * block_stride, that + size) of the storage.

    `group` is the place of the layer's cache group, `allocation` that of its tensor allocation.
    """

    layer: str
    group: int
    allocation: int
    start: int
    size: int
    block_stride: int


def placement_findings(cache: CacheMemory) -> Iterator[str]:
    """Each way in which storages, allocations, pages and bound tensors of one worker do not fit together.

    Lines are `<field of the cache>: expected <x>, found <y>`. There is none for a cache that the engine's
    `allocate_kv_cache` and its layers' `bind_kv_cache` made (v1/worker/utils.py:564 and :868 of vLLM 0.32.0). Whether
    each layer has one group and one spec, and what a page is, `cache_groups.group_findings` asks; here a layer without
    them has no place.
    """
    pages = pages_of(cache)
    yield from _storage_findings(cache)
    yield from _layer_findings(cache)
    for index, allocation in enumerate(cache.tensor_allocations):
        own = [page for page in pages if page.allocation == index]
        for line in _allocation_findings(cache, allocation, own):
            yield f"{_name(cache, index)}.{line}"
    yield from _overlay_findings(cache, pages)
    for page in pages:
        spec, tensors = _spec(cache, page), cache.layer_tensors.get(page.layer)
        if not tensors:
            continue
        place = LayerPlace(
            storage_id=cache.tensor_allocations[page.allocation].storage_id,
            start=page.start,
            page=page.size,
            block_stride=page.block_stride,
            blocks=cache.num_blocks,
            kernel_blocks=_kernel_blocks(cache, page),
            tokens_first=cache.kv_cache_layout in TOKENS_FIRST and spec.shapes is None,
        )
        try:
            for line in view_findings(place, spec, tensors):
                yield f"layer_tensors.{page.layer}{line}"
        except ValueError as problem:
            yield f"groups[{page.group}].layer_specs.{page.layer}.{problem}"


def pages_of(cache: CacheMemory) -> list[Page]:
    """The pages of every layer that has a group, a spec and an allocation; of one that has two, the first."""
    groups = {layer: place for place, group in enumerate(cache.groups) for layer in group.layer_names}
    pages: dict[str, Page] = {}
    for place, allocation in enumerate(cache.tensor_allocations):
        for index, layer in enumerate(allocation.layers):
            spec = cache.groups[groups[layer]].layer_specs.get(layer) if layer in groups else None
            if spec is not None and layer not in pages:
                start = allocation.offset + index * allocation.layer_stride
                size = spec.page_size_bytes
                pages[layer] = Page(layer, groups[layer], place, start, size, allocation.block_stride)
    return list(pages.values())


def _spec(cache: CacheMemory, page: Page) -> LayerSpec:
    return cache.groups[page.group].layer_specs[page.layer]


def _name(cache: CacheMemory, allocation: int) -> str:
    return f"tensor_allocations[{allocation}] ({cache.tensor_allocations[allocation].layers[0]})"


def _kernel_blocks(cache: CacheMemory, page: Page) -> int:
    """Blocks of the group's attention kernel in a block of the pool."""
    sizes = cache.kernel_block_size_tokens
    kernel = sizes[page.group] if page.group < len(sizes) else None
    return 1 if kernel is None else max(1, _spec(cache, page).block_size // kernel)


def _storage_findings(cache: CacheMemory) -> Iterator[str]:
    """One storage of whole blocks: what the engine allocates is `num_blocks` times a block, without a tail
    (v1/core/kv_cache_utils.py:1629); ROCm alone rounds it up (v1/worker/utils.py:586)."""
    ids = [storage.storage_id for storage in cache.storages]
    total = sum(storage.size_bytes for storage in cache.storages)
    if len(ids) != 1:
        yield f"storages: expected one backing allocation, found {ids}"
    if total % cache.num_blocks:
        yield f"storages: expected bytes divisible by {cache.num_blocks} blocks, found {total}"
    if cache.available_cache_bytes is not None and total > cache.available_cache_bytes:
        yield f"storages: expected at most the {cache.available_cache_bytes} bytes available, found {total}"
    if cache.kv_cache_layout not in LAYOUTS:
        yield f"kv_cache_layout: expected one of {', '.join(LAYOUTS)}, found {cache.kv_cache_layout}"


def _layer_findings(cache: CacheMemory) -> Iterator[str]:
    """Every layer of the groups, and no other one, has one place and bound tensors."""
    grouped = {layer for group in cache.groups for layer in group.layer_names}
    placed = Counter(layer for allocation in cache.tensor_allocations for layer in allocation.layers)
    for layer in (layer for group in cache.groups for layer in group.layer_names):
        if placed[layer] != 1:
            yield f"tensor_allocations: expected {layer} in one allocation, found it in {placed[layer]}"
        if not cache.layer_tensors.get(layer):
            yield f"layer_tensors: expected a tensor of {layer}, found none"
    for field, layers in (("tensor_allocations", placed), ("layer_tensors", cache.layer_tensors)):
        for layer in layers:
            if layer not in grouped:
                yield f"{field}: expected layers of the groups alone, found {layer}"
    sizes = cache.kernel_block_size_tokens
    if len(sizes) != len(cache.groups):
        yield f"kernel_block_size_tokens: expected one of each of {len(cache.groups)} groups, found {len(sizes)}"
    for place, (kernel, group) in enumerate(zip(sizes, cache.groups, strict=False)):
        blocks = sorted({spec.block_size for spec in group.layer_specs.values()})
        if kernel is not None and any(block % kernel for block in blocks):
            yield f"kernel_block_size_tokens[{place}]: expected a divisor of blocks of {blocks}, found {kernel}"


def _allocation_findings(cache: CacheMemory, allocation: TensorAllocation, pages: Sequence[Page]) -> Iterator[str]:
    """One allocation, of the layers that have the same spec in one group, by its fields."""
    sizes = {storage.storage_id: storage.size_bytes for storage in cache.storages}
    size = sizes.get(allocation.storage_id)
    if size is None:
        yield f"storage_id: expected one of {list(sizes)}, found {allocation.storage_id}"
    elif allocation.size != size:
        yield f"size: expected the {size} bytes of {allocation.storage_id}, found {allocation.size}"
    if allocation.host_resident:
        yield "host_resident: expected False, found True"
    if not pages:
        return
    groups = sorted({page.group for page in pages})
    if len(groups) > 1:
        yield f"layers: expected those of one group, found layers of groups {groups}"
    page = max(page.size for page in pages)
    end = _end(cache, allocation, page)
    if end > allocation.size:
        yield f"size: expected at least {end} bytes for {cache.num_blocks} blocks, found {allocation.size}"
    if page > allocation.block_stride:
        yield f"block_stride: expected at least the page of {page} bytes, found {allocation.block_stride}"
    expected = {}
    if cache.kv_cache_layout in LAYER_OUTERMOST:
        expected = {"layer_stride": cache.num_blocks * allocation.block_stride}
    if cache.kv_cache_layout in BLOCK_OUTERMOST:
        expected = {"layer_stride": page, "block_stride": pool_page_bytes(cache)}
    for field, stride in expected.items():
        found = getattr(allocation, field)
        if found != stride:
            yield f"{field}: expected {stride} in layout {cache.kv_cache_layout}, found {found}"
    split = _kernel_blocks(cache, pages[0])
    if split > 1 and allocation.block_stride != page:
        yield f"block_stride: expected the page of {page} bytes, split in {split}, found {allocation.block_stride}"


def _end(cache: CacheMemory, allocation: TensorAllocation, page: int) -> int:
    """The byte after the last page."""
    last_layer = allocation.offset + (len(allocation.layers) - 1) * allocation.layer_stride
    return last_layer + (cache.num_blocks - 1) * allocation.block_stride + page


def _overlay_findings(cache: CacheMemory, pages: Sequence[Page]) -> Iterator[str]:
    """Allocations that meet have one block stride, and no byte has two owners; each layer is named once."""
    largest: dict[int, int] = {}
    for page in pages:
        largest[page.allocation] = max(page.size, largest.get(page.allocation, 0))
    allocations = cache.tensor_allocations
    ends = {index: _end(cache, allocations[index], size) for index, size in largest.items()}
    for one, other in itertools.combinations(ends, 2):
        meet = allocations[one].offset < ends[other] and allocations[other].offset < ends[one]
        if meet and allocations[one].block_stride != allocations[other].block_stride:
            yield (
                f"{_name(cache, other)}.block_stride: expected {allocations[one].block_stride} of the allocation of "
                f"{allocations[one].layers[0]} in the same bytes, found {allocations[other].block_stride}"
            )
    named: set[str] = set()
    for first, second, distance in shared_bytes(pages, cache.num_blocks):
        if second.layer not in named:
            named.add(second.layer)
            block = f"block b{distance:+d}" if distance else "block b"
            yield (
                f"{_name(cache, second.allocation)}: expected bytes of {second.layer} and {first.layer} in common only "
                f"for the same block of different groups, found {block} and block b"
            )


def shared_bytes(pages: Sequence[Page], blocks: int) -> list[tuple[Page, Page, int]]:
    """Pairs of layers, or a layer with itself, that share a byte and may not: only the same block of layers of
    different groups may. With a distance: block b of the first one and block b + distance of the second.

    Layers of different block strides are not compared.
    """
    found = []
    order = {page: place for place, page in enumerate(pages)}
    for stride in {page.block_stride for page in pages}:
        own = sorted((page for page in pages if page.block_stride == stride), key=attrgetter("start"))
        starts = [page.start for page in own]
        largest = max(page.size for page in own)
        for index, one in enumerate(own):
            # Of later layers, these meet it in the same block; those that meet it in another one start a stride on.
            near = bisect_left(starts, one.start + one.size)
            far = max(near, bisect_right(starts, one.start + stride - largest))
            end = bisect_left(starts, one.start + (blocks - 1) * stride + one.size)
            for other in itertools.chain(own[index:near], own[far:end]):
                distance = _illicit_distance(one, other, blocks)
                if distance is not None:
                    later = order[one] > order[other]
                    found.append((other, one, -distance) if later else (one, other, distance))
    return sorted(found, key=lambda pair: (order[pair[0]], order[pair[1]]))


def _illicit_distance(one: Page, other: Page, blocks: int) -> int | None:
    """A distance at which block b of `one` and block b + distance of `other` share a byte that they may not share:
    -other.size < other.start + distance * stride - one.start < one.size."""
    apart, stride = one.start - other.start, one.block_stride
    low = max((apart - other.size) // stride + 1, 1 - blocks)
    high = min((apart + one.size - 1) // stride, blocks - 1)
    if low > high:
        return None
    if high > 0:
        return high
    if one is not other and (low < 0 or one.group == other.group):
        return low
    return None
