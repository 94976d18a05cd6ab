"""What people who probe engines tripped over, each with an input that shows the fault on a record.

Reports are named by their repository and number. Records are those of tests/process_records.py with a change.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from process_records import ROOT, attention_spec, changed, dense_scheduler, dense_worker, glm_worker, group
from quantization_blocks import FP8_BLOCK, LAGUNA_BLOCK

from producer.grids.axes import candidates
from producer.resolving import read_campaign, resolve
from profiles import profile
from schemas.canonical import parse
from schemas.errors import Refusal
from schemas.launch import EngineSettings, GraphSettings, Limits, Precision, Topology
from schemas.model_config import read_model_config
from schemas.observation import SchedulerRecord, WorkerRecord
from schemas.request import Deployment, Grid, Request, ResolvedDeployment

from record_differences import worker_differences
from scheduler_checks import scheduler_findings
from worker_checks import worker_findings


@pytest.fixture(autouse=True)
def _in_the_project(monkeypatch):
    monkeypatch.chdir(ROOT)


def request_of(campaign: str) -> Request:
    file = Path(f"config/campaigns/{campaign}.yaml")
    return resolve(read_campaign(file), file)


def dense_deployment(**change: Any) -> ResolvedDeployment:
    return request_of("cpu-demo").deployments["dense"].model_copy(update=change)


def of_worker(deployment: ResolvedDeployment, record: dict[str, Any], campaign: str = "cpu-demo") -> list[str]:
    return list(worker_findings(request_of(campaign), deployment, parse(WorkerRecord, record, "worker")))


def of_scheduler(deployment: ResolvedDeployment, record: dict[str, Any]) -> list[str]:
    return list(scheduler_findings(request_of("cpu-demo"), deployment, parse(SchedulerRecord, record, "scheduler")))


class Checkpoint:
    """A checkpoint of our own making, what planning reads of it, and what a worker that loaded it records."""

    def __init__(self, folder: Path, config: dict[str, Any], **precision: str) -> None:
        root = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "torch_dtype": "bfloat16"}
        sizes = {"vocab_size": 8192, "max_position_embeddings": 4096, "num_hidden_layers": 2}
        (folder / "config.json").write_text(json.dumps(root | sizes | config))
        self.folder, self.config = folder, read_model_config(folder)
        self.deployment = dense_deployment(
            model=str(folder), config=self.config, precision=Precision.model_validate(precision)
        )

    def worker(self, **model: Any) -> dict[str, Any]:
        record = dense_worker()
        record["model"] |= {"model": str(self.folder), "config_sha256": self.config.sha256} | model
        if self.deployment.precision.kv_cache == "fp8":
            record["settings"]["cache_dtype"] = "fp8"
        return record

    def findings(self, **model: Any) -> list[str]:
        return of_worker(self.deployment, self.worker(**model))


# --- capacity and geometry over ranks ---


@pytest.mark.parametrize("blocks", [13_697, 9_400])
def test_a_replica_may_have_thousands_of_blocks_fewer(blocks: int):
    """vllm#46106; nano-vllm#187, #275: replicas size their caches independently."""
    record = dense_scheduler() | {
        "num_blocks": blocks,
        "initial_free_blocks": blocks - 1,
        "max_concurrency": blocks / 32,
    }
    assert of_scheduler(dense_deployment(), record) == []


def test_ranks_that_report_other_blocks_differ_by_group_and_both_values():
    """vllm#51752, #54710: a rank keeps another block size, and the engine's own error points elsewhere."""
    record = glm_worker()
    spec = record["cache"]["groups"][0]["layer_specs"]["kda"] | {"block_size": 16}
    other = changed(record, "cache/groups/0", group(["kda"], spec, 3)) | {"tp_rank": 1}
    ranks = [parse(WorkerRecord, each, "worker") for each in (record, other)]
    lines = [str(difference) for difference in worker_differences(*ranks)]
    assert "cache.groups[0].block_size_tokens: expected 2176, found 16" in lines
    deployment = request_of("glm-5.3-flash-gb300-tp4").deployments["tp4"]
    found = of_worker(deployment, other, "glm-5.3-flash-gb300-tp4")
    assert "settings.recurrent.block_size: expected 16, found 2176" in found


def test_a_pool_for_about_one_longest_request_imports():
    """dynamo#2654: 64 free blocks of 128 tokens and a context of 8,192."""
    deployment = dense_deployment(limits=Limits(max_num_tokens=2048, max_batch_size=8, max_model_len=8192))
    record = dense_scheduler() | {"num_blocks": 65, "initial_free_blocks": 64, "max_model_len": 8192}
    assert of_scheduler(deployment, record | {"max_concurrency": 65 / 64}) == []
    (line,) = of_scheduler(deployment, record | {"max_concurrency": 0.9})
    assert line == "max_concurrency: expected room for one request of 8192 tokens, found 0.9"


def test_the_limit_of_a_data_parallel_rank_counts_once():
    """dynamo#10125: a scheduler that serves four ranks' requests has another limit than its rank's."""
    file = Path("config/campaigns/cpu-parallel.yaml")
    request = resolve(read_campaign(file), file)
    deployment = request.deployments["data"]
    limits = {"max_num_scheduled_tokens": 1024, "max_num_running_reqs": 4, "max_model_len": 2048}
    record = dense_scheduler() | limits
    assert list(scheduler_findings(request, deployment, parse(SchedulerRecord, record, "scheduler"))) == []
    twice = parse(SchedulerRecord, record | {"max_num_running_reqs": 8}, "scheduler")
    assert list(scheduler_findings(request, deployment, twice)) == ["max_num_running_reqs: expected 4, found 8"]


# --- blocks, hashes and hits ---


def recurrent_scheduler(**change: Any) -> dict[str, Any]:
    """Recurrent state of 2,176 tokens a block beside attention of 128: the least common multiple is 2,176."""
    layers = glm_worker()["cache"]["groups"][0]["layer_specs"]
    groups = [group(["kda"], layers["kda"], 3), group(["attention"], attention_spec(128, 65536), 32)]
    launch = dense_scheduler()["launch"]
    blocks = {
        "block_size": 2176,
        "cache_config.block_size": 2176,
        "hash_block_size": 128,
        "recurrent_block_sizes": [2176],
    }
    return (
        dense_scheduler()
        | {
            "groups": groups,
            "coordinator": "HybridKVCacheCoordinator",
            "mamba_cache_mode": "align",
            "block_size": 2176,
            "hash_block_size": 128,
            "cache_hit_alignment_tokens": 2176,
            "launch": launch | blocks,
        }
        | change
    )


def test_states_are_not_hashed_at_another_groups_boundary():
    """vllm#54076, #51113, #45477: align mode split by the wrong group's block, states hashed under another boundary."""
    found = of_scheduler(dense_deployment(), recurrent_scheduler())
    assert "hash_block_size: expected the recurrent groups' block 2176, found 128" in found
    assert "launch.hash_block_size: expected 2176, found 128" in found


def test_a_scheduler_does_not_split_at_another_groups_block():
    launch = recurrent_scheduler()["launch"] | {"block_size": 128, "cache_config.block_size": 128}
    found = of_scheduler(dense_deployment(), recurrent_scheduler(block_size=128, launch=launch))
    assert "block_size: expected the recurrent groups' block 2176, found 128" in found
    assert "launch.recurrent_block_sizes: expected 128, found 2176" in found


def mixed_blocks(**change: Any) -> dict[str, Any]:
    """Blocks of 128, 4096, 32 and 8 tokens, and a ring of 2: the scheduler's block is 4,096, the hash block 8."""
    specs = [attention_spec(block, 65536) for block in (128, 4096, 32, 8)]
    ring = attention_spec(2, 65536, spec_type="CircularBufferSpec")
    blocks = {"block_size": 4096, "cache_config.block_size": 4096, "hash_block_size": 8}
    return (
        dense_scheduler()
        | {
            "groups": [group([f"layer{place}"], spec, 1) for place, spec in enumerate([*specs, ring])],
            "coordinator": "HybridKVCacheCoordinator",
            "block_size": 4096,
            "hash_block_size": 8,
            "cache_hit_alignment_tokens": 4096,
            "launch": dense_scheduler()["launch"] | blocks,
        }
        | change
    )


def test_hits_land_on_the_least_common_multiple_of_the_groups_blocks():
    """vllm-ascend#16270: prompts below 4,096 tokens never hit, whatever the attention block is."""
    assert of_scheduler(dense_deployment(), mixed_blocks()) == []
    found = of_scheduler(dense_deployment(), mixed_blocks(cache_hit_alignment_tokens=128))
    assert found == ["cache_hit_alignment_tokens: expected the scheduler's block 4096, found 128"]
    found = of_scheduler(dense_deployment(), mixed_blocks(cache_hit_alignment_tokens=4100))
    assert found == ["cache_hit_alignment_tokens: expected a multiple of the hash block 8, found 4100"]


def test_prefixes_are_planned_at_the_granularity_of_the_record():
    on = profile(cache_hit_alignment_tokens=4096, max_model_len=16_384)
    prefixes = {point.total_kv_read_tokens // point.batch_size for point in candidates(Grid(), on).prefill}
    assert prefixes == {0, 4096, 8192, 12_288}


# --- what a config does not say is left to the probe ---


@pytest.mark.parametrize("head_dim", [0, None])
def test_a_head_size_of_zero_is_left_to_the_probe(tmp_path: Path, head_dim: int | None):
    """aisimulate#475: `text_config.head_dim: 0` was refused at intake. The spec of each layer has the real one."""
    checkpoint = Checkpoint(tmp_path, {"text_config": {"head_dim": head_dim}})
    assert checkpoint.config.head_dim is None
    assert checkpoint.findings() == []


@pytest.mark.parametrize(
    "config",
    [
        # mlx-vlm#1776 and others: sizes that do not divide, and nulls for what is absent
        {"text_config": None, "llm_config": None, "head_dim": None, "hidden_size": 1792, "num_attention_heads": 24},
        # vllm#33521: a window for each layer
        {"text_config": {"num_hidden_layers": 4, "sliding_window": [4096, None, None, None]}},
        # transformers#37515: the text decoder three levels down
        {"thinker_config": {"text_config": {"num_attention_heads": 28}}},
    ],
)
def test_a_model_whose_size_the_config_does_not_tell_has_no_bound_of_its_weights(tmp_path: Path, config):
    checkpoint = Checkpoint(tmp_path, config)
    assert checkpoint.config.footprint is None
    assert checkpoint.findings(weights_bytes=1) == []


def test_a_listed_count_of_experts_makes_a_mixture_whose_experts_the_worker_must_place(tmp_path: Path):
    """vllm#22514, #32549; aisim#778: an overlooked count made a dense model of a mixture of experts."""
    checkpoint = Checkpoint(tmp_path, {"moe_num_experts": [64, 64], "moe_k": 6})
    assert checkpoint.config.num_experts == 64
    parallel = checkpoint.deployment.model_copy(update={"topology": Topology(tp=2, moe_ep=2)})
    record = changed(checkpoint.worker(), "settings/tensor_parallel_size", 2)
    assert of_worker(parallel, record) == [
        "settings.enable_expert_parallel: expected True, found False",
        "expert axes (moe_tp, moe_ep): expected (1, 2), found (2, 1)",
    ]
    assert of_worker(parallel, changed(record, "settings/enable_expert_parallel", True)) == []


def test_a_model_that_was_loaded_as_float32_is_not_the_deployments(tmp_path: Path):
    """mlx-vlm#1776: two names for the dtype, one of them null; what was loaded decides."""
    checkpoint = Checkpoint(tmp_path, {"torch_dtype": None, "dtype": "bfloat16"})
    assert checkpoint.findings() == []
    assert checkpoint.findings(dtype="float32") == ["model.dtype: expected bfloat16, found float32"]


# --- precision labels of the quantization that was loaded ---

MIXED = {
    "quant_algo": "MIXED_PRECISION",
    "quantized_layers": {
        "a.o_proj": {"quant_algo": "FP8"},
        "a.experts.0.up_proj": {"quant_algo": "NVFP4", "group_size": 16},
    },
}


@pytest.mark.parametrize(
    ("block", "method", "labels"),
    [
        (FP8_BLOCK, "fp8", ("fp8_block", "fp8_block", "fp8")),
        # sglang#28099, aiconfigurator#1241, vllm#35047, #47318: a map of layers, nested in itself or not
        (MIXED, "modelopt_mixed", ("fp8_static", "nvfp4", "fp8")),
        (
            MIXED | {"quantized_layers": {"quantized_layers": MIXED["quantized_layers"]}},
            "modelopt_mixed",
            ("fp8_static", "nvfp4", "fp8"),
        ),
        # mlx-lm#1865, transformers#48798, #48392: a container of groups, attention in the base dtype
        (LAGUNA_BLOCK, "compressed-tensors", ("fp8_block", "fp8_block", "fp8")),
        # The form of a sidecar, which the engine reads into the same place
        ({"quantization": {"quant_algo": "NVFP4"}}, "modelopt_fp4", ("nvfp4", "nvfp4", "fp8")),
        ({"quant_algo": "FP8"}, "modelopt", ("fp8", "fp8", "fp8")),
    ],
)
def test_labels_are_those_of_the_recorded_block(tmp_path: Path, block: dict[str, Any], method: str, labels):
    names = dict(zip(("gemm", "moe", "fmha"), labels, strict=True))
    checkpoint = Checkpoint(tmp_path, {"quantization_config": block}, kv_cache="fp8", **names)
    loaded = {"quantization_config": block, "quantization": method}
    assert checkpoint.findings(**loaded) == []
    # vLLM writes an empty method into a block without one.
    assert checkpoint.findings(**loaded | {"quantization_config": {"quant_method": ""} | block}) == []
    for name, label in names.items():
        other = Checkpoint(tmp_path, {"quantization_config": block}, **(names | {name: "other", "kv_cache": "fp8"}))
        kv = ", KV-cache dtype fp8" if name == "fmha" else ""
        assert other.findings(**loaded) == [f"precision.{name}: expected {label}, found other{kv}"]
    (line,) = checkpoint.findings(**loaded | {"quantization": "awq"})
    assert line.startswith("model.quantization: expected ")
    assert line.endswith(" of quantization_config, found awq")


def test_layers_that_a_block_lists_by_number_are_counted_by_the_checkpoints_config(tmp_path: Path):
    """Attention is excluded layer by layer: whether that is all of it, the number of layers tells."""
    excluded = [f"model.layers.{layer}.mlp*" for layer in range(2)]
    block = FP8_BLOCK | {"modules_to_not_convert": [*excluded, "*self_attn*"]}
    labels = {"gemm": "bfloat16", "moe": "bfloat16", "fmha": "bfloat16", "kv_cache": "bfloat16"}
    checkpoint = Checkpoint(tmp_path, {"quantization_config": block}, **labels)
    assert checkpoint.findings(quantization_config=block, quantization="fp8") == []
    deeper = Checkpoint(tmp_path, {"num_hidden_layers": 3, "quantization_config": block}, **labels)
    found = deeper.findings(quantization_config=block, quantization="fp8")
    assert "precision.gemm: expected fp8_block, found bfloat16" in found


@pytest.mark.parametrize(
    ("block", "line"),
    [
        # sglang#28099: MIXED_PRECISION means two unrelated things
        (
            {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},
            "model.quantization_config.quantized_layers: expected a map of layers, found a bare MIXED_PRECISION, read "
            "as ModelOpt's (an algorithm per layer) or W4AFP8 (int4 experts, fp8 activations; sglang#28099)",
        ),
        # compressed-tensors#174: a half-empty block
        ({"version": "0.6"}, "model.quantization_config.quant_method: expected one of "),
        ({"version": "0.6", "quant_method": ""}, "model.quantization_config.quant_method: expected one of "),
        # mlx-lm#1865: an unknown format has no default
        (
            LAGUNA_BLOCK | {"format": "pack-quantized"},
            "model.quantization_config.format: expected one of float-quantized, ",
        ),
    ],
)
def test_a_recorded_block_without_a_label_is_a_finding_and_no_bfloat16(tmp_path: Path, block, line: str):
    checkpoint = Checkpoint(tmp_path, {})
    found = checkpoint.findings(quantization_config=block, quantization="x")
    assert len(found) == 1
    assert found[0].startswith(line)


def test_the_loaded_block_is_null_exactly_when_nothing_was_quantized(tmp_path: Path):
    checkpoint = Checkpoint(tmp_path, {"quantization_config": None})
    assert checkpoint.findings() == []
    assert checkpoint.findings(quantization="fp8") == [
        "model.quantization: expected None of quantization_config, found fp8"
    ]
    labels = {"gemm": "fp8_block", "moe": "fp8_block"}
    quantized = Checkpoint(tmp_path, {"quantization_config": FP8_BLOCK}, **labels)
    assert quantized.findings() == [
        "precision.gemm: expected bfloat16, found fp8_block",
        "precision.moe: expected bfloat16, found fp8_block",
    ]


def test_the_refusal_of_an_attention_label_says_the_dtype_of_the_cache(tmp_path: Path):
    """Bfloat16 is declared, an FP8 checkpoint under an fp8 cache expects fp8."""
    names = {"gemm": "fp8_block", "moe": "fp8_block", "fmha": "bfloat16", "kv_cache": "fp8"}
    checkpoint = Checkpoint(tmp_path, {"quantization_config": FP8_BLOCK}, **names)
    found = checkpoint.findings(quantization_config=FP8_BLOCK, quantization="fp8")
    assert found == ["precision.fmha: expected fp8, found bfloat16, KV-cache dtype fp8"]


def test_a_half_cache_imports_and_an_int8_cache_has_no_dtype():
    """Planning refuses half; vLLM has no int8 cache."""
    record = changed(dense_worker(), "settings/cache_dtype", "float16")
    assert of_worker(dense_deployment(precision=Precision(kv_cache="half")), record) == []
    found = of_worker(dense_deployment(precision=Precision(kv_cache="int8")), dense_worker())
    assert [line.split(":")[0] for line in found] == ["precision.kv_cache", "settings.cache_dtype"]
    assert all("vLLM has no int8 KV cache dtype" in line for line in found)


# --- what is asked for is what runs ---


@pytest.mark.parametrize(
    "change",
    [
        {"model": "config/models/other"},
        {"limits": Limits(max_num_tokens=1024, max_batch_size=8, max_model_len=4096)},
        {"limits": Limits(max_num_tokens=2048, max_batch_size=4, max_model_len=4096)},
        {"limits": Limits(max_num_tokens=2048, max_batch_size=8, max_model_len=2048)},
        {"topology": Topology(tp=2)},
        {"topology": Topology(dp=2, moe_ep=2)},
        {"precision": Precision(kv_cache="fp8")},
        {"engine": EngineSettings(load_format="auto", enforce_eager=True, kv_cache_memory_bytes=268_435_456)},
        {"engine": EngineSettings(load_format="dummy", kv_cache_memory_bytes=268_435_456)},
        {"engine": EngineSettings(load_format="dummy", enforce_eager=True, kv_cache_memory_bytes=268_435_455)},
        {"engine": EngineSettings(load_format="dummy", enforce_eager=True, gpu_memory_utilization=0.5)},
    ],
)
def test_an_option_that_parses_but_does_nothing_is_a_finding(change: dict[str, Any]):
    """aiconfigurator#1365: the record of a launch without the option must not pass for one with it."""
    assert of_worker(dense_deployment(), dense_worker()) == []
    assert of_worker(dense_deployment(**change), dense_worker()) != []


@pytest.mark.parametrize(
    "graph",
    [
        GraphSettings(cudagraph_mode="PIECEWISE"),
        GraphSettings(cudagraph_mode="NONE"),
        GraphSettings(cudagraph_capture_sizes=(1, 2, 4)),
        GraphSettings(prefill_cudagraph_policy="explicit"),
    ],
)
def test_graphs_that_were_asked_for_and_not_made_are_a_finding(graph: GraphSettings):
    deployment = request_of("glm-5.3-flash-gb300-tp4").deployments["tp4"]
    assert of_worker(deployment, glm_worker(), "glm-5.3-flash-gb300-tp4") == []
    engine = deployment.engine.model_copy(update={"graph": graph})
    other = deployment.model_copy(update={"engine": engine})
    assert of_worker(other, glm_worker(), "glm-5.3-flash-gb300-tp4") != []


def test_an_engine_whose_scheduler_has_another_signature_is_not_the_pinned_one():
    """vllm-gaudi#1555: an override without a new argument kills the engine at its first request."""
    record = dense_worker()
    record["runtime"]["source_files"]["vllm/v1/core/sched/scheduler.py"] = "0" * 64
    (line,) = of_worker(dense_deployment(), record)
    assert line.startswith("runtime.source_files.vllm/v1/core/sched/scheduler.py: expected ")


def test_pipeline_stages_are_refused_at_the_request_and_in_a_record():
    """vllm#51752: pipeline stages without an attention layer keep another block size."""
    fields = {"model": "m", "limits": {"max_model_len": 8}, "topology": {"pp": 2}}
    engine = {"load_format": "dummy", "kv_cache_memory_bytes": 1}
    with pytest.raises(Refusal, match=r"topology\.pp: expected 1, found 2"):
        parse(Deployment, fields | {"engine": engine}, "campaign")
    found = of_worker(dense_deployment(), changed(dense_worker(), "settings/pipeline_parallel_size", 2))
    assert found == ["settings.pipeline_parallel_size: expected 1, found 2"]
