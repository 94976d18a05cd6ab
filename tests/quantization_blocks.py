"""Quantization blocks of checkpoints: Hugging Face's fp8, and that of the public Laguna-XS.2-FP8."""

from typing import Any

FP8_BLOCK: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}

LAGUNA_BLOCK: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
            "input_activations": {"num_bits": 8, "dynamic": True, "strategy": "group", "group_size": 128},
        }
    },
    "ignore": ["lm_head", "re:.*self_attn.*"],
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False},
}
