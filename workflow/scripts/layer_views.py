"""Whether the tensors bound to a layer are views of that layer's own pages, block by block, and of nothing else.

The engine views a page as [heads, states, content] (v1/kv_cache_interface.py:319 and :377 of vLLM 0.32.0), or as the
shapes of a recurrent state, one behind the other (model_executor/layers/mamba/abstract.py:28). Blocks stand on the
first axis, which an attention kernel may split.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

from schemas.observation import LayerSpec, LayerTensor

from spec_pages import content_page_bytes, element_bytes, tokens_per_state


class LayerPlace(NamedTuple):
    """Where a layer's pages lie: block b of `blocks` has `page` bytes of a storage from start + b * block_stride on.

    `kernel_blocks` is how many blocks of its attention kernel a block of the pool is; `tokens_first` says that tokens
    stand outside heads in memory (layouts LBNHC and BLNHC).
    """

    storage_id: str
    start: int
    page: int
    block_stride: int
    blocks: int
    kernel_blocks: int
    tokens_first: bool


class BlockView(NamedTuple):
    """What one tensor sees of a block: elements of `dtype` in `shape`, which is [heads, states, content] in an
    attention layer. `compressed` says that a state is of several tokens."""

    shape: tuple[int, ...]
    dtype: str
    element_bytes: int
    compressed: bool


class Steps(NamedTuple):
    """The first axis of a tensor: `of_block` of its `length` places belong to one block, each `step` bytes apart."""

    of_block: int
    length: int
    step: int


@lru_cache(maxsize=1024)  # layers hardly differ in their specs
def block_views(spec: LayerSpec, kernel_blocks: int) -> tuple[BlockView, ...]:
    """Each tensor of a layer whose attention kernel splits a block in so many.

    Raises:
        ValueError: the spec does not say, `<field>: expected, found`.
    """
    page = content_page_bytes(spec)
    if spec.shapes is not None:
        pairs = zip(spec.shapes, spec.dtypes or (), strict=True)
        return tuple(BlockView(shape, dtype, element_bytes(dtype), False) for shape, dtype in pairs)
    tokens, element = tokens_per_state(spec), element_bytes(spec.dtype)
    heads, states = spec.num_head_slots or spec.num_kv_heads, int(spec.block_size // tokens)
    assert heads  # or the page would not have followed
    shape = heads, int(spec.block_size // kernel_blocks // tokens), page // (heads * states * element)
    return (BlockView(shape, str(spec.dtype), element, tokens > 1 and kernel_blocks == 1),)


def view_findings(place: LayerPlace, spec: LayerSpec, tensors: Sequence[LayerTensor]) -> Iterator[str]:
    """Each way in which the tensors of one layer are not the views of its pages: `<path>: expected, found`.

    The path starts behind the layer: `[0].shape`. Pages lie one block stride apart, so a view that steps so too and is
    in its page in block 0 is in its page in every block. Tensors of one page lie one behind the other from its start.

    Raises:
        ValueError: the spec does not say what is to be seen, `<field of the spec>: expected, found`.
    """
    views = block_views(spec, place.kernel_blocks)
    if len(tensors) != len(views):
        yield f": expected {len(views)} tensors, found {len(tensors)}"
        return
    start = place.start
    for index, (tensor, view) in enumerate(zip(tensors, views, strict=True)):
        steps = _steps(place, view, tensor)
        lines = list(_tensor_findings(place, view, tensor, steps))
        yield from (f"[{index}].{line}" for line in lines)
        if lines:
            return
        if tensor.storage_offset_bytes != start:
            what = f"behind tensor {index - 1}" if index else "the start of the layer's page"
            yield f"[{index}].storage_offset_bytes: expected {start}, {what}, found {tensor.storage_offset_bytes}"
        start += (steps.of_block - 1) * steps.step + _place_bytes(tensor)
    if start > place.start + place.page:
        yield f": expected at most the {place.page} bytes of the layer's page, found {start - place.start} of a block"


def _kernel_rows(view: BlockView, tensor: LayerTensor) -> int | None:
    """States of a page of the kernel's, where a compressed cache is bound in these although its group's blocks are
    whole.

    So are the indexers of GLM and DeepSeek, whose blocks hold other layers too: page j of block b is number
    b * (block stride / page) + j, and the view spans what lies between without ever addressing it
    (`AttentionGroup.map_kv_cache_to_kernel_blocks`, v1/worker/utils.py:397).
    """
    if not view.compressed or len(tensor.shape) < 3:
        return None
    rows, states = tensor.shape[-2], view.shape[1]
    return rows if 0 < rows < states and states % rows == 0 else None


def _place_bytes(tensor: LayerTensor) -> int:
    return prod(tensor.shape[1:]) * tensor.element_size_bytes


def _steps(place: LayerPlace, view: BlockView, tensor: LayerTensor) -> Steps:
    rows = _kernel_rows(view, tensor)
    if rows is None:
        return Steps(place.kernel_blocks, place.blocks * place.kernel_blocks, place.block_stride // place.kernel_blocks)
    of_block, step = view.shape[1] // rows, _place_bytes(tensor)
    return Steps(of_block, (place.blocks - 1) * (place.block_stride // max(1, step)) + of_block, step)


def _tensor_findings(place: LayerPlace, view: BlockView, tensor: LayerTensor, steps: Steps) -> Iterator[str]:
    axes, strides = list(tensor.shape), list(tensor.stride_bytes)
    if len(strides) != len(axes):
        yield f"stride_bytes: expected one of each of {len(axes)} axes, found {len(strides)}"
        return
    if tensor.storage_id != place.storage_id:
        yield f"storage_id: expected {place.storage_id} of its allocation, found {tensor.storage_id}"
    if tensor.dtype != view.dtype:
        yield f"dtype: expected {view.dtype} of its spec, found {tensor.dtype}"
        return
    if tensor.element_size_bytes != view.element_bytes:
        yield f"element_size_bytes: expected {view.element_bytes} of {view.dtype}, found {tensor.element_size_bytes}"
        return
    rows, shape = _kernel_rows(view, tensor), list(view.shape)
    if rows is not None:
        shape[1] = rows
    # A layer may drop or move an axis of one: `squeeze(1)` of MLA, `transpose(1, 2)` of a cache with a single head.
    if [size for size in axes[1:] if size != 1] != [size for size in shape if size != 1]:
        yield f"shape: expected {shape} behind the first axis, found {axes[1:]}"
        return
    if not steps.step or place.block_stride % steps.step:
        yield f"shape: expected pages that divide the block stride of {place.block_stride} bytes, found {steps.step}"
        return
    if axes[0] != steps.length:
        yield f"shape: expected {steps.length} on the first axis for {place.blocks} blocks, found {axes[0]}"
    expected = [steps.step, *_dense_strides(tensor, place.tokens_first)]
    if any(size > 1 and wanted != found for size, wanted, found in zip(axes, expected, strides, strict=True)):
        yield f"stride_bytes: expected {expected}, found {strides}"


def _dense_strides(tensor: LayerTensor, tokens_first: bool) -> list[int]:
    """Byte strides behind the first axis of a tensor without gaps, the last axis innermost."""
    inner = list(range(1, len(tensor.shape)))
    if tokens_first and len(inner) == 3:
        inner = [2, 1, 3]
    strides, stride = dict.fromkeys(inner, 0), tensor.element_size_bytes
    for axis in reversed(inner):
        strides[axis] = stride
        stride *= tensor.shape[axis]
    return [strides[axis] for axis in sorted(strides)]
