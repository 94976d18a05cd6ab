"""The blocks of a Dynamo rank artifact that `schemas.native` leaves as mappings, strictly read."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from schemas.canonical import digest
from schemas.native import Int, RankArtifact, ScheduledRequests, Struct

Count = Annotated[int, Meta(ge=0, le=2**53)]
Positive = Annotated[int, Meta(ge=1, le=2**53)]
Words = Annotated[str, Meta(min_length=1)]
Hex64 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
GraphMode = Literal["NONE", "PIECEWISE", "FULL"]

T = TypeVar("T", bound=Struct)


class Config(Struct, frozen=True):
    """What the scheduler was told (2.3); `timeout` in seconds."""

    mode: Literal["prefill", "decode", "agg"]
    randomize_kda_state: bool
    hybrid_live_state: bool
    warmup_iterations: Count
    output_path: Words
    timeout: Annotated[float, Meta(gt=0)]
    prefill_max_new_token_samples: Annotated[int, Meta(ge=2)]
    prefill_max_kv_read_token_samples: Annotated[int, Meta(ge=2)]
    decode_max_kv_read_token_samples: Annotated[int, Meta(ge=2)]
    decode_max_batch_size_samples: Annotated[int, Meta(ge=2)]
    prefix_max_batch_size_samples: Positive
    max_batch_size: Positive | None
    collect_imbalanced: bool


class LimitsBlock(Struct, frozen=True):
    max_num_scheduled_tokens: Positive
    max_num_running_reqs: Positive
    max_model_len: Positive
    block_size: Positive
    num_gpu_blocks: Positive
    configured_max_batch_size: Positive
    feasible_max_batch_size: Count


class Synchronization(Struct, frozen=True):
    enabled: bool
    coordinator_rank: Literal[0]
    port: Annotated[int, Meta(ge=1, le=65535)] | None


class RecurrentState(Struct, frozen=True):
    initialization: Literal["unchanged", "random"]
    policy: Literal["uniform-request-layer-rank-v1"] | None
    uniform_bound: float | None


class SyntheticPrompts(Struct, frozen=True):
    mode: Literal["salted_random", "zeros"]
    vocab_size: Positive


class CommonCapacity(Struct, frozen=True):
    """Minimum over the ranks."""

    max_model_len: Positive
    max_num_scheduled_tokens: Positive
    max_num_running_reqs: Positive
    usable_blocks_without_watermark: Count
    usable_blocks_with_watermark: Count
    grid_invariants_digest: Hex64
    kvwarm_eligible: bool


class Capacity(Struct, frozen=True):
    common: CommonCapacity | None


class Cudagraph(Struct, frozen=True):
    """The engine's resolved graphs; sizes in tokens."""

    mode: Literal["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]
    prefill_mode: GraphMode
    decode_mode: GraphMode
    max_capture_size: Count
    capture_sizes: list[Positive]
    prefill_capture_sizes: list[Positive]
    decode_capture_sizes: list[Positive]


class Dataset(Struct, frozen=True):
    path: Words
    sha256: Hex64
    collection_pool: Literal["conversation_sha256_even"]
    conversations: Positive


class Stage(Struct, frozen=True):
    """One chain of real KV that was built, or that failed; `depth` in tokens of a request."""

    batch: Positive
    depth: Positive
    build_seconds: Annotated[float, Meta(ge=0)] | UnsetType = UNSET
    benchmark_id: Positive | UnsetType = UNSET
    total_kv_read_tokens: Positive | UnsetType = UNSET
    failed: Literal[True] | UnsetType = UNSET
    vanished: Any | UnsetType = UNSET
    pool_shortfall: Any | UnsetType = UNSET
    soft_timeout: Any | UnsetType = UNSET
    context_overshoot: Any | UnsetType = UNSET
    group_fallback: Literal[True] | UnsetType = UNSET


class CapacityFallback(Struct, frozen=True):
    batch: Positive
    depth: Positive
    required_blocks: Count
    usable_blocks: Count
    benchmark_id: Positive | UnsetType = UNSET
    total_kv_read_tokens: Positive | UnsetType = UNSET


class Kvwarm(Struct, frozen=True):
    """How decode points got real KV (5); the counters count executed decode points, discarded replicas too."""

    enabled: bool
    warm_eligible: bool | None
    skip_reason: Words | None
    dataset: Dataset | None
    stages: list[Stage]
    points_real_kv: Count
    points_fake_fallback: Count
    giant_kv_threshold: Count
    giant_kv_repeats: Positive
    points_gate_skipped: Count | UnsetType = UNSET
    capacity_fallbacks: list[CapacityFallback] | UnsetType = UNSET
    initialization_strategy: Literal["native_exact_context"] | UnsetType = UNSET


class ExecutionEvidence(Struct, frozen=True):
    schema_version: Literal[1]
    sample_field: Literal["benchmark_sample"]
    warmup_field: Literal["warmup_evidence"]
    forward_index_scope: Literal["rank_process"]
    timing_clock: Literal["process_local_monotonic"]
    cudagraph_source: Literal["ModelRunnerOutput.cudagraph_stats"]
    warmup_scope: Literal["request_completion_and_existing_shape_validation"]


class ProtocolPreparation(Struct, frozen=True):
    warmup_iterations: Count
    prefill_real_seed: bool
    decode_real_kv_warmup: bool
    giant_kv_threshold: Count
    giant_kv_repeats: Positive


class Protocol(Struct, frozen=True):
    """`measurement_protocol` of Dynamo 1.7 (6.1)."""

    schema_version: Literal[1]
    content_identity: Literal["coordinate_rank_slot_v1"]
    content_seed: str
    synthetic_content: Literal["random", "sharegpt", "sharegpt_chain", "zeros"]
    synthetic_pool_tag: str
    prompt_hash_encoding: Literal["uint32_le"]
    independent_repetitions: Literal[1]
    timing_metric: Literal["scheduler_wall_time"]
    execution_evidence: ExecutionEvidence
    input_evidence_scope: Literal["injected_prompt_token_ids"]
    unobserved: list[Words]
    preparation: ProtocolPreparation


class Validation(Struct, frozen=True):
    """`scope` and `failed_dp_rank` stand in records of replicas only."""

    status: Literal["not_performed", "passed", "failed"]
    reason: Words | None
    scope: Literal["attention_dp_group"] | UnsetType = UNSET
    failed_dp_rank: Count | UnsetType | None = UNSET


class WarmupRecord(Struct, frozen=True):
    """One warm-up (6.5); forwards `forward_index_start` to `forward_index_end`, the end not included."""

    kind: Literal["global", "eager_shape", "real_prefix_seed", "real_prefix_shape"]
    requested_shape: dict[str, Any]
    forward_index_start: Count
    completed_points_before: Count
    status: Literal["running", "completed", "failed"]
    validation: Validation
    forward_index_end: Count | None
    observed_forward_count: Count | None
    first_scheduled_requests: ScheduledRequests | None
    last_scheduled_requests: ScheduledRequests | None


class Ledger(Struct, frozen=True):
    """`warmup_evidence` of Dynamo 1.7."""

    status: Literal["recorded", "unavailable"]
    records: list[WarmupRecord]


class AttentionBlock(Struct, frozen=True):
    """`resolution` and the resolved names are filled in by nobody: artifacts are never rewritten."""

    backend_requested: Words | None
    backend_per_kind: dict[str, Any]
    mla_prefill_backend_requested: Words | None
    flash_attn_version: Int | None
    use_trtllm_attention: bool | None
    indexer_kv_dtype: Words | None
    indexer_kv_dtype_configured: Words | None
    backend_resolved: None
    mla_prefill_backend_resolved: None
    resolution: Literal["pending_worker_probe"]
    indexer: Any | UnsetType = UNSET


class CacheGroup(Struct, frozen=True):
    """A key that is absent differs from one that is null."""

    type: Words
    dtype: Any | UnsetType = UNSET
    head_size: Positive | UnsetType = UNSET
    num_kv_heads: Positive | UnsetType = UNSET
    block_size: Positive | UnsetType = UNSET
    kv_quant_mode: Words | UnsetType = UNSET
    sliding_window: Positive | UnsetType | None = UNSET
    attention_chunk_size: Positive | UnsetType | None = UNSET
    non_causal: bool | UnsetType = UNSET
    specs: list["CacheGroup"] | UnsetType = UNSET


class KvCacheBlock(Struct, frozen=True):
    cache_dtype: Words
    block_size: Positive
    enable_prefix_caching: bool
    groups: list[CacheGroup]
    kv_cache_layout: Words | UnsetType = UNSET


class QuantizationBlock(Struct, frozen=True):
    method: Words | None
    checkpoint_config: Any
    quant_config_class: Words | None


class SchedulerBlock(Struct, frozen=True):
    max_num_batched_tokens: Positive
    max_num_seqs: Positive
    async_scheduling: bool
    enable_chunked_prefill: bool
    long_prefill_token_threshold: Count


class ModelBlock(Struct, frozen=True):
    dtype: Words
    model_type: Words
    architectures: list[Words]
    model: Words


class ParallelBlock(Struct, frozen=True):
    data_parallel_size: Positive
    data_parallel_rank: Count
    tensor_parallel_size: Positive
    pipeline_parallel_size: Positive
    prefill_context_parallel_size: Positive
    decode_context_parallel_size: Positive
    enable_expert_parallel: bool
    enable_eplb: bool
    all2all_backend: Words | None
    eplb_config: dict[str, Any] | None


class GraphBlock(Struct, frozen=True):
    """Graph settings before the engine resolved them; `Cudagraph` is what came of it."""

    cudagraph_mode: Words | None
    cudagraph_capture_sizes: list[Positive] | None
    resolution: Literal["pre_resolution"]


class Versions(Struct, frozen=True):
    vllm: Words
    vllm_build_commit: Words | None
    dynamo: Words
    python: Annotated[str, Meta(pattern=r"^3\.\d+\.\d+\S*$")]


class Engine(Struct, frozen=True):
    """Provenance at start-up (7)."""

    attention: AttentionBlock
    kv_cache: KvCacheBlock
    quantization: QuantizationBlock
    scheduler: SchedulerBlock
    model: ModelBlock
    parallel: ParallelBlock
    speculative: dict[str, Any] | None
    graph: GraphBlock
    versions: Versions
    resolved: None
    resolution: Literal["pending_worker_probe"]
    capture_error: Any | UnsetType = UNSET


class Blocks(NamedTuple):
    """One rank's blocks, read."""

    config: Config
    limits: LimitsBlock
    synchronization: Synchronization
    recurrent_state: RecurrentState
    synthetic_prompts: SyntheticPrompts
    capacity: Capacity
    cudagraph: Cudagraph
    kvwarm: Kvwarm | None
    protocol: Protocol | None
    ledger: Ledger | None
    engine: Engine | None


FIELDS: dict[str, tuple[str, type[Struct]]] = {
    "config": ("config", Config),
    "limits": ("limits", LimitsBlock),
    "synchronization": ("synchronization", Synchronization),
    "recurrent_state": ("recurrent_state", RecurrentState),
    "synthetic_prompts": ("synthetic_prompts", SyntheticPrompts),
    "capacity": ("capacity", Capacity),
    "cudagraph": ("cudagraph", Cudagraph),
    "kvwarm": ("kvwarm", Kvwarm),
    "protocol": ("measurement_protocol", Protocol),
    "ledger": ("warmup_evidence", Ledger),
    "engine": ("engine", Engine),
}
"""Field of `Blocks` -> the artifact's key and what must stand there."""


def leaves(groups: list[CacheGroup]) -> Iterator[CacheGroup]:
    """The groups themselves, those of a uniform type one by one."""
    for group in groups:
        if group.specs is UNSET:
            yield group
        else:
            yield from leaves(group.specs)


def read_block(cls: type[T], value: Any, field: str) -> T | str:
    """`value` as `cls`, strictly (a bool is no int, no unknown key), or the finding."""
    try:
        return msgspec.convert(value, type=cls)
    except msgspec.ValidationError as error:
        return f"{field}: expected {cls.__name__}, found: {error}"


def read_blocks(artifact: RankArtifact) -> Blocks | list[str]:
    """The blocks of one artifact, or what is wrong with them; a block that is absent is None."""
    read: dict[str, Any] = {}
    findings = []
    for name, (field, cls) in FIELDS.items():
        value = getattr(artifact, field)
        block = None if value is UNSET else read_block(cls, value, field)
        if isinstance(block, str):
            findings.append(block)
        read[name] = block
    return findings or Blocks(**read)


def unequal(where: str, wanted: dict[str, tuple[Any, Any]]) -> Iterator[str]:
    """A line for each field whose value (expected, found) differs, in type too: True is no 1."""
    for field, (expected, found) in wanted.items():
        if not same(expected, found):
            yield f"{where}{field}: expected {_word(expected)}, found {_word(found)}"


def same(expected: Any, found: Any) -> bool:
    if isinstance(expected, dict | list) and isinstance(found, dict | list):
        return digest(expected) == digest(found)
    return type(expected) is type(found) and bool(expected == found)


def _word(value: Any) -> Any:
    return "nothing" if value is UNSET else value
