"""Bytes of a block, computed again from each layer's cache spec.

Source: v1/kv_cache_interface.py and, for the pool, `_get_kv_cache_bytes_per_block` (v1/core/kv_cache_planning.py:574 of
vllm 0.33.0, v1/core/kv_cache_utils.py:1520 of 0.32.0).
"""

import math
import re
from fractions import Fraction
from math import prod

from schemas.observation import CacheMemory, LayerSpec

ELEMENT_BYTES = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
"""torch dtype, without the module's name -> bytes of an element."""

_POSITIVE = re.compile(r"([1-9]\d{0,15})(?:/([1-9]\d{0,15}))?")
_ALIGNMENT = re.compile(r"([1-9]\d{0,15})|MultipleOf\(([1-9]\d{0,15})\)")
"""`block_stride_alignment` as a record has it: bytes, or the tokens of a kernel's block."""


def round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def element_bytes(dtype: str | None) -> int:
    """
    Raises:
        ValueError: a dtype that this table does not know.
    """
    if dtype not in ELEMENT_BYTES:
        raise ValueError(f"dtype: expected one of {', '.join(ELEMENT_BYTES)}, found {dtype}")
    return ELEMENT_BYTES[dtype]


def _size(field: str, value: int | None) -> int:
    if value is None:
        raise ValueError(f"{field}: expected a size, found none")
    return value


def _content_bytes(spec: LayerSpec) -> int:
    """One state of one head: packed, or a key and a value (an MLA latent has no value)."""
    width = _size("head_size", spec.head_size) + _size("head_size_v", spec.head_size_v)
    return spec.state_content_bytes or width * element_bytes(spec.dtype)


def tokens_per_state(spec: LayerSpec) -> Fraction:
    """Tokens that one state of an attention layer covers.

    Raises:
        ValueError: no positive number.
    """
    number = _POSITIVE.fullmatch(spec.tokens_per_state or "")
    if number is None:
        raise ValueError(f"tokens_per_state: expected a positive number, found {spec.tokens_per_state}")
    return Fraction(int(number[1]), int(number[2] or 1))


def content_page_bytes(spec: LayerSpec) -> int:
    """Bytes that the states of one block fill, before padding.

    Attention: head slots x states x content. Recurrent: each state's elements, once a block.

    Raises:
        ValueError: a field that this needs is missing or unknown, named.
    """
    if spec.shapes is not None or spec.dtypes is not None:
        shapes, dtypes = spec.shapes or (), spec.dtypes or ()
        if not shapes or len(shapes) != len(dtypes):
            raise ValueError(f"dtypes: expected one of each of {len(shapes)} shapes, found {len(dtypes)}")
        return sum(prod(shape) * element_bytes(dtype) for shape, dtype in zip(shapes, dtypes, strict=True))
    heads = spec.num_head_slots or _size("num_kv_heads", spec.num_kv_heads)
    states = int(spec.block_size // tokens_per_state(spec))
    if not states:
        wanted = f"at most a block of {spec.block_size} tokens"
        raise ValueError(f"tokens_per_state: expected {wanted}, found {spec.tokens_per_state}")
    return heads * states * _content_bytes(spec)


def page_bytes(spec: LayerSpec) -> int:
    """Bytes of one block of this layer: its content, rounded up to the spec's `alignment`, or its padded size.

    Raises:
        ValueError: not derivable, or padded to less than its content.
    """
    content = content_page_bytes(spec)
    if spec.page_size_padded is None:
        return content
    least = round_up(content, spec.alignment or 1)
    if spec.page_size_padded < least:
        raise ValueError(f"page_size_padded: expected at least {least}, found {spec.page_size_padded}")
    return spec.page_size_padded


def stride_alignment(spec: LayerSpec) -> int:
    """Bytes that the stride between blocks must be a multiple of: given, or a page of the kernel's block.

    Raises:
        ValueError: neither a number nor `MultipleOf(<tokens>)`.
    """
    asked = spec.block_stride_alignment
    if asked is None:
        return 1
    match = _ALIGNMENT.fullmatch(asked)
    if match is None:
        raise ValueError(f"block_stride_alignment: expected bytes or MultipleOf(tokens), found {asked}")
    if match[1]:
        return int(match[1])
    kernel = math.gcd(int(match[2]), spec.block_size)
    return 1 if kernel == spec.block_size else page_bytes(spec.model_copy(update={"block_size": kernel}))


def pool_block_bytes(cache: CacheMemory) -> int:
    """Bytes of one block of the pool: the widest group's pages side by side, each aligned as its kernels want it.

    In a layout whose outermost axis is the block (its name starts with B: v1/kv_cache_layout.py) the block as a whole
    is aligned, in any other each layer's pages.

    Raises:
        ValueError: not derivable.
    """
    aligned = {spec: (page_bytes(spec), stride_alignment(spec)) for spec in specs_of(cache)}
    groups = [[aligned[spec] for spec in group.layer_specs.values()] for group in cache.groups]
    if (cache.kv_cache_layout or "").startswith("B"):
        widest = max(sum(page for page, _ in pages) for pages in groups)
        return round_up(widest, math.lcm(*(alignment for _, alignment in aligned.values())))
    return max(sum(round_up(page, alignment) for page, alignment in pages) for pages in groups)


def pool_page_bytes(cache: CacheMemory) -> int:
    """Bytes of one block of the pool, as it was allocated: every group's page fills it."""
    return sum(storage.size_bytes for storage in cache.storages) // cache.num_blocks


def specs_of(cache: CacheMemory) -> set[LayerSpec]:
    """The distinct specs of all layers: there are few of them."""
    return {spec for group in cache.groups for spec in group.layer_specs.values()}
