"""Bad input: one line that names field, expectation, value and file, before anything expensive starts."""

import json

import pytest
from conftest import Workspace

CAMPAIGN = "config/campaigns/cpu-demo.yaml"
MODEL = "config/models/qwen3-tiny"


def refused(workspace: Workspace, *arguments: str) -> str:
    """The refusal of a dry run: exactly one line, and an exit code that says refused."""
    done = workspace.snakemake("-n", *arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("refused: ")]
    assert len(lines) == 1
    assert "Traceback" not in done.stdout + done.stderr
    assert not (workspace.root / "results").exists()
    return lines[0].removeprefix("refused: ")


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        (
            "description:",
            "descripton:",
            f"descripton: expected no such key, found 'Three tiny models with random weights, one of each kind of KV "
            f"cache, on the CPU engine.': {CAMPAIGN}",
        ),
        (
            "max_batch_size: 8,",
            'max_batch_size: "8",',
            f"deployments.dense.limits.max_batch_size: expected a valid integer, found '8': {CAMPAIGN}",
        ),
        (
            "enforce_eager: true,",
            "enforce_eager: 1,",
            f"deployments.dense.engine.enforce_eager: expected a valid boolean, found 1: {CAMPAIGN}",
        ),
        (
            f"model: {MODEL}",
            "model: config/models/none",
            "model: expected a folder with a config.json, found none: config/models/none",
        ),
        (
            'backend_version: "0.32.0"',
            'backend_version: "0.32.1"',
            "unqualified backend runtime: vllm '0.32.1': runtime_backend_version: expected one of 0.32.0, 0.33.0, "
            f"found '0.32.1': {CAMPAIGN}",
        ),
        (
            "topology: {tp: 1, moe_tp: 1, moe_ep: 1}",
            "topology: {tp: 8, moe_tp: 8, moe_ep: 1}",
            f"deployments.hybrid.topology: expected at most 2 GPUs of cpu-2core, found tp 8 x dp 1: {CAMPAIGN}",
        ),
        (
            "kv_cache_memory_bytes: 268435456}",
            "kv_cache_memory_bytes: 99000000000}",
            "deployments.dense.topology: expected weights and cache within the 25769803776 bytes of cpu-2core, "
            f"found tp 1 with at least 8912896 bytes of weights and 99000000000 of cache: {CAMPAIGN}",
        ),
        (
            "kv_cache_memory_bytes: 268435456}",
            "kv_cache_memory_bytes: 1048576}",
            # 2 x 4 layers x 2 heads x 64 x 2 bytes = 2,048 a token, times 4,096 tokens.
            f"deployments.dense.engine.kv_cache_memory_bytes: expected at least 8388608, one request of 4096 tokens, "
            f"found 1048576: {CAMPAIGN}",
        ),
        (
            "max_model_len: 4096}",
            "max_model_len: 8192}",
            "deployments.dense.limits.max_model_len: expected at most 4096, max_position_embeddings of "
            f"{MODEL}, found 8192: {CAMPAIGN}",
        ),
        (
            "batch_sizes: [1, 2, 4]",
            "batch_sizes: [1, 2, 16]",
            "deployments.dense.grid.prefill.batch_sizes: expected at most 8, limits.max_batch_size, "
            f"found 16: {CAMPAIGN}",
        ),
        (
            "topology: {tp: 1, moe_tp: 1, moe_ep: 1}",
            "topology: {dp: 2, moe_tp: 2}",
            "deployments.hybrid.topology: expected pure TP (moe_tp = tp), TEP (moe_ep = tp) or DEP (tp 1, moe_ep = "
            f"dp), found tp 1, dp 2, moe_tp 2, moe_ep 1: {CAMPAIGN}",
        ),
        (
            "acceptance: auto #",
            f"acceptance: {{densee: {'a' * 64}}} #",
            f"acceptance.densee: expected one of dense, sliding, hybrid, found 'densee': {CAMPAIGN}",
        ),
        ("acceptance: auto #", "acceptance: {dense: abc} #", "acceptance.dense: expected string should match pattern"),
        (
            "campaign: cpu-demo",
            "campaign: other",
            f"campaign: expected the file's name 'cpu-demo', found 'other': {CAMPAIGN}",
        ),
        (
            "deployments:",
            "execution: {gres: 'gpu:4'}\ndeployments:",
            f"deployments.dense.execution.gres: expected gpu:1, the GPUs of deployment dense, found gpu:4: {CAMPAIGN}",
        ),
        ("system: cpu-2core", "system: b300", "system: expected a readable file, found No such file or directory"),
    ],
    ids=lambda value: value.split(":")[0] if isinstance(value, str) else None,
)  # fmt: skip
def test_a_bad_campaign_is_one_line(project: Workspace, old: str, new: str, line: str):
    project.edit(CAMPAIGN, old, new)
    assert refused(project).startswith(line)


@pytest.mark.parametrize(
    "text", [b"campaign: caf\xe9\n", b"campaign: \x00\n", b"{[a]: 1}\n", b"campaign: 2026-02-30\n", b"- a\n", b""]
)
def test_a_file_that_is_no_campaign_at_all(project: Workspace, text: bytes):
    (project.root / CAMPAIGN).write_bytes(text)
    assert refused(project).endswith(f": {CAMPAIGN}")


@pytest.mark.demo
def test_a_damaged_profile_is_one_line(finished: Workspace):
    profile = next((finished.root / "results/cpu-demo/profile").glob("dense-*.json"))
    profile.write_bytes(profile.read_bytes()[:100])
    done = finished.snakemake("-n")
    assert done.returncode == 2
    assert "Traceback" not in done.stdout + done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith("refused: profile: expected JSON, found ")]


def test_a_campaign_that_is_not_there(project: Workspace):
    line = refused(project, "--config", "campaign=none")
    assert line == "campaign: expected a readable file, found No such file or directory: config/campaigns/none.yaml"


def test_a_model_folder_without_config(project: Workspace):
    (project.root / MODEL / "config.json").unlink()
    assert refused(project) == f"model: expected a folder with a config.json, found none: {MODEL}"


def test_a_model_config_that_is_no_json(project: Workspace):
    (project.root / MODEL / "config.json").write_text("{")
    assert refused(project).startswith("model config: expected JSON, found Expecting property name")


def test_a_quantized_checkpoint_under_the_labels_of_a_plain_one(project: Workspace):
    file = project.root / MODEL / "config.json"
    block = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": block}))
    assert refused(project) == (
        f"deployments.dense.precision.gemm: expected 'fp8_block' of {MODEL}, found 'bfloat16': {CAMPAIGN}"
    )


def test_a_float16_checkpoint(project: Workspace):
    file = project.root / MODEL / "config.json"
    file.write_text(file.read_text().replace('"bfloat16"', '"float16"'))
    assert refused(project) == (
        f"deployments.dense.model: expected a bfloat16 checkpoint: engines are launched so, found half: {CAMPAIGN}"
    )


@pytest.mark.demo
def test_a_deployment_whose_points_do_not_fit_its_blocks(finished: Workspace):
    """Known only after the probe, and then before any cell: the profile has 1,023 blocks, these points need more."""
    profile = next((finished.root / "results/cpu-demo/profile").glob("dense-*.json"))
    facts = json.loads(profile.read_text())
    facts.update(free_blocks=1, kv_cache_bytes=facts["kv_cache_bytes"] // facts["free_blocks"])
    profile.write_text(json.dumps(facts))
    finished.edit(CAMPAIGN, "new_tokens: [16, 64, 128, 256, 512, 1024]", "new_tokens: [1024]")
    done = finished.snakemake("-n")
    assert done.returncode == 2
    assert "refused: deployments.dense.grid.prefill: expected a point that fits 1 free blocks" in done.stderr


def test_the_installed_engine_must_be_the_pinned_one(monkeypatch, tmp_path):
    from producer.adapters import ADAPTERS, check_installed
    from schemas.errors import Refusal

    adapter = ADAPTERS["0.32.0"]
    root = check_installed(adapter)
    assert (root / "vllm/v1/core/sched/scheduler.py").is_file()
    with pytest.raises(Refusal, match=r"engine: expected vllm 0.33.0, found not installed"):
        check_installed(ADAPTERS["0.33.0"])
    pins = json.loads(adapter.pins_file.read_text()) | {"vllm/v1/request.py": "0" * 64}
    monkeypatch.setattr("producer.adapters.read_pins", lambda _: pins)
    with pytest.raises(Refusal, match=r"pinned engine source vllm/v1/request.py: expected 0{64}, found [0-9a-f]{64}"):
        check_installed(adapter)
