"""Planning a hybrid model for real GPUs without one, and what is refused there instead of in a container."""

import json
import subprocess
from pathlib import Path

import pytest
from conftest import Workspace

from schemas.canonical import sha256

GLM = "glm-5.3-flash-gb300-tp4"
CAMPAIGN = f"config/campaigns/{GLM}.yaml"
PROFILE = f"config/profiles/{GLM}.json"


def plan(workspace: Workspace, campaign: str) -> Path:
    done = workspace.snakemake("plan", "--config", f"campaign={campaign}")
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = (workspace.root / "results" / campaign).glob("plan-*")
    return folder


@pytest.mark.parametrize(
    ("campaign", "points", "digest"),
    [
        (GLM, 577, "2c81f2f524251c18a5a0c33607544695042c48f8151f2b9c3f067d983fa4cbc6"),
        (f"{GLM}-triton", 537, "299abe8eb499f9117ae0dd68603988f671edbb3aa2094255d5c27b2f6685e9de"),
    ],
)
def test_the_list_of_the_original_comes_out_of_the_command_line(project: Workspace, campaign, points, digest):
    folder = plan(project, campaign)
    assert sha256((folder / "points" / "tp4.json").read_bytes()) == digest
    deployment = json.loads((folder / "plan.json").read_text())["deployments"]["tp4"]
    assert deployment["prefill_points"] + deployment["decode_points"] == points
    assert (deployment["origin"], deployment["contract"]) == ("glm53flash_grid_v1", "glm53flash")
    assert (deployment["peak_blocks"], deployment["free_blocks"]) == (2240, 13_696)


def test_a_plan_is_written_where_its_command_says(project: Workspace):
    """An executor without a shared file system has jobs work in a folder of their own."""
    jobs = project.dry_run("plan", "--config", f"campaign={GLM}")
    (target,) = [job.output.split(", ")[0] for job in jobs if job.rule == "plan_campaign"]
    digest = Path(target).parent.name.removeprefix("plan-")
    command = ["python", "workflow/scripts/plan_campaign.py", "--campaign", CAMPAIGN, "--plan", digest]
    done = subprocess.run([*command, "--output", "elsewhere/plan.json"], cwd=project.root, check=False)
    assert done.returncode == 0
    written = {
        file.relative_to(project.root / "elsewhere").as_posix() for file in project.root.glob("elsewhere/**/*.*")
    }
    assert written == {"plan.json", "points/tp4.json", "profiles/tp4.json"}
    assert not (project.root / "results").exists()


def test_a_dry_run_knows_every_cell_without_a_profile_to_probe(project: Workspace):
    rules = [job.rule for job in project.dry_run("smoke", "--config", f"campaign={GLM}")]
    assert rules.count("collect_cell") == 2
    assert "probe" not in rules


def test_the_smoke_list_of_the_original_is_frozen(project: Workspace):
    jobs = project.dry_run("smoke", "--config", f"campaign={GLM}")
    target = next(job.output.split(", ")[0] for job in jobs if job.rule == "plan_smoke")
    done = project.snakemake(target, "--config", f"campaign={GLM}")
    assert done.returncode == 0, done.stderr
    points = (project.root / target).with_name("points") / "tp4.json"
    assert sha256(points.read_bytes()) == "35060cd4787dc7cb14fb00480359fa5c63a907bd514692e0397f839315c018fd"


def test_cells_carry_their_execution_identity_and_contract(project: Workspace):
    plan(project, GLM)
    jobs = project.dry_run("smoke", "--config", f"campaign={GLM}")
    name = next(Path(job.output).parent.name for job in jobs if job.rule == "collect_cell")
    target = "cell.json"
    freeze = ["--campaign", f"config/campaigns/{GLM}.yaml", "--cell", name, "--scope", "smoke/", "--output", target]
    assert project.script("freeze_cell", *freeze).returncode == 0
    identity = json.loads((project.root / target).read_text())["identity"]
    assert identity["contract"] == "glm53flash"
    assert identity["warmup_iterations"] == 0
    bound = identity["execution_identity"]
    assert (bound["engram_residency"], bound["execution_profile"], bound["input_modality"]) == ("none", "full", "text")
    # The state protocol is folded in: the binding is not the bare digest of the config.
    assert bound["model_config_sha256"] != identity["model_config_sha256"]


def refused(workspace: Workspace, *arguments: str) -> str:
    done = workspace.snakemake("-n", "plan", *(arguments or ("--config", f"campaign={GLM}")))
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("refused: ")]
    return line.removeprefix("refused: ")


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        (
            "topology: {tp: 4, moe_tp: 4}",
            "topology: {tp: 4, moe_ep: 4}",
            "deployments.tp4.topology: expected one of single, pure_tp: the glm53flash producer runs nothing else, "
            f"found tep: {CAMPAIGN}",
        ),
        (
            "warmup_iterations: 0",
            "warmup_iterations: 5",
            f"deployments.tp4.warmup_iterations: expected 0: each point has warm-ups of its own, found 5: {CAMPAIGN}",
        ),
        (
            "    warmup_iterations: 0\n",
            "",
            "deployments.tp4.warmup_iterations: expected 0: each point has warm-ups of its own, found absent: "
            f"{CAMPAIGN}",
        ),
        (
            "model_revision: 04c4e9e95c5da8862dced7e5056455116f83a7e0",
            "model_revision: v1.0",
            f"deployments.tp4.model_revision: expected 40 lowercase hex characters, found 'v1.0': {CAMPAIGN}",
        ),
        (
            "fmha: fp8",
            "fmha: bfloat16",
            "deployments.tp4.precision.fmha: expected 'fp8' of config/models/glm-5.3-flash, KV-cache dtype 'fp8', "
            f"found 'bfloat16': {CAMPAIGN}",
        ),
        (
            "gemm: fp8_block",
            "gemm: fp8",
            "deployments.tp4.precision.gemm: expected 'fp8_block' of config/models/glm-5.3-flash, found 'fp8': "
            f"{CAMPAIGN}",
        ),
        (
            "warmup_iterations: 0",
            "warmup_iterations: 0\n    grid: {}",
            "deployments.tp4.grid: expected none: a glm53flash cell measures glm53flash_grid_v1, found a grid: "
            f"{CAMPAIGN}",
        ),
        (
            "warmup_iterations: 0",
            "warmup_iterations: 0\n    engram_residency: host",
            "native execution identity cell has no audited producer contract: deployments.tp4.engram_residency: "
            f"expected one of none, hbm_tp_sharded, found host: {CAMPAIGN}",
        ),
        (
            "max_num_tokens: 8192",
            "max_num_tokens: 4096",
            f"profile of tp4 max_num_tokens: expected 4096, found 8192: {PROFILE}",
        ),
    ],
    ids=lambda value: value.strip().split(":")[0] if isinstance(value, str) else None,
)
def test_what_the_producer_of_a_family_cannot_run_is_refused_at_planning(project: Workspace, old, new, line):
    project.edit(CAMPAIGN, old, new)
    assert refused(project) == line


@pytest.mark.parametrize(
    ("kv_cache", "fmha", "line"),
    [
        ("int8", "fp8", "deployments.tp4.precision.kv_cache: expected "),
        ("half", "fp8", "deployments.tp4.precision.kv_cache: expected "),
    ],
)
def test_a_kv_cache_that_is_not_planned(project: Workspace, kv_cache, fmha, line):
    project.edit(CAMPAIGN, "fmha: fp8, kv_cache: fp8", f"fmha: {fmha}, kv_cache: {kv_cache}")
    found = refused(project)
    assert found.startswith(line)
    assert f"found '{kv_cache}': {CAMPAIGN}" in found


def declared(workspace: Workspace, change) -> None:
    """Change the declared profile, and accept it as changed."""
    file = workspace.root / PROFILE
    before = sha256(file.read_bytes())
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))
    workspace.edit(CAMPAIGN, before, sha256(file.read_bytes()))


def test_a_recurrent_block_larger_than_a_step_is_refused_with_both_numbers(project: Workspace):
    """vllm#34445: align mode with a block of 2,176 and a budget of 2,048 schedules no token and hangs."""
    declared(project, lambda profile: profile.update(max_num_tokens=2048))
    project.edit(CAMPAIGN, "max_num_tokens: 8192", "max_num_tokens: 2048")
    assert refused(project) == (
        "deployments.tp4.limits.max_num_tokens: expected at least the recurrent block of 2176 tokens, "
        f"found 2048: {CAMPAIGN}"
    )


@pytest.mark.parametrize(
    ("field", "why"),
    [
        ("enable_prefix_caching", "prefixes are seeded and then found"),
        ("enable_chunked_prefill", "a seed longer than a step is run in several"),
    ],
)
def test_a_launch_whose_engine_switched_off_what_seeding_needs_is_not_planned(project: Workspace, field, why):
    """The CPU platform does so for MLA (vllm 0.32.0, platforms/cpu.py:516); such a launch imports all the same."""
    declared(project, lambda profile: profile.update({field: False}))
    assert refused(project) == f"profile of tp4 {field}: expected True: {why}, found False: {PROFILE}"


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            lambda p: p["groups"][0].update(sliding_window=4),
            "blocks_per_request and no sliding_window for a state group",
        ),
        (lambda p: p["groups"][4].update(blocks_per_request=1), "no blocks_per_request for a group of kind attention"),
        (lambda p: p["groups"][4].update(kind="convolution"), "a sliding_window for a convolution group"),
        (lambda p: p.update(kv_cache_bytes=2**54), "kv_cache_bytes: expected "),
        (lambda p: p.update(kv_cache_bytes=1), "kv_cache_bytes a multiple of free_blocks 13696"),
        (lambda p: p["groups"][2].update(page_size_bytes=7), "page_size_bytes 13516800 of kv_cache_bytes in group"),
        (lambda p: p.update(surprise=1), "surprise: expected no such key"),
    ],
)
def test_a_declared_profile_that_contradicts_itself(project: Workspace, change, line):
    declared(project, change)
    assert line in refused(project)


def second_deployment(workspace: Workspace, change) -> None:
    """A second GLM deployment at TP 2 with a declared profile of its own."""
    profile = json.loads((workspace.root / PROFILE).read_text())
    change(profile)
    other = workspace.root / "config/profiles/other.json"
    other.write_text(json.dumps(profile))
    file = workspace.root / CAMPAIGN
    text = file.read_text().replace(", gres: gpu:4", "")
    block = text[text.index("  tp4:\n    model") :]
    for old, new in (
        ("tp4:", "tp2:"),
        ("{tp: 4, moe_tp: 4}", "{tp: 2, moe_tp: 2}"),
        (PROFILE, "config/profiles/other.json"),
    ):
        assert old in block
        block = block.replace(old, new, 1)
    text = text.replace("acceptance:\n", f"acceptance:\n  tp2: {sha256(other.read_bytes())}\n") + block
    file.write_text(text)


def without_checkpoint(profile) -> None:
    for group in profile["groups"]:
        group.pop("prefill_checkpoint_blocks", None)
        group.pop("prefill_checkpoint_alignment", None)


def with_alignment_32(profile) -> None:
    for group in profile["groups"][:4]:
        group["prefill_checkpoint_alignment"] = 32


def in_one_group_only(profile) -> None:
    without_checkpoint(profile)
    profile["groups"][0].update(prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=16)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (without_checkpoint, "requires the same prefill checkpoint setting across the accepted deployments"),
        (in_one_group_only, "requires the same prefill checkpoint setting across the accepted deployments"),
        (with_alignment_32, "requires one prefill checkpoint alignment across the accepted deployments"),
    ],
)
def test_deployments_that_mix_checkpoints(project: Workspace, change, line):
    second_deployment(project, change)
    assert refused(project).startswith(f"GLM-5.3-Flash collection {line}: expected one")


def test_deployments_with_one_checkpoint_setting_plan_together(project: Workspace):
    second_deployment(project, lambda profile: None)
    assert len(list((plan(project, GLM) / "points").iterdir())) == 2


def test_a_checkpoint_in_some_groups_only_is_no_checkpoint(project: Workspace):
    declared(project, in_one_group_only)
    points = plan(project, GLM) / "points" / "tp4.json"
    assert sha256(points.read_bytes()) == "299abe8eb499f9117ae0dd68603988f671edbb3aa2094255d5c27b2f6685e9de"


def test_a_changed_profile_voids_its_acceptance_and_says_what_changed(project: Workspace):
    plan(project, GLM)
    file = project.root / PROFILE
    file.write_text(file.read_text().replace("13696", "9400").replace("185126092800", "127057920000"))
    done = project.snakemake("plan", "--config", f"campaign={GLM}")
    said = done.stdout + done.stderr
    assert done.returncode != 0
    assert "  free_blocks: 13696 -> 9400\n  kv_cache_bytes: 185126092800 -> 127057920000\n" in said
    assert f"acceptance:\n  tp4: {sha256(file.read_bytes())}\n" in said


def explicit(workspace: Workspace, manifest: dict) -> None:
    (workspace.root / "points.json").write_text(json.dumps(manifest))
    workspace.edit(CAMPAIGN, "warmup_iterations: 0", "warmup_iterations: 0\n    points: points.json")


def row(batch: int, new: int, prefix: int, **more) -> dict:
    return {"batch_size": batch, "total_prefill_tokens": batch * new, "total_kv_read_tokens": batch * prefix} | more


@pytest.mark.parametrize(
    "manifest",
    [
        {"schema_version": 1, "prefill": [row(1, 64, 0)], "decode": [{"batch_size": 2, "total_kv_read_tokens": 401}]},
        {"schema_version": 2, "prefill": [row(2, 64, 2176), row(2, 64, 0, partition=None, rows=None)],
         "decode": [{"batch_size": 1, "total_kv_read_tokens": 64}]},
        {"schema_version": 3, "prefill": [row(2, 64, 0, rows=[[64, 0], [64, 0]])],
         "decode": [{"batch_size": 1, "total_kv_read_tokens": 64}]},
    ],
    ids=["v1", "v2", "v3"],
)  # fmt: skip
def test_a_users_own_list_of_any_version_is_frozen_as_it_is(project: Workspace, manifest):
    explicit(project, manifest)
    folder = plan(project, GLM)
    frozen = json.loads((folder / "points" / "tp4.json").read_text())
    assert frozen["schema_version"] == manifest["schema_version"]
    assert len(frozen["prefill"]) == len(manifest["prefill"])
    origin = json.loads((folder / "plan.json").read_text())["deployments"]["tp4"]["origin"]
    assert origin == "frozen_explicit_manifest"


def test_an_imbalanced_point_of_a_users_list_is_dropped_and_counted(project: Workspace):
    partition = {"axis": "new", "high_count": 1, "fraction": 0.5}
    points = [row(1, 64, 0), row(4, 64, 0, partition=partition)]
    explicit(
        project, {"schema_version": 2, "prefill": points, "decode": [{"batch_size": 1, "total_kv_read_tokens": 9}]}
    )
    plan_file = plan(project, GLM) / "plan.json"
    assert json.loads(plan_file.read_text())["deployments"]["tp4"]["dropped"] == {"imbalanced": 1}


@pytest.mark.parametrize(
    ("point", "rule"),
    [
        (row(3, 4096, 0), "token_budget"),
        (row(33, 4, 0), "batch"),
        (row(1, 64, 1000), "split"),
        (row(1, 64, 2176 * 482), "context"),
        (row(1, 4356, 2176), None),
        (row(1, 2179, 2180 - 4), None),
    ],
)
def test_each_point_of_a_users_list_is_checked_like_our_own(project: Workspace, point, rule):
    decode = [{"batch_size": 1, "total_kv_read_tokens": 64}]
    explicit(project, {"schema_version": 3, "prefill": [row(1, 64, 0), point], "decode": decode})
    if rule is None:
        plan(project, GLM)
        return
    line = refused(project)
    assert line.startswith("deployments.tp4.points: prefill[1]: explicit benchmark point is infeasible: expected ")
    assert line.endswith(f"refused by the rule {rule}: {CAMPAIGN}")


def test_a_decode_step_after_nothing_is_refused(project: Workspace):
    """A context of one token has no prompt before the step that reads it."""
    points = [{"batch_size": 2, "total_kv_read_tokens": 4}, {"batch_size": 2, "total_kv_read_tokens": 3}]
    explicit(project, {"schema_version": 1, "prefill": [row(1, 64, 0)], "decode": points})
    line = refused(project)
    assert line.startswith("deployments.tp4.points: decode[1]: explicit benchmark point is infeasible: expected ")
    assert line.endswith(f"refused by the rule split: {CAMPAIGN}")


def test_artifacts_of_dynamo_are_for_all_deployments_or_none(project: Workspace):
    file = "config/campaigns/qwen3-8b-h200.yaml"
    project.edit(file, "topology: {tp: 1}", "topology: {tp: 1}\n    artifacts: dynamo\n    warmup_iterations: 5")
    assert refused(project, "--config", "campaign=qwen3-8b-h200") == (
        "deployments: expected artifacts for every deployment or for none: a table has values of one kind, "
        f"found artifacts for tp1 only: {file}"
    )


def test_rows_that_consumers_bind_to_a_config_are_not_imported(project: Workspace):
    project.edit(CAMPAIGN, "warmup_iterations: 0", "warmup_iterations: 0\n    artifacts: dynamo")
    assert refused(project).startswith("deployments.tp4.artifacts: expected none: consumers bind the rows of ")


def test_an_import_says_how_dynamo_warmed_up(project: Workspace):
    file = project.root / "config/campaigns/qwen3-8b-h200.yaml"
    text = file.read_text().replace("topology: {tp: ", "artifacts: dynamo\n    topology: {tp: ")
    file.write_text(text)
    assert refused(project, "--config", "campaign=qwen3-8b-h200").startswith(
        "deployments.tp1.warmup_iterations: expected --benchmark-warmup-iterations of Dynamo's run, 0 to 1024, "
        "found absent"
    )


def test_a_dense_model_with_data_parallel_ranks_is_refused_with_the_reason(project: Workspace):
    """dynamo#14292."""
    file = project.root / "config/campaigns/qwen3-8b-h200.yaml"
    text = file.read_text().replace("topology: {tp: 1}", "topology: {dp: 2}").replace("gres: gpu:1", "gres: gpu:2")
    file.write_text(text)
    assert refused(project, "--config", "campaign=qwen3-8b-h200") == (
        "deployments.tp1.topology.dp: expected 1 for a dense model: its data-parallel ranks are independent engines, "
        "found 2: config/campaigns/qwen3-8b-h200.yaml"
    )


def test_a_model_with_sharded_engrams_is_measured_eagerly_or_refused(project: Workspace):
    file = project.root / "config/campaigns/qwen3-8b-h200.yaml"
    text = file.read_text().replace("topology: {tp: 1}", "topology: {tp: 1}\n    engram_residency: hbm_tp_sharded", 1)
    file.write_text(text)
    assert refused(project, "--config", "campaign=qwen3-8b-h200") == (
        "deployments.tp1.engine.enforce_eager: expected true: a dsv41 cell is eager, found false: "
        "config/campaigns/qwen3-8b-h200.yaml"
    )
    eager = "engine: {enforce_eager: true, load_format"
    file.write_text(text.replace("engine: {load_format", eager, 1))
    assert project.dry_run("--config", "campaign=qwen3-8b-h200")


def test_two_deployments_that_a_table_cannot_tell_apart(project: Workspace):
    file = project.root / "config/campaigns/qwen3-8b-h200.yaml"
    text = file.read_text().replace("topology: {tp: 2}", "topology: {tp: 1}").replace("gres: gpu:2", "gres: gpu:1")
    file.write_text(text)
    assert refused(project, "--config", "campaign=qwen3-8b-h200").startswith(
        "deployments.tp2: expected another model, topology or precision than tp1"
    )


def test_weights_that_no_gpu_holds(project: Workspace):
    config = project.root / "config/models/qwen3-8b/config.json"
    config.write_text(config.read_text().replace('"num_hidden_layers": 36', '"num_hidden_layers": 3600'))
    assert "expected weights and cache within the 141000000000 bytes" in refused(
        project, "--config", "campaign=qwen3-8b-h200"
    )


def test_the_plan_does_not_depend_on_the_order_of_the_file(project: Workspace):
    before = plan(project, GLM).name
    file = project.root / CAMPAIGN
    subprocess.run(["python", "-c", SHUFFLE, str(file)], check=True)
    assert plan(project, GLM).name == before


SHUFFLE = """
import sys, yaml
data = yaml.safe_load(open(sys.argv[1]))
deployment = data["deployments"]["tp4"]
data["deployments"]["tp4"] = dict(reversed(deployment.items()))
yaml.safe_dump(dict(reversed(data.items())), open(sys.argv[1], "w"), sort_keys=False)
"""
