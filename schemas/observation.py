"""Probe records: what an engine's own processes say of the memory they hold."""

from typing import Annotated, Any, Literal

from pydantic import Field

from schemas.canonical import Strict
from schemas.points import NonNegative, Phase, Positive

PROBE_PROTOCOL = 1
"""Meaning of a probe record; raise it when the observers record something else under the same name."""


class CacheGroup(Strict):
    """One `KVCacheGroupSpec`: sizes in tokens and bytes; `spec` holds the fields of its spec class as text."""

    layer_names: tuple[str, ...]
    spec_type: str
    kind: str
    block_size_tokens: Positive
    spec_page_size_bytes: Positive
    dtype: str | None = None
    sliding_window: int | None = None
    mamba_cache_mode: str | None = None
    num_prefill_checkpoint_blocks: int | None = None
    prefill_checkpoint_alignment: int | None = None
    num_speculative_blocks: int | None = None


class TensorAllocation(Strict):
    """One `KVCacheTensor`: bytes. The page of layer l, block b starts at offset + l*layer_stride + b*block_stride."""

    size: int
    layers: tuple[str, ...]
    offset: int
    block_stride: int
    layer_stride: int


class LayerTensor(Strict):
    """The tensor bound to one layer: strides and offset in bytes."""

    storage_id: str
    storage_offset_bytes: int
    shape: tuple[int, ...]
    stride_bytes: tuple[int, ...]
    element_size_bytes: int


class Storage(Strict):
    """One backing allocation of the cache."""

    storage_id: str
    device: str
    size_bytes: int


class WorkerRecord(Strict):
    """What one worker rank holds after warm-up."""

    kind: Literal["worker"] = "worker"
    dp_rank: int
    tp_rank: int
    pp_rank: int
    runtime_version: str
    device_name: str
    total_memory_bytes: int
    threads: int
    weights_bytes: int
    dtype: str
    quantization: str | None = None
    model_revision: str | None = None
    max_model_len: int
    enforce_eager: bool
    cache_dtype: str
    enable_prefix_caching: bool
    max_num_batched_tokens: int
    max_num_seqs: int
    async_scheduling: bool
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    enable_expert_parallel: bool
    cudagraph_mode: str
    cudagraph_capture_sizes: tuple[int, ...] = ()
    num_blocks: Positive
    groups: Annotated[tuple[CacheGroup, ...], Field(min_length=1)]
    tensor_allocations: tuple[TensorAllocation, ...]
    storages: tuple[Storage, ...]
    layer_tensors: dict[str, tuple[LayerTensor, ...]]


class SchedulerRecord(Strict):
    """What one scheduler (one data-parallel rank) decides with."""

    kind: Literal["scheduler"] = "scheduler"
    dp_rank: int
    runtime_version: str
    num_blocks: Positive
    initial_free_blocks: NonNegative
    permanent_reserved_block_ids: tuple[int, ...]
    watermark_blocks: int
    block_size: Positive
    hash_block_size: Positive
    cache_hit_alignment_tokens: Positive
    enable_prefix_caching: bool
    mamba_cache_mode: str
    max_concurrency: float
    async_scheduling: bool
    max_num_scheduled_tokens: int
    max_num_running_reqs: int
    max_model_len: int
    groups: Annotated[tuple[CacheGroup, ...], Field(min_length=1)]


class ProbeRecord(Strict):
    """`probe/<deployment>-<digest>/<phase>.json`: all records of one launch, with an echo of that launch."""

    schema_version: Literal[1] = 1
    probe_digest: str
    phase: Phase
    launch: dict[str, Any]
    pins_sha256: str
    workers: tuple[WorkerRecord, ...]
    schedulers: tuple[SchedulerRecord, ...]
    unresolved_fields: tuple[str, ...] = ()
