"""Caches that vLLM's own code plans, allocates and binds, as a worker records them, and changes of them.

python tests/engine_caches.py     the version of vLLM that it finds, and the findings of each cache
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import torch
import vllm
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import AttentionGroup, allocate_kv_cache

from schemas.observation import CacheMemory, LayerSpec

from cache_placement import placement_findings

try:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups
except ImportError:  # before 0.33.0
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups

FULL = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.bfloat16)
WINDOW = SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.bfloat16, sliding_window=64)
SMALL = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)
LATENT = MLAAttentionSpec(block_size=32, num_kv_heads=1, head_size=24, dtype=torch.bfloat16)
INDEXER = MLAAttentionSpec(
    block_size=32,
    num_kv_heads=1,
    head_size=12,
    dtype=torch.uint8,
    tokens_per_state=4,
    cache_role=SparseCacheRole.INDEXER,
    block_stride_alignment=MultipleOf(8),
)
PAIRS = replace(INDEXER, tokens_per_state=2)
# The live hybrid on the CPU: convolution and recurrent state of Qwen3-Next in pages of the attention's 131,072 bytes.
STATE = MambaSpec(
    block_size=256,
    shapes=((3, 512), (4, 64, 64)),
    dtypes=(torch.bfloat16, torch.float32),
    page_size_padded=131_072,
    mamba_cache_mode="align",
)
WIDE = FullAttentionSpec(block_size=256, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
TAIL = CircularBufferSpec(block_size=4, num_kv_heads=2, head_size=12, head_size_v=0, dtype=torch.bfloat16)


def group(specs: dict[str, KVCacheSpec]) -> KVCacheGroupSpec:
    """A cache group of these layers, bundled as the engine does when their specs are not equal."""
    first = next(iter(specs.values()))
    if all(spec == first for spec in specs.values()):
        return KVCacheGroupSpec(list(specs), first)
    return KVCacheGroupSpec(list(specs), UniformTypeKVCacheSpecs(block_size=first.block_size, kv_cache_specs=specs))


def layers(name: str, spec: KVCacheSpec, count: int) -> dict[str, KVCacheSpec]:
    return {f"{name}.{index}": spec for index in range(count)}


def recorded_spec(spec: KVCacheSpec) -> LayerSpec:
    """A spec as a worker records it: the fields of its dataclass that a record has."""
    values = {field.name: getattr(spec, field.name) for field in fields(spec)}
    values |= {"spec_type": type(spec).__name__, "page_size_bytes": spec.page_size_bytes}
    text = {
        name: str(value).removeprefix("torch.")
        for name, value in values.items()
        if name in ("dtype", "tokens_per_state", "block_stride_alignment", "mamba_type", "cache_role", "kv_quant_mode")
        and value is not None
    }
    values |= text
    if "dtypes" in values:
        values["dtypes"] = [str(dtype).removeprefix("torch.") for dtype in values["dtypes"]]
    return LayerSpec.model_validate_json(json.dumps(values))


def bound(spec: KVCacheSpec, view: torch.Tensor, kernel_pages: int | None) -> list[torch.Tensor]:
    """What the layers' own `bind_kv_cache` makes of the view that the engine hands them."""
    module = SimpleNamespace(
        get_state_shape=lambda: spec.shapes,
        get_state_dtype=lambda: spec.dtypes,
        _vllm_config=SimpleNamespace(kernel_config=SimpleNamespace(enable_jit_warmup=False)),
        kv_cache=view,
    )
    if kernel_pages is not None:
        own = AttentionGroup(SimpleNamespace, [], spec, 0, kernel_block_size=kernel_pages)
        view = own.map_kv_cache_to_kernel_blocks(view)
    if isinstance(spec, MambaSpec):
        MambaBase.bind_kv_cache(module, view)
    elif isinstance(spec, MLAAttentionSpec):
        MLAAttention.bind_kv_cache(module, view)
    return list(module.kv_cache) if isinstance(module.kv_cache, tuple) else [module.kv_cache]


def engine_cache(
    groups: Sequence[KVCacheGroupSpec],
    layout: str,
    blocks: int = 5,
    kernel_blocks: Sequence[int] | None = None,
    kernel_pages: dict[KVCacheSpec, int] | None = None,
) -> CacheMemory:
    """A cache that vLLM plans for so many blocks, allocates and binds.

    Memory is torch's meta device: storages have their sizes and tensors their strides, and no byte is taken.
    `kernel_blocks` are tokens of each group, `kernel_pages` those of a spec whose backend takes smaller ones.
    """
    config = SimpleNamespace(
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: KVCacheLayout[layout],
            num_gpu_blocks_override=blocks,
            prefix_cache_retention_interval=None,
        ),
    )
    plan = get_kv_cache_config_from_groups(config, list(groups), 0)
    views = allocate_kv_cache(plan, torch.device("meta"), KVCacheLayout[layout], kernel_blocks and list(kernel_blocks))
    specs = {
        layer: spec.kv_cache_specs[layer] if isinstance(spec, UniformTypeKVCacheSpecs) else spec
        for own, spec in ((own, own.kv_cache_spec) for own in groups)
        for layer in own.layer_names
    }
    tensors = {
        layer: bound(specs[layer], view, (kernel_pages or {}).get(specs[layer])) for layer, view in views.items()
    }
    (size,) = {tensor.untyped_storage().nbytes() for views in tensors.values() for tensor in views}
    record = {
        "num_blocks": plan.num_blocks,
        "available_cache_bytes": size,
        "kv_cache_layout": layout,
        "kv_tp_replicas": 1,
        "groups": [
            {
                "layer_names": own.layer_names,
                "spec_type": type(own.kv_cache_spec).__name__,
                "block_size_tokens": own.kv_cache_spec.block_size,
                "spec_page_size_bytes": own.kv_cache_spec.page_size_bytes,
                "startup_blocks_per_request": 1,
                "layer_specs": {layer: recorded_spec(specs[layer]).model_dump() for layer in own.layer_names},
                "is_eagle_group": own.is_eagle_group,
                "host_resident": own.host_resident,
                "role": own.role.value,
            }
            for own in groups
        ],
        "kernel_block_size_tokens": kernel_blocks or [own.kv_cache_spec.block_size for own in groups],
        "layer_classes": dict.fromkeys(specs, "Layer"),
        "storages": [{"storage_id": "storage0", "device": "cpu", "size_bytes": size}],
        "tensor_allocations": [
            {
                "storage_id": "storage0",
                "size": tensor.size,
                "layers": tensor.layers,
                "offset": tensor.offset,
                "block_stride": tensor.block_stride,
                "layer_stride": tensor.layer_stride,
                "host_resident": tensor.host_resident,
            }
            for tensor in plan.kv_cache_tensors
        ],
        "layer_tensors": {
            layer: [
                {
                    "storage_id": "storage0",
                    "storage_offset_bytes": tensor.storage_offset() * tensor.element_size(),
                    "shape": list(tensor.shape),
                    "stride_bytes": [stride * tensor.element_size() for stride in tensor.stride()],
                    "dtype": str(tensor.dtype).removeprefix("torch."),
                    "element_size_bytes": tensor.element_size(),
                }
                for tensor in views
            ]
            for layer, views in tensors.items()
        },
    }
    return CacheMemory.model_validate_json(json.dumps(record))


def glm_groups() -> list[KVCacheGroupSpec]:
    """GLM-5.3-Flash at TP 4: 9, 9, 8 and 8 KDA layers, 11 indexers with 11 latents, 11 tails; a latent page of 2,176
    tokens of 512 bytes, 544 pooled states of 132 bytes, and a block of 13,516,800 bytes."""
    kda = MambaSpec(
        block_size=2176,
        shapes=((3, 3072), (8, 128, 128)),
        dtypes=(torch.bfloat16, torch.float32),
        page_size_padded=2176 * 512,
        mamba_cache_mode="align",
        num_prefill_checkpoint_blocks=1,
        prefill_checkpoint_alignment=16,
    )
    latent = MLAAttentionSpec(
        block_size=2176, num_kv_heads=1, head_size=512, dtype=torch.uint8, block_stride_alignment=16_384
    )
    indexer = MLAAttentionSpec(
        block_size=2176,
        num_kv_heads=1,
        head_size=132,
        dtype=torch.uint8,
        tokens_per_state=4,
        cache_role=SparseCacheRole.INDEXER,
        block_stride_alignment=MultipleOf(256),
    )
    tail = CircularBufferSpec(block_size=4, num_kv_heads=2, head_size=128, head_size_v=0, dtype=torch.bfloat16)
    attention = {}
    for index in range(11):
        attention |= {f"indexer.{index}": indexer, f"latent.{index}": latent}
    states = [group(layers(f"kda{place}", kda, count)) for place, count in enumerate((9, 9, 8, 8))]
    return [group(attention), *states, group(layers("tail", tail, 11))]


def glm_cache() -> CacheMemory:
    groups = glm_groups()
    indexer = groups[0].kv_cache_spec.kv_cache_specs["indexer.0"]
    return engine_cache(groups, "BLHNC", 13_697, kernel_pages={indexer: 128})


LIVE = {
    "one group, heads first": lambda: engine_cache([group(layers("full", FULL, 3))], "LBHNC"),
    "one group, tokens first": lambda: engine_cache([group(layers("full", FULL, 3))], "LBNHC"),
    "one group, blocks outermost": lambda: engine_cache([group(layers("full", FULL, 3))], "BLHNC"),
    "one group, blocks outermost, tokens first": lambda: engine_cache([group(layers("full", FULL, 3))], "BLNHC"),
    "blocks that the kernel splits": lambda: engine_cache([group(layers("full", FULL, 3))], "LBHNC", 5, [4]),
    "split blocks, tokens first": lambda: engine_cache([group(layers("full", FULL, 3))], "LBNHC", 5, [8]),
    "groups over one another, the last one short": lambda: engine_cache(
        [group(layers("full", FULL, 3)), group(layers("a", WINDOW, 3)), group(layers("b", WINDOW, 2))], "LBHNC"
    ),
    "the same with blocks outermost": lambda: engine_cache(
        [group(layers("full", FULL, 3)), group(layers("a", WINDOW, 3)), group(layers("b", WINDOW, 2))], "BLHNC"
    ),
    "recurrent states beside attention": lambda: engine_cache(
        [group(layers("a", STATE, 1)), group(layers("b", STATE, 1)), group(layers("full", WIDE, 1))], "LBHNC", 64
    ),
    "recurrent states, blocks outermost": lambda: engine_cache(
        [group(layers("a", STATE, 3)), group(layers("full", WIDE, 2))], "BLNHC", 64
    ),
    "a latent without its axis of heads": lambda: engine_cache([group(layers("latent", LATENT, 3))], "LBNHC", 7, [8]),
    "two specs in a group, layers outermost": lambda: engine_cache(
        [group(layers("full", FULL, 2) | layers("small", SMALL, 2))], "LBHNC"
    ),
    "two specs in a group and a short one, blocks outermost": lambda: engine_cache(
        [group(layers("index", INDEXER, 2) | layers("latent", LATENT, 2)), group(layers("tail", TAIL, 3))], "BLHNC"
    ),
    "an indexer in its kernel's pages": lambda: engine_cache(
        [group(layers("index", INDEXER, 2) | layers("latent", LATENT, 2)), group(layers("tail", TAIL, 3))],
        "BLHNC",
        kernel_pages={INDEXER: 8},
    ),
    "an indexer in its kernel's pages of one state": lambda: engine_cache(
        [group(layers("index", INDEXER, 2) | layers("latent", LATENT, 2))], "BLHNC", kernel_pages={INDEXER: 4}
    ),
    "an indexer of two tokens a state, in its kernel's pages": lambda: engine_cache(
        [group(layers("index", PAIRS, 2) | layers("latent", LATENT, 2))], "BLHNC", kernel_pages={PAIRS: 8}
    ),
    "GLM-5.3-Flash": glm_cache,
}


def findings(cache: CacheMemory, change: Callable[[dict[str, Any]], Any]) -> list[str]:
    document = json.loads(cache.model_dump_json())
    change(document)
    return list(placement_findings(CacheMemory.model_validate_json(json.dumps(document))))


def at(*path: str | int, value: Any) -> Callable[[dict[str, Any]], None]:
    """One value anew."""

    def changed(document: Any) -> None:
        for key in path[:-1]:
            document = document[key]
        document[path[-1]] = value

    return changed


SHORT = LIVE["groups over one another, the last one short"]()
"""Layers full.0 to 2, a.0 to 2 and b.0 to 1, a group each: 5 blocks of 3 pages of 1024 bytes, layer by layer."""

PACKED = LIVE["two specs in a group and a short one, blocks outermost"]()
"""Blocks of 3264 bytes: pages of index.0 and index.1 (96 bytes), latent.0 and latent.1 (1536), and in the same bytes
those of the other group, tail.0 to tail.2 (192)."""

PAGED = LIVE["an indexer in its kernel's pages"]()
SPLIT = LIVE["blocks that the kernel splits"]()
HYBRID = LIVE["recurrent states beside attention"]()


if __name__ == "__main__":
    print(
        json.dumps({name: list(placement_findings(make())) for name, make in LIVE.items()} | {"vllm": vllm.__version__})
    )
