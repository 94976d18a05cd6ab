"""Probe records: what an engine's own processes say of the memory they hold, and of the settings they run with.

Names are vLLM's. An attribute that an engine's class does not have is absent, one that could not be read as a plain
value stands in `unresolved_fields`; nothing is guessed.
"""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from schemas.canonical import Strict
from schemas.points import MAX_INTEGER, Count, Phase, Size

PROBE_PROTOCOL = 2
"""Meaning of a probe record; raise it when the observers record something else under the same name."""

Integer = Annotated[int, Field(ge=-MAX_INTEGER, le=MAX_INTEGER)]
Real = Annotated[float, Field(gt=-MAX_INTEGER, lt=MAX_INTEGER)]
"""No setting is larger, and an integer that is too large for `Integer` is not read as a rounded float."""
Plain = bool | Integer | Real | str | None


class Observed(Strict):
    """Base of all records. Built at first use: whoever parses the Snakefile wants `PROBE_PROTOCOL` alone."""

    model_config = ConfigDict(defer_build=True)


class Runtime(Observed):
    """The engine that a process imported: `source_files` is path below site-packages -> sha256 of each pinned file."""

    distribution: str
    version: str
    python_version: str
    torch_version: str
    source_files: dict[str, str]


class LoadedModel(Observed):
    """The model in a worker's memory.

    `config_sha256` is that of the checkpoint's config.json and `sidecar_sha256` that of its hf_quant_config.json, as
    `ModelConfig` has them; `weights_bytes` are this rank's parameters before the backend repacked any.
    """

    model: str
    revision: str | None = None
    config_sha256: str
    sidecar_sha256: str | None = None
    architectures: tuple[str, ...]
    model_type: str
    dtype: str
    quantization: str | None = None
    quantization_config: dict[str, Any] | None = None
    load_format: str
    weights_bytes: Size


class CompilationSettings(Observed):
    """`CompilationConfig` at one moment; sizes in tokens, rising, and none where nothing is captured."""

    mode: str
    backend: str
    cudagraph_mode: str
    cudagraph_capture_sizes: tuple[Size, ...] = ()
    max_cudagraph_capture_size: Count | None = None


class RecurrentCacheSettings(Observed):
    """The six settings that decide on recurrent state, of `CacheConfig`: on vLLM 0.33.0 with a recurrent group alone
    (docs/probing.md)."""

    block_size: Size
    mamba_cache_mode: str
    mamba_block_size: Size | None = None
    prefix_match_unit: Plain = None
    mamba_cache_dtype: str
    mamba_ssm_cache_dtype: str


class Settings(Observed):
    """What a worker runs with after the platform and the backends have had their say.

    `initial_compilation` is as it stood while weights were loaded, before the attention backends could lower it.
    """

    max_model_len: Size
    enforce_eager: bool
    cache_dtype: str
    gpu_memory_utilization: float
    kv_cache_memory_bytes: Count | None = None
    num_gpu_blocks_override: Count | None = None
    enable_prefix_caching: bool
    recurrent: RecurrentCacheSettings | None = None
    max_num_batched_tokens: Size
    max_num_seqs: Size
    async_scheduling: bool
    enable_chunked_prefill: bool
    tensor_parallel_size: Size
    pipeline_parallel_size: Size
    data_parallel_size: Size
    prefill_context_parallel_size: Size
    decode_context_parallel_size: Size
    enable_expert_parallel: bool
    enable_eplb: bool
    moe_backend: str
    attention_backends: tuple[str, ...]
    offload_backend: str
    cpu_offload_gb: float
    speculative_config: Plain = None
    kv_transfer_config: Plain = None
    initial_compilation: CompilationSettings
    compilation: CompilationSettings


class Hardware(Observed):
    """One rank's device; `compute_capability` is that of a CUDA device, and `threads` those of the process."""

    device_name: str
    device_type: str
    compute_capability: str | None = None
    total_memory_bytes: Size
    threads: Size


class LayerSpec(Observed):
    """One layer's `KVCacheSpec`: its class and the fields that the class has; sizes in tokens and bytes.

    Source: vllm/v1/kv_cache_interface.py (0.32.0 and 0.33.0).
    """

    spec_type: str
    block_size: Size
    page_size_bytes: Size
    page_size_padded: Size | None = None
    block_stride_alignment: str | None = None
    dcp_sharded: bool
    is_draft: bool | None = None
    # AttentionSpec and its kinds
    num_kv_heads: Size | None = None
    head_size: Size | None = None
    head_size_v: Count | None = None
    dtype: str | None = None
    kv_quant_mode: str | None = None
    num_head_slots: Size | None = None
    max_tp_shards: Size | None = None
    state_content_bytes: Size | None = None
    tokens_per_state: str | None = None
    sliding_window: Size | None = None
    attention_chunk_size: Size | None = None
    extra_retained_tokens: Count | None = None
    non_causal: bool | None = None
    # MLAAttentionSpec, SlidingWindowMLASpec
    cache_dtype_str: str | None = None
    alignment: Size | None = None
    topk_buffer_width: Size | None = None
    model_version: str | None = None
    cache_role: str | None = None
    is_index_group_leader: bool | None = None
    non_causal_multi_token_decode: bool | None = None
    bounded_replay: bool | None = None
    # MambaSpec
    shapes: tuple[tuple[Size, ...], ...] | None = None
    dtypes: tuple[str, ...] | None = None
    mamba_type: str | None = None
    mamba_cache_mode: str | None = None
    num_speculative_blocks: Count | None = None
    num_prefill_checkpoint_blocks: Count | None = None
    prefill_checkpoint_alignment: Size | None = None
    num_heads: Size | None = None
    tp_replicated: bool | None = None


class CacheGroup(Observed):
    """One `KVCacheGroupSpec`.

    `spec_type`, `block_size_tokens` and `spec_page_size_bytes` are those of the group's own spec, which may bundle
    layers (`UniformTypeKVCacheSpecs`). `layer_specs` has every layer's in a worker; a scheduler keeps the first one
    alone. `startup_blocks_per_request` is what the engine reserves for one request of `max_model_len` tokens when it
    reports its concurrency: `max_memory_usage_bytes` / page, rounded up.
    """

    layer_names: Annotated[tuple[str, ...], Field(min_length=1)]
    spec_type: str
    block_size_tokens: Size
    spec_page_size_bytes: Size
    startup_blocks_per_request: Size
    layer_specs: dict[str, LayerSpec]
    is_eagle_group: bool
    host_resident: bool
    role: str


class TensorAllocation(Observed):
    """One `KVCacheTensor`: bytes. The page of layer l, block b starts at offset + l*layer_stride + b*block_stride."""

    storage_id: str
    size: Size
    layers: Annotated[tuple[str, ...], Field(min_length=1)]
    offset: Count
    block_stride: Size
    layer_stride: Size
    host_resident: bool


class LayerTensor(Observed):
    """A tensor bound to one layer; its first axis counts blocks (of the kernel's size). Strides and offset in bytes."""

    storage_id: str
    storage_offset_bytes: Count
    shape: Annotated[tuple[Count, ...], Field(min_length=1)]
    stride_bytes: Annotated[tuple[Count, ...], Field(min_length=1)]
    dtype: str
    element_size_bytes: Size


class Storage(Observed):
    """One backing allocation of the cache."""

    storage_id: str
    device: str
    size_bytes: Size


class CacheMemory(Observed):
    """One worker's KV cache.

    `available_cache_bytes` is what the worker's memory profiling left for the cache, absent where nothing was profiled.
    `kernel_block_size_tokens` is per group, in a group whose blocks no kernel splits the block itself; `layer_classes`
    is layer -> class of its module.
    """

    num_blocks: Size
    available_cache_bytes: Size | None = None
    kv_cache_layout: str | None = None
    kv_tp_replicas: Size
    groups: Annotated[tuple[CacheGroup, ...], Field(min_length=1)]
    kernel_block_size_tokens: tuple[Size | None, ...]
    layer_classes: dict[str, str]
    storages: Annotated[tuple[Storage, ...], Field(min_length=1)]
    tensor_allocations: Annotated[tuple[TensorAllocation, ...], Field(min_length=1)]
    layer_tensors: dict[str, tuple[LayerTensor, ...]]


class WorkerRecord(Observed):
    """What one worker rank holds after warm-up."""

    kind: Literal["worker"] = "worker"
    attempt_id: str
    dp_rank: Count
    tp_rank: Count
    pp_rank: Count
    runtime: Runtime
    model: LoadedModel
    settings: Settings
    hardware: Hardware
    cache: CacheMemory
    unresolved_fields: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return f"worker dp{self.dp_rank} tp{self.tp_rank} pp{self.pp_rank}"


class SchedulerRecord(Observed):
    """What one scheduler (one data-parallel rank) decides with.

    `launch` holds what `producer.launch_checks.launch_facts` asks, by vLLM's own names. `managers` are the classes of
    the single-type managers, in the order of the groups.
    """

    kind: Literal["scheduler"] = "scheduler"
    attempt_id: str
    dp_rank: Count
    runtime: Runtime
    launch: dict[str, Plain | tuple[Integer, ...]]
    coordinator: str
    managers: tuple[str, ...]
    num_blocks: Size
    initial_free_blocks: Count
    permanent_reserved_block_ids: tuple[Count, ...]
    watermark_blocks: Count
    block_size: Size
    hash_block_size: Size
    cache_hit_alignment_tokens: Size
    enable_prefix_caching: bool
    mamba_cache_mode: str
    prefix_cache_retention_interval: Count | None = None
    max_concurrency: float
    max_num_scheduled_tokens: Size
    max_num_running_reqs: Size
    max_model_len: Size
    groups: Annotated[tuple[CacheGroup, ...], Field(min_length=1)]
    unresolved_fields: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return f"scheduler dp{self.dp_rank}"


class EngineRecords(Observed):
    """The records of all processes of one launch; a cell keeps them for each of its sessions."""

    workers: tuple[WorkerRecord, ...]
    schedulers: tuple[SchedulerRecord, ...]


class ProbeRecord(EngineRecords):
    """`probe/<deployment>-<digest>/<phase>.json`: all records of one launch, with an echo of that launch.

    `attempt_id` is the launch's own; a record of another one does not belong here.
    """

    schema_version: Literal[2] = 2
    probe_digest: str
    attempt_id: str
    phase: Phase
    launch: dict[str, Any]
    pins_sha256: str
