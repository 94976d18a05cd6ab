"""What a deployment needs at least, from the config alone: to refuse what cannot fit before an engine starts.

Only for plain decoders, whose layers all hold keys and values of every token; for anything else the probe decides.
"""

from typing import Any

from schemas.canonical import Strict

NOT_PLAIN = (
    "full_attention_interval",
    "kv_lora_rank",
    "layer_types",
    "linear_attn_config",
    "mamba_d_state",
    "sliding_window",
    "sliding_window_pattern",
)
"""Settings of layers that hold less than every token, or something else than keys and values."""


class Footprint(Strict):
    """Lower bounds. `kv_elements_per_token` counts cache elements of one token over all layers and heads;
    `weights` parameters of embeddings and feed-forward layers."""

    kv_elements_per_token: int
    num_key_value_heads: int
    weights: int


def footprint(settings: dict[str, Any]) -> Footprint | None:
    """Lower bounds of a plain decoder, or None."""
    if any(settings.get(key) for key in NOT_PLAIN):
        return None
    sizes = [
        settings.get(key)
        for key in ("num_hidden_layers", "num_attention_heads", "head_dim", "hidden_size", "intermediate_size")
    ]
    if any(type(size) is not int or size <= 0 for size in sizes):
        return None
    layers, heads, head_dim, hidden, inner = (int(size or 0) for size in sizes)
    kv_heads = settings.get("num_key_value_heads") or heads
    vocabulary = settings.get("vocab_size")
    if type(kv_heads) is not int or type(vocabulary) is not int:
        return None
    return Footprint(
        kv_elements_per_token=2 * layers * kv_heads * head_dim,
        num_key_value_heads=kv_heads,
        weights=vocabulary * hidden + 3 * layers * hidden * inner,
    )
