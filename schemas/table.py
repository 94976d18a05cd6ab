"""The published pair: columns and order of `fpm_forward_perf.parquet`, and its sidecar (schema 7)."""

from typing import Annotated, Literal

import pyarrow as pa
from pydantic import Field

from schemas.canonical import Strict

SCHEMA_NAME: Literal["aic_fpm_forward_perf"] = "aic_fpm_forward_perf"
SCHEMA_VERSION: Literal[7] = 7
COORDINATES: Literal["iteration_totals_balanced_v1"] = "iteration_totals_balanced_v1"
PARTITION = "balanced_v1"
MEDIAN_POLICY: Literal["vllm_native_fpm_prefix_seed_median_v1"] = "vllm_native_fpm_prefix_seed_median_v1"
"""The one policy of the consumers that says what the values are: a median over ten measurements after five warm-ups."""
SINGLE_POLICY: Literal["dynamo_native_single_sample_v1"] = "dynamo_native_single_sample_v1"
TablePolicy = Literal[
    "vllm_native_fpm_prefix_seed_median_v1",
    "dynamo_native_single_sample_v1",
    "per_row_single_sample_or_median_of_3",
]
MEDIAN_OF_3 = "kvwarm_median_of_3"
PER_ROW_POLICY: Literal["per_row_single_sample_or_median_of_3"] = "per_row_single_sample_or_median_of_3"
"""What Dynamo's own values are: single samples, or (each row says which) the median of three decode steps."""
STATE_PROTOCOL = "glm53flash_prefix_cache_real_seed_v1"
TIMING_BOUNDARY = "dynamo_vllm_instrumented_scheduler_fpm_wall_time"
"""Names that the consumers demand with the median policy: state from prefix-cache seeds of real tokens, and the
scheduler's wall time. They are the consumers' names for a protocol; the model of a row is in `model_path`."""

_STRING, _INT, _BOOL, _DOUBLE = pa.string(), pa.int64(), pa.bool_(), pa.float64()

KEY_COLUMNS = (
    ("cell_id", _STRING),
    ("model_path", _STRING),
    ("system", _STRING),
    ("backend", _STRING),
    ("backend_version", _STRING),
    ("weight_quantization", _STRING),
    ("gemm_quant_mode", _STRING),
    ("moe_quant_mode", _STRING),
    ("fmha_quant_mode", _STRING),
    ("comm_quant_mode", _STRING),
    ("kv_cache_dtype", _STRING),
    ("tp", _INT),
    ("pp", _INT),
    ("dp", _INT),
    ("moe_tp", _INT),
    ("moe_ep", _INT),
    ("cp", _INT),
    ("moe_backend", _STRING),
    ("attention_backend", _STRING),
    ("enable_wideep", _BOOL),
    ("enable_eplb", _BOOL),
    ("model_config_sha256", _STRING),
    ("execution_profile", _STRING),
    ("engram_residency", _STRING),
    ("input_modality", _STRING),
    ("workload_kind", _STRING),
    ("batch_size", _INT),
    ("total_prefill_tokens", _INT),
    ("total_kv_read_tokens", _INT),
    ("partition_policy", _STRING),
)
"""The row key: no two rows agree in all of these."""

VALUE_COLUMNS = (
    ("latency_ms", _DOUBLE),
    ("kv_seed_regime", _STRING),
    ("runtime_backend_version", _STRING),
    ("fmha_resolution", _STRING),
    ("parallel_strategy", _STRING),
    ("global_warmup_iterations", _INT),
    ("warmup_repeats", _INT),
    ("measurement_repeats", _INT),
    ("measurement_policy", _STRING),
    ("state_protocol", _STRING),
    ("timing_boundary", _STRING),
    ("source_plan_sha256", _STRING),
    ("collector_attempt_id", _STRING),
    ("runtime_run_id", _STRING),
    ("runtime_grid_digest", _STRING),
)

ROW_SCHEMA = pa.schema([pa.field(name, kind) for name, kind in KEY_COLUMNS + VALUE_COLUMNS])

LEGACY_IDENTITY = {
    "model_config_sha256": "",
    "execution_profile": "full",
    "engram_residency": "none",
    "input_modality": "text",
}
"""The execution identity of a model that no consumer binds to its config."""


class SeedClassification(Strict):
    """The cells (`cell_id`, sorted) with decode rows over synthetic KV, and the policy that lets them in."""

    policy: Literal["dense_full_attention_v1"] = "dense_full_attention_v1"
    cells: Annotated[tuple[str, ...], Field(min_length=1)]


class Sidecar(Strict):
    """`fpm_forward_perf.metadata.json`; `kv_seed_classification` if such rows exist, and only then."""

    schema_name: Literal["aic_fpm_forward_perf"] = SCHEMA_NAME
    schema_version: Literal[7] = SCHEMA_VERSION
    coordinate_system: Literal["iteration_totals_balanced_v1"] = COORDINATES
    measurement_policy: TablePolicy
    warmup_repeats: int
    measurement_repeats: int
    system: str
    backend: str
    backend_version: str
    row_count: int
    parquet_sha256: str
    source_plan_sha256: tuple[str, ...]
    collector_attempt_ids: tuple[str, ...]
    runtime_run_ids: tuple[str, ...]
    runtime_grid_digests: tuple[str, ...]
    model_paths: tuple[str, ...]
    aic_revision: str
    kv_seed_classification: SeedClassification | None = None
