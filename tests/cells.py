"""Frozen cells for tests, by hand."""

import json

from producer.contracts import GENERIC
from schemas.canonical import digest
from schemas.plan import FrozenCell
from schemas.points import PointManifest

GLM_IDENTITY = {
    "model_config_sha256": "d" * 64,
    "execution_profile": "full",
    "engram_residency": "none",
    "input_modality": "text",
}


def frozen_cell(**change) -> FrozenCell:
    """A prefill cell of one point on the CPU engine; `change` replaces fields of its identity."""
    points = {"prefill": [{"batch_size": 1, "total_prefill_tokens": 16, "total_kv_read_tokens": 0}], "decode": []}
    identity = {
        "phase": "prefill",
        "system": "cpu-2core",
        "backend": "vllm",
        "runtime_backend_version": "0.32.0",
        "pins_sha256": "a" * 64,
        "probe_digest": "b" * 64,
        "model_config_sha256": "c" * 64,
        "model_revision": "r1",
        "parallel_strategy": "single",
        "topology": {},
        "precision": {},
        "limits": {"max_num_tokens": 1024, "max_batch_size": 8, "max_model_len": 2048},
        "engine": {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 28},
        "environment": {},
        "contract": "generic",
        "producer_protocol": GENERIC.protocol,
        "measurement": {
            "warmup_repeats": 5,
            "measurement_repeats": 10,
            "reduction": "adjacent_upper_median",
        },
        "token_generator": "passgrid_tokens_v1",
        "token_seed": "53",
        "points_sha256": digest(PointManifest.model_validate_json(json.dumps(points))),
    }
    cell = {
        "deployment": "dense",
        "model": "config/models/qwen3-tiny",
        "vocab_size": 1000,
        "block_size": 128,
        "hash_block_size": 128,
        "cache_hit_alignment_tokens": 128,
        "free_blocks": 1000,
        "device_name": "cpu",
        "identity": identity | change,
        "points": points,
    }
    return FrozenCell.model_validate_json(json.dumps(cell))
