"""Records of GLM-5.3-Flash at TP 4 on vLLM 0.33.0, in the shape that four GB300 reported.

Live values: groups of 9, 9, 8, 8 KDA layers, 22 attention layers and 11 tails (blocks of 4 tokens), a pool of 13,697
blocks of 13,516,800 bytes, blocks and hash blocks of 2,176 tokens, a request of 1,048,576 tokens, a concurrency of
13,697 / 495, and 10,027,008 bytes of a block's 9 KDA pages.

Derived from the sources of 0.33.0 (models/glm5next/common/attention.py and kda.py, v1/core/kv_cache_planning.py) and
from the defaults of transformers' `Glm5NextTextConfig`, and held against the live values by `test_glm_records.py`:
each layer's spec, the names of the layers, the order of the groups, where each layer's pages lie. `index_kpool` is the
tails' block, 4.

Chosen, because nothing in the repository knows them: bytes of weights, of the device and of what was available for the
cache; captured graph sizes; that `FLASHINFER_MLA_SPARSE` serves the latents (its pages of 32 rows make the block's
alignment, and with it the live size of a block).
"""

import json
from pathlib import Path
from typing import Any

from process_records import MODELLED_LAUNCH

from producer.adapters import ADAPTERS
from producer.resolving import launch_of, pins_digest, probe_digest
from schemas.canonical import parse
from schemas.observation import ProbeRecord
from schemas.request import Request

ROOT = Path(__file__).parents[1]
VERSION = "0.33.0"
TP = 4
BLOCKS = 13_697
POOL_BLOCK = 13_516_800
BLOCK = 2_176
MAX_MODEL_LEN = 1_048_576

LAYERS = 45
MLA_LAYERS = [layer for layer in range(LAYERS) if layer % 4 == 3]
KDA_LAYERS = [layer for layer in range(LAYERS) if layer % 4 != 3]
KPOOL = 4
"""Tokens of a pooled index entry, and of a tail."""

LATENT = 512
"""Bytes of a token's latent: kv_lora_rank in fp8, without a rotary part."""

INDEX = 128 + 128 // 128 * 4
"""Bytes of an index entry: index_head_dim in fp8 and a float32 scale of each 128."""

LATENT_PAGE = BLOCK * LATENT  # 1,114,112
INDEX_PAGE = BLOCK // KPOOL * INDEX  # 71,808
TAIL_PAGE = 2 * KPOOL * 128 * 2  # key and gate, 4 tokens of 128 in bfloat16: 2,048
CONV_STATE = (3, 3 * 64 * 128 // TP)
KDA_STATE = (64 // TP, 128, 128)


def layer(index: int, part: str = "") -> str:
    return f"language_model.model.layers.{index}.self_attn{part}"


def kda_spec(checkpoint: bool) -> dict[str, Any]:
    """Two states a block, 1,085,440 bytes, padded to the page of a latent (platforms/interface.py:1117)."""
    return {
        "spec_type": "MambaSpec",
        "block_size": BLOCK,
        "page_size_bytes": LATENT_PAGE,
        "page_size_padded": LATENT_PAGE,
        "dcp_sharded": False,
        "is_draft": False,
        "shapes": [CONV_STATE, KDA_STATE],
        "dtypes": ["bfloat16", "float32"],
        "mamba_type": "GDN_ATTN",
        "mamba_cache_mode": "align",
        "num_speculative_blocks": 0,
        "num_prefill_checkpoint_blocks": int(checkpoint),
        **({"prefill_checkpoint_alignment": 16} if checkpoint else {}),
        "num_heads": 1,
        "tokens_per_state": "-1",
        "tp_replicated": False,
    }


def _attention_spec(**more: Any) -> dict[str, Any]:
    return {
        "block_size": BLOCK,
        "dcp_sharded": True,
        "is_draft": False,
        "num_kv_heads": 1,
        "head_size_v": 0,
        "dtype": "uint8",
        "kv_quant_mode": "NONE",
        "tokens_per_state": "1",
    } | more


def _mla_spec(**more: Any) -> dict[str, Any]:
    capabilities = {"non_causal": False, "is_index_group_leader": False, "non_causal_multi_token_decode": False}
    return _attention_spec(spec_type="MLAAttentionSpec", max_tp_shards=1, **capabilities) | more


def latent_spec() -> dict[str, Any]:
    """Blocks start at whole pages of 32 rows (v1/attention/backends/mla/flashinfer_mla_sparse.py:73)."""
    return _mla_spec(
        page_size_bytes=LATENT_PAGE,
        block_stride_alignment=str(32 * LATENT),
        head_size=LATENT,
        kv_quant_mode="FP8_PER_TENSOR",
        cache_dtype_str="fp8",
        cache_role="sparse",
        is_index_group_leader=True,
        topk_buffer_width=2176,
    )


def index_spec() -> dict[str, Any]:
    """An entry of every 4 tokens, in kernel blocks of 32 or 64 entries (v1/attention/backends/mla/indexer.py:299)."""
    return _mla_spec(
        page_size_bytes=INDEX_PAGE,
        block_stride_alignment=f"MultipleOf({KPOOL * 64})",
        head_size=INDEX,
        tokens_per_state=str(KPOOL),
        cache_role="indexer",
    )


def tail_spec() -> dict[str, Any]:
    more = {"block_size": KPOOL, "num_kv_heads": 2, "head_size": 128, "dtype": "bfloat16", "dcp_sharded": False}
    return _attention_spec(spec_type="CircularBufferSpec", page_size_bytes=TAIL_PAGE) | more


def layer_specs(checkpoint: bool = True) -> dict[str, dict[str, Any]]:
    """Specs in the order in which the model registers its layers: an index and a tail come before their latent."""
    specs: dict[str, dict[str, Any]] = {}
    for index in range(LAYERS):
        if index in KDA_LAYERS:
            specs[layer(index)] = kda_spec(checkpoint)
        else:
            specs[layer(index, ".indexer.k_cache")] = index_spec()
            specs[layer(index, ".indexer.tail_cache")] = tail_spec()
            specs[layer(index, ".attn")] = latent_spec()
    return specs


def group_layers() -> list[list[str]]:
    """Every fourth KDA layer in turn, the attention layers, the tails (`_get_packed_kv_cache_groups`)."""
    attention = [[layer(index, ".indexer.k_cache"), layer(index, ".attn")] for index in MLA_LAYERS]
    return [
        *([layer(index) for index in KDA_LAYERS[turn::4]] for turn in range(4)),
        [name for pair in attention for name in pair],
        [layer(index, ".indexer.tail_cache") for index in MLA_LAYERS],
    ]


def groups(checkpoint: bool = True, scheduler: bool = False) -> list[dict[str, Any]]:
    """A worker's bundles of specs, or their copies in a scheduler: the spec of the first layer."""
    specs, startup = layer_specs(checkpoint), [2 + checkpoint] * 4 + [-(-MAX_MODEL_LEN // BLOCK), 1]
    found = []
    for names, blocks in zip(group_layers(), startup, strict=True):
        first = specs[names[0]]
        members = {name: specs[name] for name in (names[:1] if scheduler else names)}
        found.append(
            {
                "layer_names": names,
                "spec_type": first["spec_type"] if scheduler else "UniformTypeKVCacheSpecs",
                "block_size_tokens": first["block_size"],
                "spec_page_size_bytes": sum(spec["page_size_bytes"] for spec in members.values()),
                "startup_blocks_per_request": blocks,
                "layer_specs": members,
                "is_eagle_group": False,
                "host_resident": False,
                "role": "default",
            }
        )
    return found


def tensor_allocations(checkpoint: bool = True) -> list[dict[str, Any]]:
    """One of each spec of a group, side by side from the block's first byte (`get_kv_cache_config_from_groups`)."""
    specs, found = layer_specs(checkpoint), []
    for names in group_layers():
        offset = 0
        by_page: dict[int, list[str]] = {}
        for name in names:
            by_page.setdefault(specs[name]["page_size_bytes"], []).append(name)
        for page, members in by_page.items():
            found.append(
                {
                    "storage_id": "storage0",
                    "size": BLOCKS * POOL_BLOCK,
                    "layers": members,
                    "offset": offset,
                    "block_stride": POOL_BLOCK,
                    "layer_stride": page,
                    "host_resident": False,
                }
            )
            offset += page * len(members)
    return found


def _view(offset: int, dtype: str, element: int, step: int, *shape: int) -> dict[str, Any]:
    """A tensor whose first axis steps `step` bytes, and which is dense behind it."""
    strides = [element]
    for size in reversed(shape[2:]):
        strides.insert(0, strides[0] * size)
    return {
        "storage_id": "storage0",
        "storage_offset_bytes": offset,
        "shape": list(shape),
        "stride_bytes": [step, *strides],
        "dtype": dtype,
        "element_size_bytes": element,
    }


def layer_views(spec: dict[str, Any], start: int) -> list[dict[str, Any]]:
    """What a layer binds of its pages, the first of which starts at `start` (each class's `bind_kv_cache`)."""
    if spec["spec_type"] == "MambaSpec":
        behind = start + CONV_STATE[0] * CONV_STATE[1] * 2
        return [
            _view(start, "bfloat16", 2, POOL_BLOCK, BLOCKS, *CONV_STATE),
            _view(behind, "float32", 4, POOL_BLOCK, BLOCKS, *KDA_STATE),
        ]
    if spec["spec_type"] == "CircularBufferSpec":
        return [_view(start, "bfloat16", 2, POOL_BLOCK, BLOCKS, 2, KPOOL, 128)]  # keys and gates are no axis of one
    if spec["cache_role"] == "sparse":
        return [_view(start, "uint8", 1, POOL_BLOCK, BLOCKS, BLOCK, LATENT)]
    # In pages of its kernel, 32 entries: 17 in a block of 2,176 tokens, 3,200 from one block to the next
    # (v1/worker/utils.py:395).
    page = 32 * INDEX
    pages = (BLOCKS - 1) * (POOL_BLOCK // page) + BLOCK // KPOOL // 32
    return [_view(start, "uint8", 1, page, pages, 32, INDEX)]


CLASSES = {
    "MambaSpec": "Glm5NextLinearAttention",
    "CircularBufferSpec": "Glm5NextTailCache",
    "sparse": "MLAAttention",
    "indexer": "Glm5NextIndexerCache",
}


def cache_memory(checkpoint: bool = True, tp_rank: int = 0) -> dict[str, Any]:
    specs, allocations = layer_specs(checkpoint), tensor_allocations(checkpoint)
    starts = {
        name: allocation["offset"] + place * allocation["layer_stride"]
        for allocation in allocations
        for place, name in enumerate(allocation["layers"])
    }
    return {
        "num_blocks": BLOCKS,
        "available_cache_bytes": BLOCKS * POOL_BLOCK + 5_000_000,
        "kv_cache_layout": "BLHNC",
        "kv_tp_replicas": 1,
        "groups": groups(checkpoint),
        "kernel_block_size_tokens": [*[BLOCK] * 5, KPOOL],  # packed blocks are not split (v1/worker/utils.py:663)
        "layer_classes": {name: CLASSES[spec.get("cache_role", spec["spec_type"])] for name, spec in specs.items()},
        "storages": [{"storage_id": "storage0", "device": f"cuda:{tp_rank}", "size_bytes": BLOCKS * POOL_BLOCK}],
        "tensor_allocations": allocations,
        "layer_tensors": {name: layer_views(spec, starts[name]) for name, spec in specs.items()},
    }


def _runtime() -> dict[str, Any]:
    return {
        "distribution": "vllm",
        "version": VERSION,
        "python_version": "3.12.11",
        "torch_version": "2.13.0",
        "source_files": json.loads(ADAPTERS[VERSION].pins_file.read_text()),
    }


def _compilation() -> dict[str, Any]:
    sizes = [1, 2, 4, *range(8, 65, 8)]
    return {
        "mode": "VLLM_COMPILE",
        "backend": "inductor",
        "cudagraph_mode": "FULL_AND_PIECEWISE",
        "cudagraph_capture_sizes": sizes,
        "max_cudagraph_capture_size": sizes[-1],
    }


def worker(tp_rank: int, checkpoint: bool = True) -> dict[str, Any]:
    config = json.loads((ROOT / "config" / "models" / "glm-5.3-flash" / "config.json").read_text())
    return {
        "kind": "worker",
        "attempt_id": "",
        "dp_rank": 0,
        "tp_rank": tp_rank,
        "pp_rank": 0,
        "runtime": _runtime(),
        "model": {
            "model": "config/models/glm-5.3-flash",
            "config_sha256": "d94f74d2ac26d21e8dea8af627ad08620124ae24f5ba253033257484c4a619d2",
            "architectures": config["architectures"],
            "model_type": config["model_type"],
            "dtype": "bfloat16",
            "quantization": "fp8",
            "quantization_config": config["quantization_config"],
            "load_format": "auto",
            "weights_bytes": 80_000_000_000,
        },
        "settings": {
            "max_model_len": MAX_MODEL_LEN,
            "enforce_eager": False,
            "cache_dtype": "fp8",
            "gpu_memory_utilization": 0.9,
            "enable_prefix_caching": True,
            "recurrent": {
                "block_size": BLOCK,
                "mamba_cache_mode": "align",
                "mamba_block_size": BLOCK,
                "mamba_cache_dtype": "auto",
                "mamba_ssm_cache_dtype": "auto",
            },
            "max_num_batched_tokens": 8192,
            "max_num_seqs": 32,
            "async_scheduling": False,
            "enable_chunked_prefill": True,
            "tensor_parallel_size": TP,
            "pipeline_parallel_size": 1,
            "data_parallel_size": 1,
            "prefill_context_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "enable_expert_parallel": False,
            "enable_eplb": False,
            "moe_backend": "auto",
            "attention_backends": ["GDNAttentionBackend", "Glm5NextIndexerBackend", "FlashInferMLASparseTRTLLMBackend"],
            "offload_backend": "auto",
            "cpu_offload_gb": 0.0,
            "initial_compilation": _compilation(),
            "compilation": _compilation(),
        },
        "hardware": {
            "device_name": "NVIDIA GB300",
            "device_type": "cuda",
            "compute_capability": "10.3",
            "total_memory_bytes": 288_000_000_000,
            "threads": 1,
        },
        "cache": cache_memory(checkpoint, tp_rank),
    }


def launch_facts() -> dict[str, Any]:
    """What the scheduler of this launch says of each modelled setting: their defaults, and the blocks of its groups."""
    return MODELLED_LAUNCH | {
        "num_hash_lookahead_tokens": 0,
        "block_size": BLOCK,
        "cache_config.block_size": BLOCK,
        "hash_block_size": BLOCK,
        "recurrent_block_sizes": [BLOCK] * 4,
    }


def scheduler(checkpoint: bool = True) -> dict[str, Any]:
    startup = sum(group["startup_blocks_per_request"] for group in groups(checkpoint))
    return {
        "kind": "scheduler",
        "attempt_id": "",
        "dp_rank": 0,
        "runtime": _runtime(),
        "launch": launch_facts(),
        "coordinator": "HybridKVCacheCoordinator",
        "managers": [*["MambaManager"] * 4, "FullAttentionManager", "CircularBufferManager"],
        "num_blocks": BLOCKS,
        "initial_free_blocks": BLOCKS - 1,
        "permanent_reserved_block_ids": [0],
        "watermark_blocks": 0,
        "block_size": BLOCK,
        "hash_block_size": BLOCK,
        "cache_hit_alignment_tokens": BLOCK,
        "enable_prefix_caching": True,
        "mamba_cache_mode": "align",
        "prefix_cache_retention_interval": 0,
        "max_concurrency": BLOCKS / startup,
        "max_num_scheduled_tokens": 8192,
        "max_num_running_reqs": 32,
        "max_model_len": MAX_MODEL_LEN,
        "groups": groups(checkpoint, scheduler=True),
    }


def probe_records(request: Request, checkpoint: bool = True) -> list[ProbeRecord]:
    """Both launches of the request's deployment `tp4`, as plain JSON read back."""
    deployment = request.deployments["tp4"]
    records = []
    for phase in ("prefill", "decode"):
        attempt = {"attempt_id": phase.encode().hex().rjust(32, "0")}
        record = {
            "schema_version": 2,
            "probe_digest": probe_digest(request, deployment),
            "phase": phase,
            "launch": launch_of(request, deployment),
            "pins_sha256": pins_digest(ADAPTERS[VERSION]),
            "workers": [worker(rank, checkpoint) | attempt for rank in range(TP)],
            "schedulers": [scheduler(checkpoint) | attempt],
            **attempt,
        }
        records.append(parse(ProbeRecord, json.loads(json.dumps(record)), f"{phase}.json"))
    return records
