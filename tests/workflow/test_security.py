"""No value of a campaign is read by a shell, no secret is written anywhere, nothing from outside is executed."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, Workspace

from producer.inside import check_mounts, check_producer, mounted
from producer.launch import command_of, environment_of
from producer.source_digest import producer_digest
from schemas.canonical import parse
from schemas.errors import Refusal
from schemas.request import Container, Execution

HOSTILE = "config/models/a model; touch pwned-1 $(touch pwned-2) `touch pwned-3` 'x' \"y\"\nz"
CANARY = "hf_canary_3f9c1e"  # looks like a token; is none


def write_campaign(workspace: Workspace, **changes: Any) -> str:
    """A campaign of one dense deployment with one prefill point; returns its file."""
    campaign = {
        "campaign": "small",
        "system": "cpu-2core",
        "backend_version": "0.32.0",
        "acceptance": "auto",
        "deployments": {
            "dense": {
                "model": "config/models/qwen3-tiny",
                "worker_type": "prefill",
                "limits": {"max_num_tokens": 64, "max_batch_size": 1, "max_model_len": 256},
                "engine": {"load_format": "dummy", "enforce_eager": True, "kv_cache_memory_bytes": 67108864},
                "grid": {"prefill": {"new_tokens": [16], "batch_sizes": [1], "prefix_blocks": [0]}},
            }
            | changes.pop("deployment", {})
        },
    }
    file = "config/campaigns/small.yaml"
    (workspace.root / file).write_text(yaml.safe_dump(campaign | changes, sort_keys=False))
    return file


@pytest.mark.engine
def test_a_hostile_model_path_is_a_path_and_a_token_leaves_no_trace(project: Workspace):
    """From the campaign to the published table: probes, engine, judges, report."""
    shutil.copytree(project.root / "config/models/qwen3-tiny", project.root / HOSTILE)
    write_campaign(project, deployment={"model": HOSTILE}, execution={"environment": ["HF_TOKEN"]})
    done = subprocess.run(
        ["snakemake", "--config", "campaign=small"],
        cwd=project.root, env=os.environ | {"HF_TOKEN": CANARY}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert (project.root / "results/small/current/report.html").exists()
    written = [path for path in project.root.rglob("*") if path.is_file()]
    assert not [path for path in written if path.name.startswith("pwned")]
    assert len(written) > 100
    assert not [path for path in written if CANARY.encode() in path.read_bytes()]
    assert CANARY not in done.stdout + done.stderr


@pytest.mark.parametrize("name", ["HF_TOKEN", "hf_token", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "DB_PASSWORD"])
def test_a_secret_in_the_engines_environment_is_refused_without_being_shown(project: Workspace, name: str):
    file = write_campaign(project, environment={name: CANARY})
    done = project.script("resolve_request", "--campaign", file, "--output", "request.json")
    assert done.returncode == 2
    assert done.stderr.startswith(f"refused: environment.{name}: expected its name alone, in execution.environment")
    assert CANARY not in done.stdout + done.stderr


def test_settings_that_only_sound_like_secrets_pass(project: Workspace):
    write_campaign(project, environment={"TOKENIZERS_PARALLELISM": "false", "VLLM_FUSED_MOE_CHUNK_TOKENS": "1"})
    assert project.snakemake("-n", "--config", "campaign=small").returncode == 0


def test_a_passed_variable_that_is_not_set_is_refused_before_the_engine(project: Workspace):
    file = write_campaign(project, execution={"environment": ["NO_SUCH_VARIABLE"]})
    launch = ["-m", "producer.launch", "--campaign", file, "--deployment", "dense", "--", "producer.run_cell"]
    done = subprocess.run([sys.executable, *launch], cwd=project.root, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        2, f"refused: execution.environment.NO_SUCH_VARIABLE: expected a variable of this job, found none: {file}\n"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("partition", "gpu; touch pwned"),
        ("partition", "$(touch pwned)"),
        ("account", "a b"),
        ("gres", "'gpu:h200:4'"),
        ("gres", "gpu:1 --wrap=x"),
        ("runtime", "120"),
        ("runtime", 120),
        ("environment", ["HF_TOKEN=x"]),
        ("container", {"runtime": "apptainer", "image": "--writable"}),
        ("container", {"runtime": "pyxis", "image": "a\nb"}),
        ("container", {"runtime": "pyxis", "image": "a", "mounts": ["/a:/b,/etc:/etc"]}),
        ("container", {"runtime": "apptainer", "image": "a", "mounts": ["a:/b"]}),
        ("container", {"runtime": "apptainer", "image": "a", "mounts": ["/a:/b:suid"]}),
        ("nodes", 0),
    ],
)
def test_an_execution_value_that_a_command_line_could_misread_is_refused(field: str, value: Any):
    with pytest.raises(Refusal, match=field):
        parse(Execution, {field: value}, "campaign")


def hostile_container(runtime: str) -> Execution:
    mounts = ("/data/$(touch pwned) 'x':/models:ro", "/scratch:/scratch")
    container = Container(runtime=runtime, image="/images/my image; rm -rf $HOME.sif", mounts=mounts)  # type: ignore[arg-type]
    return Execution(container=container, gres="gpu:h200:4", environment=("HF_TOKEN",))


def test_an_apptainer_command_keeps_every_value_in_one_argument():
    command = command_of(hostile_container("apptainer"), "/project", "d1", ["producer.run_cell", "--cell", "c d"])
    assert command == [
        "apptainer", "exec", "--cleanenv", "--nv",
        "--bind", "/project:/project",
        "--bind", "/data/$(touch pwned) 'x':/models:ro",
        "--bind", "/scratch:/scratch",
        "--pwd", "/project", "/images/my image; rm -rf $HOME.sif",
        "python", "-m", "producer.inside", "--producer", "d1", "--mount", "/models:ro", "--mount", "/scratch",
        "--", "producer.run_cell", "--cell", "c d",
    ]  # fmt: skip


def test_a_pyxis_command_keeps_every_value_in_one_argument():
    command = command_of(hostile_container("pyxis"), "/project", "d1", ["producer.run_cell", "--cell", "c d"])
    assert command[0] == "srun"
    assert "--container-image=/images/my image; rm -rf $HOME.sif" in command
    mounts = "--container-mounts=/project:/project,/data/$(touch pwned) 'x':/models:ro,/scratch:/scratch"
    assert mounts in command
    (passed,) = [argument for argument in command if argument.startswith("--container-env=")]
    assert {"CUDA_VISIBLE_DEVICES", "HF_TOKEN"} <= set(passed.partition("=")[2].split(","))


def test_a_token_enters_a_container_by_the_environment_alone():
    execution = hostile_container("apptainer")
    environment = environment_of(execution, {"HF_TOKEN": CANARY, "CUDA_VISIBLE_DEVICES": "2,3"}, Path("campaign"))
    assert environment["APPTAINERENV_HF_TOKEN"] == CANARY
    assert environment["APPTAINERENV_CUDA_VISIBLE_DEVICES"] == "2,3"
    assert CANARY not in " ".join(command_of(execution, "/project", "d1", ["producer.run_cell"]))


def test_a_missing_container_runtime_is_one_line(project: Workspace):
    container = {"runtime": "apptainer", "image": "none.sif"}
    file = write_campaign(project, execution={"container": container})
    launch = ["-m", "producer.launch", "--campaign", file, "--deployment", "dense", "--", "producer.run_cell"]
    environment = os.environ | {"PATH": str(Path(sys.executable).parent)}
    done = subprocess.run(
        [sys.executable, *launch], cwd=project.root, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("refused: container runtime: expected one that this machine has, found apptainer: ")


def test_declared_mounts_are_compared_with_those_of_the_kernel():
    text = (
        "22 1 0:20 / / rw,relatime - overlay overlay rw\n"
        "30 22 8:1 / /models ro,nosuid shared:1 - ext4 /dev/sda1 rw\n"
        "31 22 8:1 /s /scr\\040atch rw - ext4 /dev/sda1 rw\n"
    )
    points = mounted(text)
    check_mounts(["/models:ro", "/scr atch", "/scr atch/:rw"], points)
    with pytest.raises(Refusal, match="container mount: expected /data to be mounted, found nothing there"):
        check_mounts(["/data:ro"], points)
    with pytest.raises(Refusal, match="container mount: expected /scr atch to be read-only, found writable"):
        check_mounts(["/scr atch:ro"], points)


def in_a_mount_namespace(project: Workspace, script: str) -> subprocess.CompletedProcess[str]:
    command = ["unshare", "--mount", "--map-root-user", "bash", "-euc", script, "bash", sys.executable]
    return subprocess.run(command, cwd=project.root, capture_output=True, text=True, check=False)


def namespaces_work() -> bool:
    if shutil.which("unshare") is None:
        return False
    probe = ["unshare", "--mount", "--map-root-user", "true"]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not namespaces_work(), reason="no user and mount namespaces for this user")
def test_what_is_really_mounted_is_seen_and_the_command_runs(project: Workspace):
    """What a container runtime does, done by hand: a folder bound read-only in a mount namespace of its own."""
    data, models = project.root / "data", project.root / "models"
    data.mkdir()
    models.mkdir()
    inside = f'"$1" -m producer.inside --producer {producer_digest()} --mount'
    bind = f"mount --bind '{data}' '{models}'; mount -o remount,bind,ro '{models}'"
    command = "-- producer.releases --help"
    done = in_a_mount_namespace(project, f"{bind}; {inside} '{models}:ro' {command}")
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout
    done = in_a_mount_namespace(project, f"mount --bind '{data}' '{models}'; {inside} '{models}:ro' {command}")
    assert (done.returncode, "to be read-only, found writable" in done.stderr) == (2, True)
    done = in_a_mount_namespace(project, f"{inside} '{models}:ro' {command}")
    assert (done.returncode, "to be mounted, found nothing there" in done.stderr) == (2, True)


def test_another_producer_in_the_container_is_refused():
    check_producer(producer_digest())
    with pytest.raises(Refusal, match="producer in the container: expected digest 0000 of the launching checkout"):
        check_producer("0000")


EVALUATORS = {"eval", "exec", "compile", "__import__"}
UNSAFE_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
UNSAFE_ATTRIBUTES = {"popen", "unsafe_load", "full_load", "literal_eval"}


def unsafe(node: ast.AST) -> set[str]:
    """What a node does that could execute what it reads, or hand text to a shell."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return {node.func.id} & EVALUATORS
    if isinstance(node, ast.Import | ast.ImportFrom):
        names = {alias.name.split(".")[0] for alias in node.names}
        return (names | {(getattr(node, "module", None) or "").split(".")[0]}) & UNSAFE_MODULES
    if isinstance(node, ast.keyword) and node.arg == "shell":
        return {"shell="}
    if isinstance(node, ast.Attribute):
        return {node.attr} & UNSAFE_ATTRIBUTES
    return set()


def test_the_search_for_unsafe_calls_finds_them():
    text = "import pickle.x\nfrom marshal import loads\neval(a)\nsubprocess.run(b, shell=True)\nyaml.unsafe_load(c)"
    found = set().union(*(unsafe(node) for node in ast.walk(ast.parse(text))))
    assert found == {"pickle", "marshal", "eval", "shell=", "unsafe_load"}


def test_nothing_reads_an_artifact_by_executing_it():
    files = [*ROOT.glob("schemas/**/*.py"), *ROOT.glob("producer/**/*.py"), *ROOT.glob("workflow/**/*.py")]
    assert len(files) > 70
    found = {
        file.name: unsafe(node) for file in files for node in ast.walk(ast.parse(file.read_text())) if unsafe(node)
    }
    assert found == {}


def test_a_label_that_a_rule_would_read_as_a_wildcard_is_refused(project: Workspace):
    file = write_campaign(project, backend_version="lab{plan}", runtime_backend_version="0.32.0")
    done = project.snakemake("-n", "--config", "campaign=small")
    assert done.returncode != 0
    assert "refused: backend_version: expected " in done.stdout + done.stderr
    assert f"found 'lab{{plan}}': {file}" in done.stdout + done.stderr


def test_rules_put_no_free_text_of_a_campaign_into_a_shell_line(project: Workspace):
    """Labels and paths that a shell would act on are in no command that a dry run prints."""
    shutil.copytree(project.root / "config/models/qwen3-tiny", project.root / HOSTILE)
    write_campaign(
        project,
        description="$(touch pwned)",
        backend_version="lab$(pwned)`pwned`;pwned'\"",
        runtime_backend_version="0.32.0",
        deployment={"model": HOSTILE},
    )
    done = project.snakemake("-n", "-p", "--config", "campaign=small")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "producer.run_probe" in done.stdout
    assert "pwned" not in done.stdout
