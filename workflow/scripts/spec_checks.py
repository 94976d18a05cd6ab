"""One layer's cache spec by itself: the fields of its class, the values that planning assumes, and its page."""

import contextlib
from collections.abc import Iterator
from typing import Any

from producer.record import RECURRENT
from schemas.observation import LayerSpec

from spec_pages import page_bytes, stride_alignment, tokens_per_state

RING = "CircularBufferSpec"

_EVERY = {"spec_type", "block_size", "page_size_bytes", "block_stride_alignment", "dcp_sharded", "is_draft"}
_ATTENTION = _EVERY | {
    "page_size_padded",
    "num_kv_heads",
    "head_size",
    "head_size_v",
    "dtype",
    "kv_quant_mode",
    "num_head_slots",
    "max_tp_shards",
    "state_content_bytes",
    "tokens_per_state",
}
_FULL = _ATTENTION | {"sliding_window", "attention_chunk_size", "non_causal"}
_WINDOW = _ATTENTION | {"sliding_window", "extra_retained_tokens"}
_MLA = {"cache_dtype_str", "alignment", "model_version"}
SPEC_FIELDS = {
    "FullAttentionSpec": _FULL,
    "MLAAttentionSpec": _FULL
    | _MLA
    | {"cache_role", "is_index_group_leader", "non_causal_multi_token_decode", "topk_buffer_width"},
    "SlidingWindowSpec": _WINDOW,
    "SlidingWindowMLASpec": _WINDOW | _MLA | {"bounded_replay"},
    RING: _ATTENTION,
    RECURRENT: _EVERY
    | {
        "page_size_padded",
        "shapes",
        "dtypes",
        "mamba_type",
        "mamba_cache_mode",
        "num_speculative_blocks",
        "num_prefill_checkpoint_blocks",
        "prefill_checkpoint_alignment",
        "num_heads",
        "tokens_per_state",
        "tp_replicated",
    },
}
"""Cache-spec class -> the fields of a layer's record that it has (v1/kv_cache_interface.py of 0.32.0 and 0.33.0)."""

WINDOWED = ("SlidingWindowSpec", "SlidingWindowMLASpec")

UNMODELLED: dict[str, Any] = {
    "is_draft": False,
    "extra_retained_tokens": 0,
    "non_causal": False,
    "non_causal_multi_token_decode": False,
    "bounded_replay": False,
    "num_speculative_blocks": 0,
    "attention_chunk_size": None,
    "model_version": None,
}
"""Field of a spec -> the value, or absence, that the rules of capacity assume."""

QUANTIZED = "FP8_PER_TENSOR"
QUANT_MODES: dict[str, tuple[str | None, ...]] = {
    "NONE": (None, "auto", "bfloat16", "float16"),
    QUANTIZED: ("fp8", "fp8_e4m3", "fp8_ds_mla"),
}
"""`KVQuantMode` -> the cache dtypes of an MLA spec that have it (`get_kv_quant_mode`, v1/kv_cache_interface.py)."""

MAMBA_TYPES = ("MAMBA1", "MAMBA2", "SHORT_CONV", "LINEAR", "GDN_ATTN")
"""vLLM's own backends of recurrent state (`MambaAttentionBackendEnum`, v1/attention/backends/registry.py)."""

MODES = ("none", "align")
"""Modes of recurrent state that planning has rules for (vllm: CacheConfig.mamba_cache_mode)."""


def spec_findings(spec: LayerSpec) -> Iterator[str]:
    """One spec by itself: fields that its class has, values that the rules assume, and a page that follows."""
    name = spec.spec_type
    present = spec.model_dump(exclude_none=True)
    for field in sorted(present.keys() - SPEC_FIELDS[name]):
        yield f"{field}: expected none of a {name}, found {present[field]}"
    for field, modelled in UNMODELLED.items():
        if present.get(field, modelled) != modelled:
            yield f"{field}: expected {'none' if modelled is None else modelled}, found {present[field]}"
    if name == RECURRENT:
        yield from _recurrent_findings(spec)
    else:
        yield from _attention_findings(spec)
    try:
        page = page_bytes(spec)
        stride_alignment(spec)
    except ValueError as problem:
        yield str(problem)
    else:
        if page != spec.page_size_bytes:
            yield f"page_size_bytes: expected {page}, found {spec.page_size_bytes}"


def _recurrent_findings(spec: LayerSpec) -> Iterator[str]:
    if spec.mamba_cache_mode not in MODES:
        yield f"mamba_cache_mode: expected one of {', '.join(MODES)}, found {spec.mamba_cache_mode}"
    checkpoints, alignment = spec.num_prefill_checkpoint_blocks or 0, spec.prefill_checkpoint_alignment
    if bool(checkpoints) != (alignment is not None):
        wanted = "an alignment with checkpoint blocks, and none without"
        yield f"prefill_checkpoint_alignment: expected {wanted}, found {alignment} with {checkpoints} blocks"
    if spec.mamba_type not in MAMBA_TYPES:
        yield f"mamba_type: expected one of {', '.join(MAMBA_TYPES)}, found {spec.mamba_type}"
    # Both are constants of the class (v1/kv_cache_interface.py:1045 of 0.32.0, 1098 of 0.33.0).
    if (spec.num_heads, spec.tokens_per_state) != (1, "-1"):
        found = f"{spec.num_heads} and {spec.tokens_per_state}"
        yield f"num_heads and tokens_per_state: expected 1 and -1, found {found}"


def _attention_findings(spec: LayerSpec) -> Iterator[str]:
    windowed = spec.spec_type in WINDOWED
    if windowed != (spec.sliding_window is not None):
        wanted = "a window" if windowed else "none"
        yield f"sliding_window: expected {wanted} of a {spec.spec_type}, found {spec.sliding_window}"
    latent_class = "cache_dtype_str" in SPEC_FIELDS[spec.spec_type]
    mode = spec.kv_quant_mode
    if mode not in QUANT_MODES:
        yield f"kv_quant_mode: expected one of {', '.join(QUANT_MODES)}, found {mode}"
    elif latent_class and spec.cache_dtype_str not in QUANT_MODES[mode]:
        yield f"cache_dtype_str: expected one of {QUANT_MODES[mode]} with {mode}, found {spec.cache_dtype_str}"
    latent = (spec.num_kv_heads, spec.head_size_v, spec.max_tp_shards or 1)
    if latent_class and latent != (1, 0, 1):
        # One vector of every token, whole on every rank (model_executor/layers/attention/mla_attention.py:1371).
        yield f"num_kv_heads, head_size_v and max_tp_shards: expected (1, 0, 1) of a latent, found {latent}"
    if spec.cache_role not in (None, "sparse", "indexer"):
        yield f"cache_role: expected sparse or indexer, found {spec.cache_role}"
    with contextlib.suppress(ValueError):  # then there is no page, and why is said with it
        if tokens_per_state(spec) != 1 and spec.cache_role != "indexer":
            yield f"tokens_per_state: expected 1 of all but an indexer, found {spec.tokens_per_state}"
