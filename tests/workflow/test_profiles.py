"""The profiles, and the example campaign for a GPU: what would be submitted, and as what."""

import re

from conftest import Workspace

CONFIG = ("--config", "campaign=qwen3-8b-h200")


def test_the_slurm_profile_submits_engines_with_their_resources(project: Workspace):
    done = project.snakemake("-n", "--profile", "slurm", *CONFIG)
    assert done.returncode == 0, done.stderr
    blocks = re.findall(r"\nrule probe:\n(?:    .*\n)+", done.stdout)
    assert len(blocks) == 4
    by_deployment = {re.search(r"deployment=(\w+)", block)[1]: block for block in blocks}
    for name, gres in (("tp1", "gpu:1"), ("tp2", "gpu:2")):
        block = by_deployment[name]
        resources = re.search(r"^    resources: (.*)$", block, re.M)[1].split(", ")
        assert {"cpus_per_task=8", "runtime=120", "slurm_partition=gpu", f"gres={gres}", "mem_mb=64000"} <= set(
            resources
        )


def resources_of(output: str, rule: str) -> list[list[str]]:
    """The resources of each job of a rule in a dry run."""
    blocks = re.findall(rf"\nrule {rule}:\n(?:    .*\n)+", output)
    return [re.search(r"^    resources: (.*)$", block, re.M)[1].split(", ") for block in blocks]


def test_defaults_on_the_command_line_wipe_nothing_that_a_rule_asks_for(project: Workspace):
    """They replace every default of a profile (snakemake#3429), so what an engine needs is on its rule; and what the
    campaign leaves open is not, or the rule's nothing would win over the command line."""
    done = project.snakemake("-n", "--profile", "slurm", "--default-resources", "slurm_account=x", *CONFIG)
    assert done.returncode == 0, done.stderr
    jobs = resources_of(done.stdout, "probe")
    gres = sorted(resource for resources in jobs for resource in resources if resource.startswith("gres="))
    assert gres == ["gres=gpu:1", "gres=gpu:1", "gres=gpu:2", "gres=gpu:2"]
    for resources in jobs:
        asked = {"cpus_per_task=8", "runtime=120", "slurm_partition=gpu", "mem_mb=64000", "slurm_account=x"}
        assert asked <= set(resources)


def test_minutes_of_a_profile_or_the_command_line_are_minutes(project: Workspace):
    """snakemake#4039: releases took them for seconds. test_slurm.py shows what Slurm got."""
    file = project.root / "slurm" / "profile.yaml"
    arguments = ("-n", "--profile", "slurm", *CONFIG)
    line = project.snakemake(*arguments, "--set-resources", "probe:runtime=130")
    file.write_text(file.read_text() + "set-resources:\n  probe:\n    runtime: 130\n")
    profile = project.snakemake(*arguments)
    for done in (line, profile):
        assert ["runtime=130" in resources for resources in resources_of(done.stdout, "probe")] == [True] * 4


def test_only_the_rules_that_start_an_engine_are_submitted(project: Workspace):
    files = [project.root / "Snakefile", *(project.root / "workflow" / "rules").glob("*.smk")]
    text = "\n".join(file.read_text() for file in files)
    rules = set(re.findall(r"^(?:rule|checkpoint) (\w+):", text, re.M))
    local = {
        name
        for block in re.findall(r"^localrules:\n((?:    \w+,\n)+)", text, re.M)
        for name in re.findall(r"\w+", block)
    }
    assert rules - local == {"probe", "collect_cell"}


def test_rules_hold_no_logic_and_no_scripts(project: Workspace):
    for file in [project.root / "Snakefile", *(project.root / "workflow" / "rules").glob("*.smk")]:
        text = file.read_text()
        assert not re.search(r"^\s*(script|notebook|run):", text, re.M), file
        assert "directory(" not in text, file
