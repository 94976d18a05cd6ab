"""Observers inside the engine's processes: what workers and schedulers hold, recorded and never guessed."""

import gc
import sys
from typing import Any

import torch
import vllm
from vllm.model_executor.model_loader import base_loader
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, UniformTypeKVCacheSpecs

from producer.adapters import GROUP_KINDS

_weights_bytes = 0
_process_weights = base_loader.process_weights_after_loading


def freeze_collector() -> None:
    """Collect once, then keep what lives out of the collector's sight, and switch it off in this process."""
    gc.collect()
    gc.freeze()
    gc.disable()


def thaw_collector() -> None:
    gc.enable()
    gc.unfreeze()


def collector_state() -> dict[str, bool]:
    """What the garbage collector of this process does now."""
    return {"enabled": gc.isenabled(), "frozen": gc.get_freeze_count() > 0}


def _count_then_process(model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
    """Weights are counted before the CPU backend repacks them: repacking empties the Linear parameters."""
    global _weights_bytes
    _weights_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    _process_weights(model, *args, **kwargs)


base_loader.process_weights_after_loading = _count_then_process


def group_record(group: KVCacheGroupSpec) -> dict[str, Any]:
    """One cache group; a uniform group takes its members' class, a class that no table names is `unsupported`."""
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        members = {type(member).__name__ for member in spec.kv_cache_specs.values()}
        member = next(iter(spec.kv_cache_specs.values()))
        name = members.pop() if len(members) == 1 else "+".join(sorted(members))
    else:
        member, name = spec, type(spec).__name__
    dtype = getattr(member, "dtype", None)
    return {
        "layer_names": list(group.layer_names),
        "spec_type": name,
        "kind": GROUP_KINDS.get(name, "unsupported"),
        "block_size_tokens": spec.block_size,
        "spec_page_size_bytes": spec.page_size_bytes,
        "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
        **{
            field: getattr(member, field, None)
            for field in (
                "sliding_window",
                "mamba_cache_mode",
                "num_prefill_checkpoint_blocks",
                "prefill_checkpoint_alignment",
                "num_speculative_blocks",
            )
        },
    }


class CacheObserver:
    """vLLM worker extension (`worker_extension_cls`): mixed into the worker, called through `collective_rpc`."""

    def freeze_worker_collector(self) -> None:
        freeze_collector()

    def thaw_worker_collector(self) -> None:
        thaw_collector()

    def worker_collector_state(self) -> dict[str, bool]:
        return collector_state()

    def observe_graph(self: Any) -> dict[str, Any]:
        """The artifact's `cudagraph` block: a worker may lower the mode that its launch asked for."""
        config, graph = self.vllm_config, self.vllm_config.compilation_config
        sizes = _capture_sizes(config)
        return {
            "mode": _graph_mode(config),
            "prefill_mode": _phase_mode(graph, "mixed_mode"),
            "decode_mode": _phase_mode(graph, "decode_mode"),
            "max_capture_size": max(sizes, default=0),
            "capture_sizes": sizes,
            "prefill_capture_sizes": sizes,
            "decode_capture_sizes": [size for size in sizes if size <= config.scheduler_config.max_num_seqs],
        }

    def observe_worker(self: Any) -> dict[str, Any]:
        """The worker record of this rank, as plain values."""
        config = self.vllm_config
        model, cache, scheduler, parallel = (
            config.model_config,
            config.cache_config,
            config.scheduler_config,
            config.parallel_config,
        )
        kv_cache: KVCacheConfig = self.model_runner.kv_cache_config
        storages: dict[int, dict[str, Any]] = {}
        layer_tensors: dict[str, list[dict[str, Any]]] = {}
        for layer, module in config.compilation_config.static_forward_context.items():
            bound = getattr(module, "kv_cache", None)
            tensors = [bound] if isinstance(bound, torch.Tensor) else list(bound or ())
            for tensor in (tensor for tensor in tensors if isinstance(tensor, torch.Tensor)):
                backing = tensor.untyped_storage()
                storage = storages.setdefault(
                    backing.data_ptr(),
                    {
                        "storage_id": f"storage{len(storages)}",
                        "device": str(tensor.device),
                        "size_bytes": backing.nbytes(),
                    },
                )
                layer_tensors.setdefault(layer, []).append(
                    {
                        "storage_id": storage["storage_id"],
                        "storage_offset_bytes": tensor.storage_offset() * tensor.element_size(),
                        "shape": list(tensor.shape),
                        "stride_bytes": [stride * tensor.element_size() for stride in tensor.stride()],
                        "element_size_bytes": tensor.element_size(),
                    }
                )
        return {
            "dp_rank": parallel.data_parallel_rank,
            "tp_rank": self.rank % parallel.tensor_parallel_size,
            "pp_rank": self.rank // parallel.tensor_parallel_size,
            "runtime_version": vllm.__version__.split("+")[0],
            "device_name": current_platform.get_device_name() or "cpu",
            "total_memory_bytes": current_platform.get_device_total_memory(),
            "threads": torch.get_num_threads(),
            "weights_bytes": _weights_bytes,
            "dtype": str(model.dtype).removeprefix("torch."),
            "quantization": model.quantization,
            "model_revision": model.revision,
            "max_model_len": model.max_model_len,
            "enforce_eager": model.enforce_eager,
            "cache_dtype": cache.cache_dtype,
            "enable_prefix_caching": bool(cache.enable_prefix_caching),
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
            "max_num_seqs": scheduler.max_num_seqs,
            "async_scheduling": bool(scheduler.async_scheduling),
            "tensor_parallel_size": parallel.tensor_parallel_size,
            "pipeline_parallel_size": parallel.pipeline_parallel_size,
            "data_parallel_size": parallel.data_parallel_size,
            "enable_expert_parallel": parallel.enable_expert_parallel,
            "cudagraph_mode": _graph_mode(config),
            "cudagraph_capture_sizes": _capture_sizes(config),
            "num_blocks": kv_cache.num_blocks,
            "groups": [group_record(group) for group in kv_cache.kv_cache_groups],
            "tensor_allocations": [
                {
                    "size": tensor.size,
                    "layers": list(tensor.layers),
                    "offset": tensor.offset,
                    "block_stride": tensor.block_stride,
                    "layer_stride": tensor.layer_stride,
                }
                for tensor in kv_cache.kv_cache_tensors
            ],
            "storages": list(storages.values()),
            "layer_tensors": layer_tensors,
        }


def _capture_sizes(config: Any) -> list[int]:
    """Token counts of the captured graphs, rising; none when nothing is captured."""
    if _graph_mode(config) == "NONE":
        return []
    return sorted(config.compilation_config.cudagraph_capture_sizes or [])


def _graph_mode(config: Any) -> str:
    mode = config.compilation_config.cudagraph_mode
    return "NONE" if mode is None else getattr(mode, "name", str(mode))


def observe_scheduler(scheduler: Any) -> dict[str, Any]:
    """The scheduler record of one data-parallel rank, as plain values."""
    pool, cache = scheduler.kv_cache_manager.block_pool, scheduler.cache_config
    return {
        "dp_rank": scheduler.parallel_config.data_parallel_rank,
        "runtime_version": vllm.__version__.split("+")[0],
        "num_blocks": scheduler.kv_cache_config.num_blocks,
        "initial_free_blocks": pool.get_num_free_blocks(),
        "permanent_reserved_block_ids": [pool.null_block.block_id],
        "watermark_blocks": scheduler.kv_cache_manager.watermark_blocks,
        "block_size": scheduler.block_size,
        "hash_block_size": scheduler.hash_block_size,
        # `cache_config` learns it in the workers alone, which need not be this process (v1/worker/gpu_worker.py:865).
        "cache_hit_alignment_tokens": scheduler.kv_cache_config.cache_hit_alignment_tokens,
        "enable_prefix_caching": bool(cache.enable_prefix_caching),
        "mamba_cache_mode": cache.mamba_cache_mode,
        "max_concurrency": cache.kv_cache_max_concurrency,
        "async_scheduling": bool(scheduler.scheduler_config.async_scheduling),
        "max_num_scheduled_tokens": scheduler.max_num_scheduled_tokens,
        "max_num_running_reqs": scheduler.max_num_running_reqs,
        "max_model_len": scheduler.max_model_len,
        "groups": [group_record(group) for group in scheduler.kv_cache_config.kv_cache_groups],
    }


def observe_engine(scheduler: Any, graph: dict[str, Any]) -> dict[str, Any]:
    """The artifact's `engine` block, as it stands after start-up; `graph` is the workers' `cudagraph` block."""
    config = scheduler.vllm_config
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    groups = [
        {
            "type": type(group.kv_cache_spec).__name__,
            "block_size": group.kv_cache_spec.block_size,
            **{
                key: str(value).removeprefix("torch.") if key == "dtype" else value
                for key in (
                    "dtype",
                    "head_size",
                    "num_kv_heads",
                    "sliding_window",
                    "attention_chunk_size",
                    "non_causal",
                    "mamba_cache_mode",
                )
                if (value := getattr(group.kv_cache_spec, key, _ABSENT)) is not _ABSENT
            },
        }
        for group in scheduler.kv_cache_config.kv_cache_groups
    ]
    return {
        "kv_cache": {
            "cache_dtype": cache.cache_dtype,
            "block_size": cache.block_size,
            "enable_prefix_caching": bool(cache.enable_prefix_caching),
            "groups": groups,
        },
        "quantization": {"method": model.quantization, "checkpoint_config": None, "quant_config_class": None},
        "scheduler": {
            "max_num_batched_tokens": scheduler.scheduler_config.max_num_batched_tokens,
            "max_num_seqs": scheduler.scheduler_config.max_num_seqs,
            "async_scheduling": bool(scheduler.scheduler_config.async_scheduling),
            "enable_chunked_prefill": bool(scheduler.scheduler_config.enable_chunked_prefill),
            "long_prefill_token_threshold": scheduler.scheduler_config.long_prefill_token_threshold,
        },
        "model": {
            "dtype": str(model.dtype).removeprefix("torch."),
            "model_type": model.hf_config.model_type,
            "architectures": list(model.hf_config.architectures or []),
            "model": model.model,
        },
        "parallel": {
            "data_parallel_size": parallel.data_parallel_size,
            "data_parallel_rank": parallel.data_parallel_rank,
            "tensor_parallel_size": parallel.tensor_parallel_size,
            "pipeline_parallel_size": parallel.pipeline_parallel_size,
            "prefill_context_parallel_size": parallel.prefill_context_parallel_size,
            "decode_context_parallel_size": parallel.decode_context_parallel_size,
            "enable_expert_parallel": parallel.enable_expert_parallel,
            "enable_eplb": parallel.enable_eplb,
        },
        "speculative": None,
        "graph": {
            "cudagraph_mode": graph["mode"],
            "cudagraph_capture_sizes": graph["capture_sizes"],
            "resolution": "worker",
        },
        "versions": {"vllm": vllm.__version__.split("+")[0], "python": sys.version.split()[0]},
        "resolved": None,
        "resolution": "pending_worker_probe",
    }


_ABSENT = object()


def _phase_mode(graph: Any, phase: str) -> str:
    """The graph mode of one kind of batch (vllm/config/compilation.py `CUDAGraphMode.mixed_mode`, `decode_mode`)."""
    mode = graph.cudagraph_mode
    return "NONE" if mode is None else str(getattr(mode, phase)().name)
