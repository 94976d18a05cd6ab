"""What a worker's record says of its engine, settings and device, against what it was launched as.

Its model is checked in model_checks, its cache in cache_groups and cache_placement; what must be equal over ranks and
phases in probe_checks.
"""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from typing import Any

from producer.adapters import RECURRENT_SETTINGS_IN, Adapter, adapter_of, read_pins
from producer.engine import Launch
from producer.record import RECURRENT
from schemas.launch import Limits
from schemas.observation import (
    CompilationSettings,
    LayerSpec,
    RecurrentCacheSettings,
    Runtime,
    Settings,
    WorkerRecord,
)
from schemas.quantization import KV_REASONS
from schemas.request import Request, ResolvedDeployment

from model_checks import model_findings, precision_findings
from record_differences import differ

CACHE_DTYPES = {"bfloat16": ("auto", "bfloat16"), "half": ("float16",), "fp8": ("fp8", "fp8_e4m3", "fp8_ds_mla")}
"""Label of the KV cache -> the engine settings whose cache elements it names, under a bfloat16 model."""

DEFAULT_MEMORY_UTILIZATION = 0.92
"""`gpu_memory_utilization` of an engine that was given bytes instead (0.32.0 and 0.33.0, config/cache.py)."""

LEAST_STEP_WITHOUT_CHUNKS = 2048
"""`SchedulerConfig.DEFAULT_MAX_NUM_BATCHED_TOKENS` (0.32.0, config/scheduler.py)."""

DEFAULT_GRAPH_MODE = "FULL_AND_PIECEWISE"
"""`cudagraph_mode` of a launch that names none (0.32.0 and 0.33.0, config/vllm.py, optimization level 2)."""

ALLOWED_DOWNGRADES = {
    "FULL": ("FULL_AND_PIECEWISE", "FULL_DECODE_ONLY"),
    "FULL_AND_PIECEWISE": ("PIECEWISE", "NONE", "FULL_DECODE_ONLY"),
    "FULL_DECODE_ONLY": ("PIECEWISE", "NONE"),
    "PIECEWISE": ("NONE",),
}
"""Graph mode of a launch -> what may be left of it.

Of attention backends one step each: an engine that lowers FULL has a backend that can do decode steps, and lowers no
further (0.32.0 and 0.33.0, config/compilation.py `resolve_cudagraph_mode_and_sizes`). A model that cannot be captured
in pieces loses those alone (`without_piecewise`, 0.33.0, config/compilation.py:80)."""

COMPILATION_MODES = {"cpu": ("DYNAMO_TRACE_ONCE",), "cuda": ("VLLM_COMPILE", "NONE")}
"""Device -> `CompilationMode` of a launch that is not eager; NONE with breakable graphs (0.33.0, config/vllm.py)."""

MEMORY_TOLERANCE = 0.1
"""How far a device's memory may be from its data sheet, which rounds, and may mean GiB by GB: 7 % more."""

CPU_LISTS = re.compile(r"\d+(-\d+)?([,|]\d+(-\d+)?)*")
"""CPUs of each worker, such as `0-3,8|4-7`."""


@cache
def _pins(adapter: Adapter) -> Mapping[str, str]:
    return read_pins(adapter)


def runtime_findings(adapter: Adapter, runtime: Runtime) -> Iterator[str]:
    """The engine is the adapter's release, each pinned source file of it and no other."""
    yield from differ(
        {
            "runtime.distribution": (adapter.distribution, runtime.distribution),
            "runtime.version": (adapter.version, runtime.version),
        }
    )
    pins, found = _pins(adapter), runtime.source_files
    for name in sorted(pins.keys() | found.keys()):
        if pins.get(name) != found.get(name):
            expected = pins.get(name, "no such pin")
            yield f"runtime.source_files.{name}: expected {expected}, found {found.get(name, 'no digest')}"


def step_tokens(device: str, limits: Limits, chunked: bool) -> int:
    """Tokens of one step. The CPU platform takes chunks away from MLA, and then raises the budget to a whole request
    (0.32.0, platforms/cpu.py:511-529)."""
    if chunked or device != "cpu":
        return limits.max_num_tokens
    return max(limits.max_model_len, LEAST_STEP_WITHOUT_CHUNKS)


def chunk_findings(device: str, prefix_caching: bool, chunked: bool) -> Iterator[str]:
    """The CPU platform switches both off, or none (0.32.0, platforms/cpu.py:525)."""
    if device == "cpu" and chunked != prefix_caching:
        yield f"expected {prefix_caching}, as enable_prefix_caching, found {chunked}"


def settings_findings(device: str, launch: Launch, experts: bool, settings: Settings) -> Iterator[str]:
    """Limits, memory and parallel sizes as asked for, of a model with `experts` or without; nothing offloaded,
    speculated or transferred.

    Prefix caching and chunked prefill may be off: a platform does that, and planning refuses it.
    """
    limits, engine, topology = launch.limits, launch.engine, launch.topology
    yield from differ(
        {
            "settings.max_model_len": (limits.max_model_len, settings.max_model_len),
            "settings.enforce_eager": (engine.enforce_eager, settings.enforce_eager),
            "settings.gpu_memory_utilization": (
                engine.gpu_memory_utilization or DEFAULT_MEMORY_UTILIZATION,
                settings.gpu_memory_utilization,
            ),
            "settings.kv_cache_memory_bytes": (engine.kv_cache_memory_bytes, settings.kv_cache_memory_bytes),
            "settings.num_gpu_blocks_override": (None, settings.num_gpu_blocks_override),
            "settings.max_num_batched_tokens": (
                step_tokens(device, limits, settings.enable_chunked_prefill),
                settings.max_num_batched_tokens,
            ),
            "settings.max_num_seqs": (limits.max_batch_size, settings.max_num_seqs),
            "settings.async_scheduling": (False, settings.async_scheduling),
            "settings.tensor_parallel_size": (topology.tp, settings.tensor_parallel_size),
            "settings.pipeline_parallel_size": (1, settings.pipeline_parallel_size),
            "settings.data_parallel_size": (topology.dp, settings.data_parallel_size),
            "settings.prefill_context_parallel_size": (1, settings.prefill_context_parallel_size),
            "settings.decode_context_parallel_size": (1, settings.decode_context_parallel_size),
            "settings.enable_expert_parallel": (topology.moe_ep > 1, settings.enable_expert_parallel),
            "expert axes (moe_tp, moe_ep)": ((topology.moe_tp, topology.moe_ep), _expert_axes(experts, settings)),
            "settings.enable_eplb": (False, settings.enable_eplb),
            "settings.moe_backend": ("auto", settings.moe_backend),
            "settings.offload_backend": ("auto", settings.offload_backend),
            "settings.cpu_offload_gb": (0.0, settings.cpu_offload_gb),
            "settings.speculative_config": (None, settings.speculative_config),
            "settings.kv_transfer_config": (None, settings.kv_transfer_config),
        }
    )
    label = launch.precision.kv_cache
    dtypes = CACHE_DTYPES.get(label, ())
    if settings.cache_dtype not in dtypes:
        wanted = f"one of {dtypes}" if dtypes else f"a dtype of {label}, but {KV_REASONS[label]}"
        yield f"settings.cache_dtype: expected {wanted}, found {settings.cache_dtype!r}"
    chunked = settings.enable_chunked_prefill
    for line in chunk_findings(device, settings.enable_prefix_caching, chunked):
        yield f"settings.enable_chunked_prefill: {line}"
    backends = settings.attention_backends
    if not all(backends) or not backends or len(set(backends)) < len(backends):
        yield f"settings.attention_backends: expected backends, each once, found {backends}"


def _expert_axes(experts: bool, settings: Settings) -> tuple[int, int]:
    """Where the engine puts experts: over the whole width, or a part of each on every GPU of it."""
    width = settings.tensor_parallel_size * settings.data_parallel_size
    if not experts:
        return 1, 1
    return (1, width) if settings.enable_expert_parallel else (width, 1)


def asked_graph_mode(device: str, launch: Launch) -> str:
    """`cudagraph_mode` that the engine starts with: nothing is captured eagerly, or on the CPU."""
    engine = launch.engine
    if engine.enforce_eager or device == "cpu":
        return "NONE"
    asked = None if engine.graph is None else engine.graph.cudagraph_mode
    return asked or DEFAULT_GRAPH_MODE


def graph_findings(device: str, launch: Launch, settings: Settings) -> Iterator[str]:
    """The graph mode that was asked for, or what the attention backends may leave of it; sizes that fit."""
    asked, engine = asked_graph_mode(device, launch), launch.engine
    initial, final = settings.initial_compilation, settings.compilation
    modes = ("NONE",) if engine.enforce_eager else COMPILATION_MODES[device]
    if initial.mode not in modes:
        yield f"settings.initial_compilation.mode: expected {' or '.join(modes)}, found {initial.mode}"
    yield from differ(
        {
            "settings.initial_compilation.backend": ("inductor", initial.backend),
            "settings.initial_compilation.cudagraph_mode": (asked, initial.cudagraph_mode),
            "settings.compilation.mode": (initial.mode, final.mode),
            "settings.compilation.backend": (initial.backend, final.backend),
            "settings.compilation.max_cudagraph_capture_size": (
                initial.max_cudagraph_capture_size,
                final.max_cudagraph_capture_size,
            ),
        }
    )
    if initial.cudagraph_mode == "NONE" and initial.max_cudagraph_capture_size:
        found = initial.max_cudagraph_capture_size
        yield f"settings.initial_compilation.max_cudagraph_capture_size: expected 0 without graphs, found {found}"
    allowed = (asked, *ALLOWED_DOWNGRADES.get(asked, ()))
    if final.cudagraph_mode not in allowed:
        wanted = f"{' or '.join(allowed)} of a launch with {asked}"
        yield f"settings.compilation.cudagraph_mode: expected {wanted}, found {final.cudagraph_mode}"
    elif final.cudagraph_mode != "NONE" and final.cudagraph_capture_sizes != initial.cudagraph_capture_sizes:
        yield (
            f"settings.compilation.cudagraph_capture_sizes: expected {initial.cudagraph_capture_sizes} as while "
            f"loading, found {final.cudagraph_capture_sizes}"
        )
    fixed = None if engine.graph is None else engine.graph.capture_sizes
    most = settings.max_num_batched_tokens
    for name, compilation in (("initial_compilation", initial), ("compilation", final)):
        yield from _size_findings(f"settings.{name}", compilation, fixed, most)


def _size_findings(
    field: str, compilation: CompilationSettings, fixed: tuple[int, ...] | None, most: int
) -> Iterator[str]:
    """Capture sizes of one moment: the campaign's that fit into a step, or the engine's own."""
    sizes, largest = compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size
    place = f"{field}.cudagraph_capture_sizes"
    if compilation.cudagraph_mode == "NONE":
        if sizes:
            yield f"{place}: expected none with cudagraph_mode NONE, found {sizes}"
        return
    if not sizes or any(a >= b for a, b in pairwise(sizes)):
        yield f"{place}: expected rising sizes, found {sizes}"
        return
    if fixed is not None and sizes != (wanted := tuple(size for size in fixed if size <= most)):
        yield f"{place}: expected {wanted} of the campaign, found {sizes}"
    if sizes[-1] > most:
        yield f"{place}: expected at most the {most} tokens of a step, found {sizes[-1]}"
    if largest != sizes[-1]:
        yield f"{field}.max_cudagraph_capture_size: expected {sizes[-1]}, the last capture size, found {largest}"


def recurrent_specs(worker: WorkerRecord) -> list[LayerSpec]:
    """Specs of the layers with recurrent state, also inside a uniform group."""
    return [spec for group in worker.cache.groups for spec in group.layer_specs.values() if spec.spec_type == RECURRENT]


def recurrent_findings(worker: WorkerRecord) -> Iterator[str]:
    """The settings of recurrent state stand in the records of one release alone, and are those of the specs."""
    specs, found = recurrent_specs(worker), worker.settings.recurrent
    if worker.runtime.version != RECURRENT_SETTINGS_IN or not specs:
        if found is not None:
            why = f"without recurrent state on {RECURRENT_SETTINGS_IN}"
            yield f"settings.recurrent: expected none {why}, found those of {worker.runtime.version}"
        return
    if found is None:
        wanted = f"the cache settings of recurrent state on {RECURRENT_SETTINGS_IN}"
        yield f"settings.recurrent: expected {wanted}, found none"
        return
    for spec in dict.fromkeys(_shown(spec) for spec in specs):
        yield from _spec_findings(found, *spec)
    if found.mamba_cache_mode == "align" and not worker.settings.enable_prefix_caching:
        yield "settings.recurrent.mamba_cache_mode: expected none without prefix caching, found align"


def _shown(spec: LayerSpec) -> tuple[int, str | None, tuple[str, ...]]:
    return spec.block_size, spec.mamba_cache_mode, spec.dtypes or ()


def _spec_findings(
    found: RecurrentCacheSettings, block: int, mode: str | None, dtypes: tuple[str, ...]
) -> Iterator[str]:
    """Each setting against one spec. In align mode all groups have one block (0.33.0, platforms/interface.py:1107)."""
    expected: dict[str, tuple[Any, Any]] = {
        "mamba_cache_mode": (mode, found.mamba_cache_mode),
        "mamba_block_size": (block, found.mamba_block_size),
    }
    if mode == "align":
        expected["block_size"] = (block, found.block_size)
    if found.prefix_match_unit is not None:
        expected["prefix_match_unit"] = (block, found.prefix_match_unit)
    # A spec's first state is the convolution's, its last one the recurrence's.
    for field, dtype, held in (
        ("mamba_cache_dtype", found.mamba_cache_dtype, dtypes[:1]),
        ("mamba_ssm_cache_dtype", found.mamba_ssm_cache_dtype, dtypes[-1:]),
    ):
        if dtype != "auto":
            expected[field] = (held[0] if held else None, dtype)
    yield from differ({f"settings.recurrent.{field}": pair for field, pair in expected.items()})


def hardware_findings(request: Request, worker: WorkerRecord) -> Iterator[str]:
    """The device that the adapter's engine runs on, as the system's file describes it."""
    hardware, gpu = worker.hardware, request.system.gpu
    device = adapter_of(request.runtime_backend_version, "request").device
    yield from device_findings(device, worker)
    if device == "cuda":
        capability = f"{gpu.sm_version // 10}.{gpu.sm_version % 10}"
        yield from differ({"hardware.compute_capability": (capability, hardware.compute_capability)})
        if abs(hardware.total_memory_bytes - gpu.mem_capacity) > MEMORY_TOLERANCE * gpu.mem_capacity:
            wanted = f"{gpu.mem_capacity} of {request.system.name} within {MEMORY_TOLERANCE:.0%}"
            yield f"hardware.total_memory_bytes: expected {wanted}, found {hardware.total_memory_bytes}"
    yield from thread_findings(device, request.environment, worker)


def device_findings(device: str, worker: WorkerRecord) -> Iterator[str]:
    """A worker and its cache are on one kind of device."""
    hardware = worker.hardware
    yield from differ({"hardware.device_type": (device, hardware.device_type)})
    if device == "cpu":
        yield from differ(
            {
                "hardware.compute_capability": (None, hardware.compute_capability),
                "hardware.device_name": ("cpu", hardware.device_name),
            }
        )
    for index, storage in enumerate(worker.cache.storages):
        if storage.device.partition(":")[0] != device:
            yield f"cache.storages[{index}].device: expected one of {device}, found {storage.device}"
    if not hardware.device_name:
        yield "hardware.device_name: expected a name, found none"


def thread_findings(device: str, environment: Mapping[str, str], worker: WorkerRecord) -> Iterator[str]:
    """The threads that the environment fixes."""
    threads, found = expected_threads(device, environment), worker.hardware.threads
    if threads and found not in threads:
        wanted = " or ".join(str(count) for count in sorted(threads))
        yield f"hardware.threads: expected {wanted} of the campaign's environment, found {found}"


def expected_threads(device: str, environment: Mapping[str, str]) -> set[int]:
    """Threads that the environment fixes; empty when it fixes none.

    On the CPU each worker has as many as its part of `VLLM_CPU_OMP_THREADS_BIND` names CPUs, whatever OMP_NUM_THREADS
    says; `nobind` leaves that alone, `auto` counts the machine's (0.32.0, utils/ompmultiprocessing.py).
    """
    bind = environment.get("VLLM_CPU_OMP_THREADS_BIND", "auto")
    if device == "cpu" and bind != "nobind":
        return {_cpus(part) for part in bind.split("|")} if CPU_LISTS.fullmatch(bind) else set()
    threads = environment.get("OMP_NUM_THREADS", "")
    return {int(threads)} if threads.isdecimal() else set()


def _cpus(part: str) -> int:
    """CPUs of a list such as `5,2-4`."""
    ranges = [piece.split("-") for piece in part.split(",")]
    return sum(int(piece[-1]) - int(piece[0]) + 1 for piece in ranges)


def worker_findings(request: Request, deployment: ResolvedDeployment, worker: WorkerRecord) -> Iterator[str]:
    """Each doubt about one worker's engine, model, settings and device: `field: expected X, found Y`."""
    adapter = adapter_of(request.runtime_backend_version, "request")
    if worker.unresolved_fields:
        yield f"unresolved_fields: expected none, found {', '.join(worker.unresolved_fields)}"
    yield from runtime_findings(adapter, worker.runtime)
    yield from model_findings(deployment, worker)
    yield from precision_findings(deployment, worker.model)
    yield from settings_findings(adapter.device, deployment, bool(deployment.config.num_experts), worker.settings)
    yield from graph_findings(adapter.device, deployment, worker.settings)
    yield from recurrent_findings(worker)
    yield from hardware_findings(request, worker)
