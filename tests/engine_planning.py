"""A worker's cache planned anew by the engine that is first on the path, from the specs of a record alone.

Reads a `CacheMemory` as JSON, prints what that engine's own planning makes of its specs. Run as a program, because the
Python files of another release go first on the path of a process of its own.
"""

import dataclasses
import json
import sys
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import torch
import vllm
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateDtypeCalculator, MambaStateShapeCalculator
from vllm.v1 import kv_cache_interface as interface
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.mla.flashinfer_mla_sparse import FlashInferMLASparseTRTLLMBackend
from vllm.v1.attention.backends.mla.indexer import Glm5NextIndexerBackend
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec, KVQuantMode, SparseCacheRole, create_kv_cache_views
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.worker.utils import AttentionGroup, customize_attention_spec, select_common_block_size

try:
    from vllm.v1.core import kv_cache_planning as planning
except ImportError:
    planning = kv_cache_utils  # 0.32.0

DERIVED = ("spec_type", "page_size_bytes")
"""Of a record's spec, what its class computes."""


def engine_spec(record: dict[str, Any]) -> KVCacheSpec:
    """The engine's spec of a record, without its derived sizes."""
    fields = {name: value for name, value in record.items() if name not in DERIVED}
    for name in ("dtype", "dtypes"):
        if name in fields:
            found = fields[name]
            fields[name] = (
                getattr(torch, found) if isinstance(found, str) else tuple(getattr(torch, one) for one in found)
            )
    if "shapes" in fields:
        fields["shapes"] = tuple(map(tuple, fields["shapes"]))
    if "tokens_per_state" in fields:
        tokens = Fraction(fields["tokens_per_state"])
        fields["tokens_per_state"] = int(tokens) if tokens.denominator == 1 else tokens
    kinds: dict[str, Any] = {"kv_quant_mode": KVQuantMode.__getitem__, "cache_role": SparseCacheRole}
    kinds |= {"mamba_type": MambaAttentionBackendEnum.__getitem__, "block_stride_alignment": _alignment}
    for name, of in kinds.items():
        if name in fields:
            fields[name] = of(fields[name])
    spec_class = getattr(interface, record["spec_type"])
    known = spec_class.__dataclass_fields__
    # 0.32.0 has no width of the sparse layers' buffer, which lies beside the cache.
    later = {"topk_buffer_width"}
    absent = {name: value for name, value in fields.items() if name not in {*known, *later} and value is not False}
    assert not absent, f"{record['spec_type']} of vllm {vllm.__version__} has no {absent}"
    spec: KVCacheSpec = spec_class(**{name: value for name, value in fields.items() if name in known})
    return spec


def _alignment(text: str) -> Any:
    return int(text) if text.isdecimal() else MultipleOf(int(text.removeprefix("MultipleOf(").removesuffix(")")))


def engine_config(layout: KVCacheLayout, arguments: dict[str, Any]) -> Any:
    """The settings that planning asks for: of real classes nothing but these would be used."""
    return SimpleNamespace(
        cache_config=SimpleNamespace(
            block_size=arguments["block_size"],
            enable_prefix_caching=True,
            mamba_cache_mode=arguments["mamba_cache_mode"],
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=0,
            prefix_match_unit=None,
            get_resolved_kv_cache_layout=lambda: layout,
        ),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        model_config=SimpleNamespace(max_model_len=arguments["max_model_len"]),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        attention_config=SimpleNamespace(hisparse_config=None),
        kv_transfer_config=None,
        speculative_config=None,
        max_in_flight_tokens=arguments["max_num_tokens"],
    )


def shown(config: KVCacheConfig) -> list[dict[str, Any]]:
    return [
        {
            "layer_names": list(group.layer_names),
            "spec_type": type(group.kv_cache_spec).__name__,
            "block_size_tokens": group.kv_cache_spec.block_size,
            "spec_page_size_bytes": group.kv_cache_spec.page_size_bytes,
        }
        for group in config.kv_cache_groups
    ]


BACKENDS = {SparseCacheRole.SPARSE: FlashInferMLASparseTRTLLMBackend, SparseCacheRole.INDEXER: Glm5NextIndexerBackend}


def asked_alignments(specs: dict[str, KVCacheSpec]) -> dict[str, str]:
    """What the backends of a latent and of an index ask of the stride between blocks."""
    found = {}
    for spec in specs.values():
        role = getattr(spec, "cache_role", None)
        if role is not None:
            asked = customize_attention_spec(BACKENDS[role], dataclasses.replace(spec, block_stride_alignment=None))
            found[role.value] = str(asked.block_stride_alignment)
    return found


def _bound(view: torch.Tensor, spec: KVCacheSpec) -> torch.Tensor:
    """An index is bound in its kernel's pages (`map_kv_cache_to_kernel_blocks`), all others in whole blocks."""
    if getattr(spec, "cache_role", None) is not SparseCacheRole.INDEXER:
        return view
    group = AttentionGroup(Glm5NextIndexerBackend, [], spec, 0)
    group.kernel_block_size = select_common_block_size(spec.block_size, [Glm5NextIndexerBackend], [spec])
    return group.map_kv_cache_to_kernel_blocks(view)


def views(config: KVCacheConfig, layout: KVCacheLayout, specs: dict[str, KVCacheSpec]) -> dict[str, Any]:
    """The engine's own view of each layer's pages, as its layer is given it; no memory is taken."""
    raw = torch.empty(config.kv_cache_tensors[0].size, dtype=torch.int8, device="meta")
    found = {}
    for tensor in config.kv_cache_tensors:
        made = create_kv_cache_views(raw, specs[tensor.layers[0]], config.num_blocks, layout, tensor)
        for name, page in zip(tensor.layers, made, strict=True):
            view = _bound(page, specs[name])
            found[name] = {
                "storage_offset_bytes": view.storage_offset() * view.element_size(),
                "shape": list(view.shape),
                "stride_bytes": [stride * view.element_size() for stride in view.stride()],
            }
    return found


def main() -> None:
    arguments = json.load(sys.stdin)
    cache = arguments["cache"]
    layout = KVCacheLayout[cache["kv_cache_layout"]]
    config = engine_config(layout, arguments)
    register_all_kvcache_specs(config)
    records = {name: spec for group in cache["groups"] for name, spec in group["layer_specs"].items()}
    specs = {name: engine_spec(records[name]) for name in arguments["order"]}
    groups = planning.get_kv_cache_groups(config, dict(specs))
    cache_config = planning.get_kv_cache_config_from_groups(config, groups, cache["available_cache_bytes"])
    scheduler = kv_cache_utils.generate_scheduler_kv_cache_config([cache_config])
    managers = [KVCacheSpecRegistry.get_manager_class(group.kv_cache_spec) for group in scheduler.kv_cache_groups]
    written = {
        "vllm": vllm.__version__,
        "file": planning.__file__,
        "num_blocks": cache_config.num_blocks,
        "pages": {name: spec.page_size_bytes for name, spec in specs.items()},
        "groups": shown(cache_config),
        "scheduler_groups": shown(scheduler),
        "startup": [
            -(-group.kv_cache_spec.max_memory_usage_bytes(config) // group.kv_cache_spec.page_size_bytes)
            for group in scheduler.kv_cache_groups
        ],
        "max_concurrency": kv_cache_utils.get_max_concurrency_for_kv_cache_config(config, scheduler),
        "block_sizes": kv_cache_utils.resolve_kv_cache_block_sizes(scheduler, config),
        "tp_replicas": planning.kv_cache_groups_tp_replicas(groups, arguments["tensor_parallel"]),
        "managers": [manager.__name__ for manager in managers if manager is not None],
        "tensors": [
            {field: getattr(tensor, field) for field in ("size", "layers", "offset", "block_stride", "layer_stride")}
            for tensor in cache_config.kv_cache_tensors
        ],
        "alignments": asked_alignments(specs),
        "views": views(cache_config, layout, specs),
        "kda_shapes": MambaStateShapeCalculator.kda_state_shape(arguments["tensor_parallel"], 64, 128),
        "kda_dtypes": [
            str(dtype).removeprefix("torch.")
            for dtype in MambaStateDtypeCalculator.kda_state_dtype(torch.bfloat16, "auto", "auto")
        ],
    }
    print(json.dumps(written))


if __name__ == "__main__":
    main()
