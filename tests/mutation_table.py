"""What the judges let pass, and why. Whatever else passes fails the proof, and so does an entry that nothing needs."""

from typing import Any, NamedTuple

from launch_binding import MAY_DIFFER

JOURNAL = "repetitions.jsonl"
DYNAMO = "Dynamo's artifact"


class Accepted(NamedTuple):
    """Paths of a file, each with all below it where it ends in `**`, and why changes there pass.

    `sorts` are the sorts of changes: of a measured time another value passes, and a text does not.
    """

    file: str
    forgery: str
    sorts: str
    paths: tuple[str, ...]
    reason: str

    def covers(self, row: Any) -> bool:
        """Whether a row of the proof is one of these."""
        return (row.file, row.forgery) == (self.file, self.forgery) and self.concerns(row) and row.outcome != "crashed"

    def concerns(self, change: Any) -> bool:
        """Whether a mutant, or a row of them, is at one of the paths and of one of the sorts."""
        return change.sort in self.sorts.split() and any(matches(change.pattern, path) for path in self.paths)


def matches(pattern: str, path: str) -> bool:
    if not path.endswith("**"):
        return pattern == path
    stem = path.removesuffix("**")
    return pattern.startswith(stem) or pattern == stem.removesuffix(".")


DEFAULT = "Absent reads as the default, which is what stood there: the same document."


def cell_and_evidence() -> tuple[Accepted, ...]:
    optional = ("schema_version", "identity.schema_version", "identity.precision**", "identity.topology.**")
    return (
        Accepted("cell.json", "plain", "value", ("model",), "Where the model lies: it may have moved since."),
        Accepted("cell.json", "plain", "structure", (*optional, "points.schema_version"), DEFAULT),
        Accepted("evidence.json", "plain", "structure", ("schema_version", "drifting"), DEFAULT),
    )


def journal() -> tuple[Accepted, ...]:
    def free(sorts: str, paths: tuple[str, ...], reason: str) -> Accepted:
        return Accepted(JOURNAL, "derived", sorts, paths, reason)

    rank = "[].ranks[]."
    processes = ("workers[]", "scheduler")
    groups, model, times = f"{rank}engine.kv_cache.groups", f"{rank}engine.model.", f"{rank}repetitions[]."
    return (
        free(
            "value",
            (
                *(times + name for name in ("start_monotonic", "end_monotonic", "overhead_seconds")),
                f"{rank}seconds.**",
                f"{rank}engine_start_seconds",
            ),
            "A measured time: nothing but the engine's clock witnesses it. Its bounds are checked: order, parts and "
            "wholes, the times around it.",
        ),
        free(
            "value",
            ("[].run_id", "[].started_at", "[].completed_at"),
            "The name and dates of a run: nothing else says them. Form and order are checked.",
        ),
        free("type", (f"{rank}device_state",), "An empty object says what null says: the device was not asked."),
        free("value", (f"{rank}engine.threads.**",), "Thread settings of the machine: no cell fixes them."),
        free(
            "value type structure",
            (
                groups,
                *(f"{groups}[].{name}" for name in ("attention_chunk_size", "head_size", "non_causal")),
                *(f"{groups}[].{name}" for name in ("num_kv_heads", "sliding_window")),
                f"{model}architectures[]",
                f"{model}model",
                f"{model}model_type",
                f"{rank}engine.quantization.method",
            ),
            "What the engine made of the model, and where it lay: the cell has a digest of the config alone.",
        ),
        free(
            "structure",
            (
                *(f"{rank}runtime.{process}.{name}" for process in processes for name in ("kind", "unresolved_fields")),
                f"{rank}runtime.workers[].settings.initial_compilation.cudagraph_capture_sizes",
                f"{rank}runtime.workers[].settings.compilation.cudagraph_capture_sizes",
            ),
            DEFAULT,
        ),
        free(
            "value",
            tuple(f"{rank}runtime.workers[].{field}" for field in (*MAY_DIFFER, "hardware.total_memory_bytes")),
            "What a launch may have otherwise than the accepted one: the place of the model, whose config has a "
            "digest; the memory of a machine, and threads that the cell does not fix.",
        ),
        free(
            "value",
            (f"{rank}warmups[].first.num_prefill_requests",),
            "How many seeds of one span share its first step is the scheduler's choice, within their tokens.",
        ),
    )


def imported() -> tuple[Accepted, ...]:
    def free(sorts: str, paths: tuple[str, ...], reason: str) -> Accepted:
        return Accepted(DYNAMO, "derived", sorts, paths, reason)

    attention, groups, parallel = "engine.attention.", "engine.kv_cache.groups[]", "engine.parallel."
    return (
        free(
            "value",
            (
                *("run_id", "timing.started_at", "timing.completed_at", "timing.benchmark_elapsed_seconds"),
                "capacity.common.grid_invariants_digest",
            ),
            "When it ran, the name of the run, and a digest of what is not in it: nothing else in the artifact says "
            "them. Form, order and bounds are checked.",
        ),
        free(
            "value",
            ("kvwarm.stages[].build_seconds",),
            "A measured time that enters no value: nothing witnesses it.",
        ),
        free(
            "value",
            ("kvwarm.dataset.path", "kvwarm.dataset.sha256", "kvwarm.dataset.conversations"),
            "The text that seeded the cache is not in the artifact.",
        ),
        free(
            "value",
            ("measurement_protocol.content_seed", "measurement_protocol.synthetic_pool_tag"),
            "Prompts of random tokens are derived from them again; those cut from a text are not, without the text.",
        ),
        free(
            "value",
            (
                "config.output_path",
                "config.timeout",
                "config.prefill_max_new_token_samples",
                "config.prefill_max_kv_read_token_samples",
                "config.decode_max_kv_read_token_samples",
                "config.decode_max_batch_size_samples",
                "config.prefix_max_batch_size_samples",
            ),
            "Where the file lay, a limit that was not reached, and the size of a generated grid: the points are the "
            "frozen ones all the same.",
        ),
        free(
            "value",
            (f"{parallel}all2all_backend",),
            "How experts on several GPUs exchange tokens; the topology is checked.",
        ),
        free(
            "value type structure",
            (
                *(f"{attention}{name}" for name in ("flash_attn_version", "mla_prefill_backend_requested")),
                f"{attention}use_trtllm_attention",
                f"{attention}backend_per_kind",
                f"{attention}backend_requested",
                f"{attention}indexer_kv_dtype",
                f"{attention}indexer_kv_dtype_configured",
                "engine.kv_cache.kv_cache_layout",
                f"{groups}",
                f"{groups}.attention_chunk_size",
                f"{groups}.head_size",
                f"{groups}.kv_quant_mode",
                f"{groups}.non_causal",
                f"{groups}.num_kv_heads",
                f"{groups}.sliding_window",
                f"{groups}.type",
                "engine.model.architectures**",
                "engine.model.model_type",
                "engine.quantization.checkpoint_config",
            ),
            "What the engine made of the model: the artifact does not hold the model's config, and the cell its digest "
            "alone.",
        ),
        free(
            "value type",
            ("engine.versions.dynamo", "engine.versions.python", "engine.versions.vllm_build_commit"),
            "Versions that no cell fixes; the engine's own is checked.",
        ),
        free("value", ("engine.model.model",), "Where the model lay on the machine that measured."),
        free(
            "value",
            (
                "measurement_protocol.preparation.prefill_real_seed",
                "measurement_protocol.preparation.decode_real_kv_warmup",
            ),
            "An option of the other phase.",
        ),
    )


ACCEPTED: tuple[Accepted, ...] = (*cell_and_evidence(), *journal(), *imported())


def open_journal() -> tuple[Accepted, ...]:
    checkpoint = "[].ranks[].engine.serving_config.mamba_prefill_checkpoint."
    reason = "Types of both fields, and the alignment that the cell's own rule takes."
    return (Accepted(JOURNAL, "derived", "value type", (f"{checkpoint}blocks", f"{checkpoint}alignment"), reason),)


def open_cell() -> tuple[Accepted, ...]:
    reason = "pydantic takes true for a literal 1."
    versions = ("schema_version", "identity.schema_version", "identity.topology.pp", "identity.topology.cp")
    return (
        Accepted("cell.json", "plain", "type", versions, reason),
        Accepted("evidence.json", "plain", "type", ("schema_version",), reason),
    )


def open_imported() -> tuple[Accepted, ...]:
    def unchecked(sorts: str, paths: tuple[str, ...], reason: str) -> Accepted:
        return Accepted(DYNAMO, "derived", sorts, paths, reason)

    return (
        unchecked(
            "type structure",
            ("engine.parallel.all2all_backend", "config.timeout"),
            "Types of both: text, and a whole number of seconds.",
        ),
        unchecked(
            "type",
            ("iteration_groups[].point.partition.high_count",),
            "True for a count of 1: rows and groups are compared as mappings there.",
        ),
        unchecked(
            "value",
            ("config.collect_imbalanced", "config.hybrid_live_state"),
            "True where a point is imbalanced; false where no group holds recurrent states.",
        ),
        unchecked(
            "value type",
            (
                "engine.parallel.enable_expert_parallel",
                "engine.scheduler.enable_chunked_prefill",
                "engine.scheduler.long_prefill_token_threshold",
                "engine.kv_cache.enable_prefix_caching",
                "engine.graph.cudagraph_capture_sizes",
            ),
            "The topology's `moe_ep`; what the point rules assume (one chunk, cached prefixes); the sizes of the "
            "cudagraph block.",
        ),
        unchecked(
            "value structure",
            (
                "kvwarm.giant_kv_threshold",
                "measurement_protocol.preparation.giant_kv_threshold",
                "measurement_protocol.preparation.giant_kv_repeats",
                "kvwarm.stages[]",
                "kvwarm.stages",
            ),
            "Threshold and repeats stand in both blocks and must agree where both are; a stage for each seeded point.",
        ),
    )


OPEN: tuple[Accepted, ...] = (*open_cell(), *open_journal(), *open_imported())
