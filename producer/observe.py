"""Observers inside the engine's processes: the worker extension, and the blocks of an artifact that engines fill."""

import gc
import sys
from typing import Any

import vllm

from producer.observe_memory import capture_sizes, graph_mode, worker_record


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
        sizes = capture_sizes(config)
        return {
            "mode": graph_mode(config),
            "prefill_mode": _phase_mode(graph, "mixed_mode"),
            "decode_mode": _phase_mode(graph, "decode_mode"),
            "max_capture_size": max(sizes, default=0),
            "capture_sizes": sizes,
            "prefill_capture_sizes": sizes,
            "decode_capture_sizes": [size for size in sizes if size <= config.scheduler_config.max_num_seqs],
        }

    def observe_worker(self: Any) -> dict[str, Any]:
        """The worker record of this rank, as plain values."""
        return worker_record(self)


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
