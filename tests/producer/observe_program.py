"""Observes a worker and a scheduler of a release without a model: its configuration, its specs, real tensors.

observe_program.py VERSION: prints both records, and what no record can hold of a spec, as one line of JSON. Of a
release whose Python files alone are here no engine starts, but every attribute that an observer reads is its own.
"""

import dataclasses
import json
import os
import sys
from types import SimpleNamespace

if sys.argv[1] == "0.33.0":  # only its Python files are here: its platform cannot be found out
    import vllm.platforms as platforms
    from vllm.platforms.cpu import CpuPlatform

    platforms._current_platform = CpuPlatform()

import oracle
import torch
import vllm.v1.kv_cache_interface as interface
from cells import frozen_cell
from vllm.config import CUDAGraphMode, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import base_loader
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    UniformTypeKVCacheSpecs,
)

from producer import observe_memory
from producer.engine import Rank, engine_arguments
from producer.nodes import ATTEMPT_ID
from profiles import group, profile
from schemas.observation import LayerSpec

BLOCKS, BLOCK, PAGE = 4, 128, 65536
STATE = MambaSpec(
    block_size=BLOCK,
    shapes=((3, 256), (2, 64, 64)),
    dtypes=(torch.bfloat16, torch.float32),
    page_size_padded=PAGE,
    mamba_cache_mode="align",
)
ATTENTION = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)


def cache() -> KVCacheConfig:
    """A group of recurrent layers, bundled, over the pages of an attention layer."""
    states = {"state.0": STATE, "state.1": STATE}
    bundle = UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs=states)
    size, regions = 2 * BLOCKS * PAGE, {"layer_stride": BLOCKS * PAGE, "block_stride": PAGE}
    return KVCacheConfig(
        num_blocks=BLOCKS,
        kv_cache_tensors=[
            KVCacheTensor(size=size, layers=[*states], **regions),
            KVCacheTensor(size=size, layers=["attention"], **regions),
        ],
        kv_cache_groups=[
            KVCacheGroupSpec([*states], bundle),
            KVCacheGroupSpec(["attention"], ATTENTION),
        ],
        kv_cache_layout="LBHNC",
    )


def modules() -> dict[str, object]:
    """Layers with their views of one storage, as the engine binds them."""
    raw = torch.zeros(2 * BLOCKS * PAGE, dtype=torch.int8)

    def view(dtype: torch.dtype, offset: int, *shape: int) -> torch.Tensor:
        size = torch.empty((), dtype=dtype).element_size()
        strides = torch.empty(shape).stride()
        return torch.as_strided(raw.view(dtype), (BLOCKS, *shape), (PAGE // size, *strides), offset // size)

    found: dict[str, object] = {}
    for layer in range(2):
        start = layer * BLOCKS * PAGE
        states = (view(torch.bfloat16, start, 3, 256), view(torch.float32, start + 1536, 2, 64, 64))
        found[f"state.{layer}"] = SimpleNamespace(kv_cache=states)
    found["attention"] = SimpleNamespace(kv_cache=view(torch.bfloat16, 0, 2, BLOCK, 128))
    found["a layer without a cache"] = SimpleNamespace()
    return found


def worker(config: object) -> SimpleNamespace:
    runner = SimpleNamespace(
        kv_cache_config=cache(),
        attn_groups=[[SimpleNamespace(backend=FullAttentionSpec)]],
        kernel_block_sizes=[BLOCK, BLOCK],
    )
    config.compilation_config.static_forward_context = modules()
    return SimpleNamespace(vllm_config=config, model_runner=runner, rank=1, device=torch.device("cpu"))


def load(config: object) -> None:
    """The end of loading, by the name that the loader calls: one layer of 12 weights, and graphs of two kinds."""
    compilation = config.compilation_config
    compilation.cudagraph_mode, compilation.cudagraph_capture_sizes = CUDAGraphMode.FULL_AND_PIECEWISE, [4, 1, 2]
    compilation.max_cudagraph_capture_size = 4
    model = torch.nn.Linear(4, 3, bias=False, dtype=torch.bfloat16)
    with set_current_vllm_config(config):
        base_loader.process_weights_after_loading(model, config.model_config, torch.device("cpu"))


def lower(config: object) -> None:
    """What an attention backend does that cannot be captured whole."""
    config.compilation_config.cudagraph_mode = CUDAGraphMode.PIECEWISE
    config.compilation_config.cudagraph_capture_sizes = [1, 2]
    config.compilation_config.max_cudagraph_capture_size = 2


def unknown_fields() -> dict[str, list[str]]:
    """Class of a spec -> its fields that no record has."""
    specs = [each for each in vars(interface).values() if isinstance(each, type) and issubclass(each, KVCacheSpec)]
    names = {each.__name__: {field.name for field in dataclasses.fields(each)} for each in specs}
    return {name: sorted(own - LayerSpec.model_fields.keys()) for name, own in names.items()}


launch = frozen_cell(
    topology={"tp": 2}, engine={"kv_cache_memory_bytes": 1 << 28, "mamba_cache_mode": "align"}
).identity
os.environ[ATTEMPT_ID] = "a" * 32
config = EngineArgs(**engine_arguments("config/models/qwen3-next-tiny", launch, Rank())).create_engine_config()
load(config)
lower(config)
scheduler = oracle.scheduler_of(profile(group("MambaSpec", BLOCK), group("FullAttentionSpec", BLOCK)))
for part in ("cache_config", "parallel_config", "scheduler_config"):
    setattr(scheduler, part, getattr(config, part))
scheduler.vllm_config = config
records = [observe_memory.worker_record(worker(config)), observe_memory.scheduler_record(scheduler)]
print(json.dumps([*records, unknown_fields()]))
