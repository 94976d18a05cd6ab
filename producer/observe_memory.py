"""Records of one worker and of one scheduler (`schemas/observation.py`), read inside the engine's processes.

Only reads, after warm-up; the one patch is of the loader, since what was there before the backend repacked the
weights and lowered the graph mode is seen at no other moment. What has no plain value is named by its path in
`unresolved_fields`.
"""

import hashlib
import os
import platform
from collections.abc import Iterable, Iterator
from dataclasses import fields
from enum import Enum
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.config.vllm import get_current_vllm_config
from vllm.model_executor.model_loader import base_loader
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec, UniformTypeKVCacheSpecs, iter_layer_specs

from producer.adapters import ADAPTERS, RECURRENT_SETTINGS_IN, read_pins
from producer.launch_checks import launch_facts
from producer.nodes import ATTEMPT_ID
from schemas.canonical import digest, is_file, read_json
from schemas.observation import LayerSpec, RecurrentCacheSettings
from schemas.quantization import SIDECAR

UNRESOLVED = "unresolved"
"""In place of the name of a storage that nobody could find; its path stands in `unresolved_fields`."""

_before_repacking: dict[str, Any] = {}
_process_weights = base_loader.process_weights_after_loading


def _note_then_process(model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
    """The CPU backend empties the Linear parameters when it repacks them; attention backends lower the graph mode
    when the cache is made (v1/worker/gpu_model_runner.py `initialize_kv_cache`), which comes later."""
    _before_repacking["weights_bytes"] = sum(p.numel() * p.element_size() for p in model.parameters())
    _before_repacking["compilation"] = compilation_settings(get_current_vllm_config())
    _process_weights(model, *args, **kwargs)


base_loader.process_weights_after_loading = _note_then_process


def graph_mode(config: Any) -> str:
    mode = config.compilation_config.cudagraph_mode
    return "NONE" if mode is None else str(getattr(mode, "name", mode))


def capture_sizes(config: Any) -> list[int]:
    """Token counts of the captured graphs, rising; none when nothing is captured."""
    if graph_mode(config) == "NONE":
        return []
    return sorted(config.compilation_config.cudagraph_capture_sizes or [])


def compilation_settings(config: Any) -> dict[str, Any]:
    """`CompilationSettings` of a vLLM configuration, as it stands now."""
    compilation = config.compilation_config
    return {
        "mode": plain(compilation.mode),
        "backend": compilation.backend,
        "cudagraph_mode": graph_mode(config),
        "cudagraph_capture_sizes": capture_sizes(config),
        "max_cudagraph_capture_size": compilation.max_cudagraph_capture_size,
    }


def plain(value: Any) -> Any:
    """`value` as JSON holds it: a dtype and a member of an enumeration by its name, a textual one by its text.

    Raises:
        TypeError: it has no such form.
    """
    if isinstance(value, Enum):
        return value.value if isinstance(value, str) else value.name
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    raise TypeError(type(value).__name__)


TEXTS = ("block_stride_alignment", "tokens_per_state")
"""Fields of a spec that are a number in one release or class and an object in another; a record has their text."""


def layer_spec(spec: KVCacheSpec, path: str, unresolved: list[str]) -> dict[str, Any]:
    """`LayerSpec` of one layer: each field of its dataclass. A field that no record has is unresolved."""
    record: dict[str, Any] = {"spec_type": type(spec).__name__, "page_size_bytes": spec.page_size_bytes}
    for name in (field.name for field in fields(spec)):
        value = getattr(spec, name)
        try:
            record[name] = str(value) if name in TEXTS and value is not None else plain(value)
        except TypeError:
            unresolved.append(f"{path}.{name}")
        if name not in LayerSpec.model_fields:
            record.pop(name, None)
            unresolved.append(f"{path}.{name}")
    return record


def cache_group(group: Any, layers: Iterable[str], config: Any, path: str, unresolved: list[str]) -> dict[str, Any]:
    """`CacheGroup` of a `KVCacheGroupSpec`, with the specs of `layers`; `config` is the process's `VllmConfig`."""
    spec = group.kv_cache_spec
    specs = spec.kv_cache_specs if isinstance(spec, UniformTypeKVCacheSpecs) else dict.fromkeys(layers, spec)
    layer_specs = {}
    for layer in layers:
        place = f"{path}.layer_specs.{layer}"
        if layer in specs:
            layer_specs[layer] = layer_spec(specs[layer], place, unresolved)
        else:
            unresolved.append(place)
    return {
        "layer_names": list(group.layer_names),
        "spec_type": type(spec).__name__,
        "block_size_tokens": spec.block_size,
        "spec_page_size_bytes": spec.page_size_bytes,
        "startup_blocks_per_request": -(-spec.max_memory_usage_bytes(config) // spec.page_size_bytes),
        "layer_specs": layer_specs,
        "is_eagle_group": group.is_eagle_group,
        "host_resident": group.host_resident,
        "role": plain(group.role),
    }


def _bound(module: Any) -> list[Any]:
    """What a layer's module holds of the cache: one tensor, or several of one page."""
    bound = getattr(module, "kv_cache", None)
    if bound is None:
        return []
    return list(bound) if isinstance(bound, list | tuple) else [bound]


class Views:
    """The tensors bound to layers, and the storages that they are views of."""

    def __init__(self, modules: dict[str, Any], layers: set[str], unresolved: list[str]) -> None:
        self._storages: dict[int, dict[str, Any]] = {}
        self.layer_tensors: dict[str, list[dict[str, Any]]] = {}
        for layer, module in modules.items():
            views = [self._view(tensor) for tensor in _bound(module)]
            found = [view for view in views if view is not None]
            if found:
                self.layer_tensors[layer] = found
                places = (place for place, view in enumerate(views) if view is None)
                unresolved.extend(f"cache.layer_tensors.{layer}.{place}" for place in places)
        unresolved.extend(f"cache.layer_tensors.{layer}" for layer in sorted(layers - self.layer_tensors.keys()))

    @property
    def storages(self) -> list[dict[str, Any]]:
        return list(self._storages.values())

    def _view(self, tensor: Any) -> dict[str, Any] | None:
        """One tensor; None where there is no memory behind it."""
        if not isinstance(tensor, torch.Tensor) or not tensor.numel() or not tensor.untyped_storage().data_ptr():
            return None
        backing, size = tensor.untyped_storage(), tensor.element_size()
        storage = self._storages.setdefault(
            backing.data_ptr(),
            {
                "storage_id": f"storage{len(self._storages)}",
                "device": str(tensor.device),
                "size_bytes": backing.nbytes(),
            },
        )
        return {
            "storage_id": storage["storage_id"],
            "storage_offset_bytes": tensor.storage_offset() * size,
            "shape": list(tensor.shape),
            "stride_bytes": [stride * size for stride in tensor.stride()],
            "dtype": plain(tensor.dtype),
            "element_size_bytes": size,
        }

    def storage_of(self, layers: Iterable[str]) -> str | None:
        """The one storage that holds all of these layers; None when it is not known, or there are several."""
        found = {view["storage_id"] for layer in layers for view in self.layer_tensors.get(layer, ())}
        return found.pop() if len(found) == 1 else None


def cache_memory(worker: Any, unresolved: list[str]) -> dict[str, Any]:
    """`CacheMemory` of a worker."""
    config, runner = worker.vllm_config, worker.model_runner
    cache = runner.kv_cache_config
    modules = config.compilation_config.static_forward_context
    layers = {layer for group in cache.kv_cache_groups for layer in group.layer_names}
    views = Views(modules, layers, unresolved)
    allocations = []
    for place, tensor in enumerate(cache.kv_cache_tensors):
        storage = views.storage_of(tensor.layers)
        if storage is None:
            unresolved.append(f"cache.tensor_allocations.{place}.storage_id")
        allocations.append(
            {
                "storage_id": storage or UNRESOLVED,
                "size": tensor.size,
                "layers": list(tensor.layers),
                "offset": tensor.offset,
                "block_stride": tensor.block_stride,
                "layer_stride": tensor.layer_stride,
                "host_resident": tensor.host_resident,
            }
        )
    available = getattr(worker, "available_kv_cache_memory_bytes", None)
    # v1/worker/gpu_model_runner.py, of which the CPU's is a subclass, and v1/worker/gpu/model_runner.py
    sizes = getattr(runner, "_kernel_block_sizes", None) or getattr(runner, "kernel_block_sizes", None) or []
    if len(sizes) != len(cache.kv_cache_groups):
        unresolved.append("cache.kernel_block_size_tokens")
    return {
        "num_blocks": cache.num_blocks,
        "available_cache_bytes": None if available is None else int(available),
        "kv_cache_layout": cache.kv_cache_layout,
        "kv_tp_replicas": cache.kv_tp_replicas,
        "groups": [
            cache_group(group, group.layer_names, config, f"cache.groups.{place}", unresolved)
            for place, group in enumerate(cache.kv_cache_groups)
        ],
        "kernel_block_size_tokens": list(sizes),
        "layer_classes": {layer: type(modules[layer]).__name__ for layer in sorted(layers & modules.keys())},
        "storages": views.storages,
        "tensor_allocations": allocations,
        "layer_tensors": views.layer_tensors,
    }


def runtime(unresolved: list[str]) -> dict[str, Any]:
    """`Runtime` of this process: the pinned files as they lie beside the vLLM that it imported."""
    version = vllm.__version__.split("+")[0]
    record = {
        "version": version,
        "python_version": platform.python_version(),
        "torch_version": str(torch.__version__),
        "source_files": {},
    }
    adapter = ADAPTERS.get(version)
    if adapter is None:
        unresolved.append("runtime.source_files")
        return record | {"distribution": UNRESOLVED}
    root = Path(str(vllm.__file__)).parent.parent
    for name in read_pins(adapter):
        if (root / name).is_file():
            record["source_files"][name] = hashlib.sha256((root / name).read_bytes()).hexdigest()
        else:
            unresolved.append(f"runtime.source_files.{name}")
    return record | {"distribution": metadata.distribution(adapter.distribution).metadata["Name"]}


def loaded_model(config: Any, unresolved: list[str]) -> dict[str, Any]:
    """`LoadedModel` of a worker."""
    model = config.model_config
    files = {"config_sha256": Path(model.model) / "config.json", "sidecar_sha256": Path(model.model) / SIDECAR}
    try:
        quantization_config = plain(getattr(model.hf_config, "quantization_config", None))
    except TypeError:
        quantization_config = None
        unresolved.append("model.quantization_config")
    return {
        "model": model.model,
        "revision": model.revision,
        **{name: digest(read_json(file, name)) for name, file in files.items() if is_file(file)},
        "architectures": list(model.hf_config.architectures or ()),
        "model_type": model.hf_config.model_type,
        "dtype": plain(model.dtype),
        "quantization": plain(model.quantization),
        "quantization_config": quantization_config,
        "load_format": plain(config.load_config.load_format),
        "weights_bytes": _before_repacking.get("weights_bytes"),
    }


def recurrent_settings(version: str, cache: Any, specs: Iterable[KVCacheSpec]) -> dict[str, Any] | None:
    """`RecurrentCacheSettings` of a `CacheConfig` on vLLM 0.33.0 with a recurrent group, also inside a uniform one;
    None on every other launch."""
    recurrent = any(isinstance(layer, MambaSpec) for spec in specs for layer in iter_layer_specs(spec))
    if version != RECURRENT_SETTINGS_IN or not recurrent:
        return None
    return {name: plain(getattr(cache, name)) for name in RecurrentCacheSettings.model_fields}


def _attention_backends(runner: Any) -> Iterator[str]:
    for groups in runner.attn_groups:
        yield from (group.backend.__name__ for group in groups)


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def settings(worker: Any) -> dict[str, Any]:
    """`Settings` of a worker."""
    config = worker.vllm_config
    model, cache, scheduler = config.model_config, config.cache_config, config.scheduler_config
    parallel, offload = config.parallel_config, config.offload_config
    specs = [group.kv_cache_spec for group in worker.model_runner.kv_cache_config.kv_cache_groups]
    return {
        "max_model_len": model.max_model_len,
        "enforce_eager": model.enforce_eager,
        "cache_dtype": plain(cache.cache_dtype),
        "gpu_memory_utilization": float(cache.gpu_memory_utilization),
        "kv_cache_memory_bytes": cache.kv_cache_memory_bytes,
        "num_gpu_blocks_override": cache.num_gpu_blocks_override,
        "enable_prefix_caching": bool(cache.enable_prefix_caching),
        "recurrent": recurrent_settings(vllm.__version__.split("+")[0], cache, specs),
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "max_num_seqs": scheduler.max_num_seqs,
        "async_scheduling": bool(scheduler.async_scheduling),
        "enable_chunked_prefill": bool(scheduler.enable_chunked_prefill),
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
        "data_parallel_size": parallel.data_parallel_size,
        "prefill_context_parallel_size": parallel.prefill_context_parallel_size,
        "decode_context_parallel_size": parallel.decode_context_parallel_size,
        "enable_expert_parallel": parallel.enable_expert_parallel,
        "enable_eplb": parallel.enable_eplb,
        "moe_backend": plain(config.kernel_config.moe_backend),
        "attention_backends": list(dict.fromkeys(_attention_backends(worker.model_runner))),
        "offload_backend": plain(offload.offload_backend),
        "cpu_offload_gb": float(offload.uva.cpu_offload_gb),
        "speculative_config": _text(config.speculative_config),
        "kv_transfer_config": _text(config.kv_transfer_config),
        "initial_compilation": _before_repacking.get("compilation"),
        "compilation": compilation_settings(config),
    }


def hardware(worker: Any) -> dict[str, Any]:
    """`Hardware` of a worker's device."""
    device = worker.device.index or 0
    capability = current_platform.get_device_capability(device)
    return {
        "device_name": current_platform.get_device_name(device),
        "device_type": current_platform.device_type,
        "compute_capability": None if capability is None else capability.as_version_str(),
        "total_memory_bytes": current_platform.get_device_total_memory(device),
        "threads": torch.get_num_threads(),
    }


def worker_record(worker: Any) -> dict[str, Any]:
    """`WorkerRecord` of a worker of vLLM (v1/worker/worker_base.py), as plain values; null is absent."""
    config, unresolved = worker.vllm_config, list[str]()
    parallel = config.parallel_config
    return {
        "attempt_id": os.environ[ATTEMPT_ID],
        "dp_rank": parallel.data_parallel_rank,
        "tp_rank": worker.rank % parallel.tensor_parallel_size,
        "pp_rank": worker.rank // parallel.tensor_parallel_size,
        "runtime": runtime(unresolved),
        "model": loaded_model(config, unresolved),
        "settings": settings(worker),
        "hardware": hardware(worker),
        "cache": cache_memory(worker, unresolved),
        "unresolved_fields": unresolved,
    }


def scheduler_record(scheduler: Any) -> dict[str, Any]:
    """`SchedulerRecord` of vLLM's scheduler (v1/core/sched/scheduler.py), as plain values; null is absent."""
    unresolved: list[str] = []
    manager, cache = scheduler.kv_cache_manager, scheduler.kv_cache_config
    return {
        "attempt_id": os.environ[ATTEMPT_ID],
        "dp_rank": scheduler.parallel_config.data_parallel_rank,
        "runtime": runtime(unresolved),
        "launch": launch_facts(scheduler),
        "coordinator": type(manager.coordinator).__name__,
        "managers": [type(single).__name__ for single in manager.coordinator.single_type_managers],
        "num_blocks": cache.num_blocks,
        "initial_free_blocks": manager.block_pool.get_num_free_blocks(),
        "permanent_reserved_block_ids": [manager.block_pool.null_block.block_id],
        "watermark_blocks": manager.watermark_blocks,
        "block_size": scheduler.block_size,
        "hash_block_size": scheduler.hash_block_size,
        # `cache_config` learns it in the workers alone, which need not be this process (v1/worker/gpu_worker.py:865).
        "cache_hit_alignment_tokens": cache.cache_hit_alignment_tokens,
        "enable_prefix_caching": bool(scheduler.cache_config.enable_prefix_caching),
        "mamba_cache_mode": plain(scheduler.cache_config.mamba_cache_mode),
        "prefix_cache_retention_interval": cache.prefix_cache_retention_interval,
        "max_concurrency": scheduler.cache_config.kv_cache_max_concurrency,
        "max_num_scheduled_tokens": scheduler.max_num_scheduled_tokens,
        "max_num_running_reqs": scheduler.max_num_running_reqs,
        "max_model_len": scheduler.max_model_len,
        "groups": [
            cache_group(group, group.layer_names[:1], scheduler.vllm_config, f"groups.{place}", unresolved)
            for place, group in enumerate(cache.kv_cache_groups)
        ],
        "unresolved_fields": unresolved,
    }
