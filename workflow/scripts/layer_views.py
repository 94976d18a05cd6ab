"""Whether the tensors bound to a layer are views of that layer's own pages, block by block, and of nothing else.

The engine views a page as [heads, states, content] (v1/kv_cache_interface.py:319 and :377 of vLLM 0.32.0), or as the
shapes of a recurrent state, one behind the other (model_executor/layers/mamba/abstract.py:28). Blocks stand on the
first axis, which an attention kernel may split.
"""

from collections.abc import Iterator, Sequence
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


class Steps(NamedTuple):
    """The first axis of a tensor: `of_block` of its `length` places belong to one block, each `step` bytes apart."""

    of_block: int
    length: int
    step: int


def view_findings(place: LayerPlace, spec: LayerSpec, tensors: Sequence[LayerTensor]) -> Iterator[str]:
    """Each way in which the tensors of one layer are not the views of its pages: `<path>: expected, found`.

    The path starts behind the layer: `[0].shape`. Pages lie one block stride apart, so a view that steps so too and is
    in its page in block 0 is in its page in every block. Tensors of one page lie one behind the other from its start.

    Raises:
        ValueError: the spec does not say what is to be seen, `<field of the spec>: expected, found`.
    """
    expected = list(block_shapes(place, spec, tensors))
    if len(tensors) != len(expected):
        yield f": expected {len(expected)} tensors, found {len(tensors)}"
        return
    start = place.start
    for index, (tensor, (shape, dtype)) in enumerate(zip(tensors, expected, strict=True)):
        steps = _steps(place, spec, tensor)
        lines = list(_tensor_findings(place, spec, tensor, shape, dtype, steps))
        yield from (f"[{index}].{line}" for line in lines)
        if lines:
            return
        if tensor.storage_offset_bytes != start:
            what = f"behind tensor {index - 1}" if index else "the start of the layer's page"
            yield f"[{index}].storage_offset_bytes: expected {start}, {what}, found {tensor.storage_offset_bytes}"
        start += (steps.of_block - 1) * steps.step + _place_bytes(tensor)
    if start > place.start + place.page:
        yield f": expected at most the {place.page} bytes of the layer's page, found {start - place.start} of a block"


def block_shapes(
    place: LayerPlace, spec: LayerSpec, tensors: Sequence[LayerTensor]
) -> Iterator[tuple[tuple[int, ...], str]]:
    """Shape of one place of the first axis, and type, of each tensor of a layer.

    Raises:
        ValueError: the spec does not say.
    """
    page = content_page_bytes(spec)
    if spec.shapes is not None:
        yield from zip(spec.shapes, spec.dtypes or (), strict=True)
        return
    heads, states = spec.num_head_slots or spec.num_kv_heads or 1, _states(spec, spec.block_size)
    if not states:
        tokens = f"at most the {spec.block_size} tokens of a block"
        raise ValueError(f"tokens_per_state: expected {tokens}, found {spec.tokens_per_state}")
    rows = _states(spec, spec.block_size // place.kernel_blocks)
    if tensors and _has_kernel_pages(place, spec, tensors[0]):
        rows = tensors[0].shape[-2]
    yield (heads, rows, page // (heads * states * element_bytes(spec.dtype))), str(spec.dtype)


def _states(spec: LayerSpec, tokens: int) -> int:
    return int(tokens // tokens_per_state(spec))


def _has_kernel_pages(place: LayerPlace, spec: LayerSpec, tensor: LayerTensor) -> bool:
    """Whether a compressed cache is bound in its kernel's pages although its group's blocks are whole.

    So are the indexers of GLM and DeepSeek, whose blocks hold other layers too: page j of block b is number
    b * (block stride / page) + j, and the view spans what lies between without ever addressing it
    (`AttentionGroup.map_kv_cache_to_kernel_blocks`, v1/worker/utils.py:397).
    """
    if spec.shapes is not None or place.kernel_blocks > 1 or tokens_per_state(spec) <= 1 or len(tensor.shape) < 3:
        return False
    rows, states = tensor.shape[-2], _states(spec, spec.block_size)
    return 0 < rows < states and states % rows == 0


def _place_bytes(tensor: LayerTensor) -> int:
    return prod(tensor.shape[1:]) * tensor.element_size_bytes


def _steps(place: LayerPlace, spec: LayerSpec, tensor: LayerTensor) -> Steps:
    if _has_kernel_pages(place, spec, tensor):
        of_block, step = _states(spec, spec.block_size) // tensor.shape[-2], _place_bytes(tensor)
        return Steps(of_block, (place.blocks - 1) * (place.block_stride // max(1, step)) + of_block, step)
    return Steps(place.kernel_blocks, place.blocks * place.kernel_blocks, place.block_stride // place.kernel_blocks)


def _tensor_findings(
    place: LayerPlace, spec: LayerSpec, tensor: LayerTensor, shape: tuple[int, ...], dtype: str, steps: Steps
) -> Iterator[str]:
    axes, strides = list(tensor.shape), list(tensor.stride_bytes)
    if len(strides) != len(axes):
        yield f"stride_bytes: expected one of each of {len(axes)} axes, found {len(strides)}"
        return
    if tensor.storage_id != place.storage_id:
        yield f"storage_id: expected {place.storage_id} of its allocation, found {tensor.storage_id}"
    if tensor.dtype != dtype:
        yield f"dtype: expected {dtype} of its spec, found {tensor.dtype}"
        return
    if tensor.element_size_bytes != element_bytes(dtype):
        yield f"element_size_bytes: expected {element_bytes(dtype)} of {dtype}, found {tensor.element_size_bytes}"
        return
    # A layer may drop or move an axis of one: `squeeze(1)` of MLA, `transpose(1, 2)` of a cache with a single head.
    if [size for size in axes[1:] if size != 1] != [size for size in shape if size != 1]:
        yield f"shape: expected {list(shape)} behind the first axis, found {axes[1:]}"
        return
    if not steps.step or place.block_stride % steps.step:
        yield f"shape: expected pages that divide the block stride of {place.block_stride} bytes, found {steps.step}"
        return
    if axes[0] != steps.length:
        yield f"shape: expected {steps.length} on the first axis for {place.blocks} blocks, found {axes[0]}"
    expected = [steps.step, *_dense_strides(tensor, place.tokens_first and spec.shapes is None)]
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
