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
        assert re.search(r"^    threads: 8$", block, re.M)
        resources = re.search(r"^    resources: (.*)$", block, re.M)[1].split(", ")
        assert {"runtime=120", "slurm_partition=gpu", f"gres={gres}", "mem_mb=64000"} <= set(resources)


def test_defaults_on_the_command_line_wipe_nothing_that_a_rule_asks_for(project: Workspace):
    done = project.snakemake("-n", "--profile", "slurm", "--default-resources", "slurm_account=x", *CONFIG)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("gres=gpu:") == 4


def test_everything_else_runs_where_the_driver_is(project: Workspace):
    done = project.snakemake("-n", "--profile", "slurm", *CONFIG)
    elsewhere = set(re.findall(r"^rule (\w+):$", done.stdout, re.M)) - {"all"}
    assert elsewhere == {"probe"}


def test_rules_hold_no_logic_and_no_scripts(project: Workspace):
    for file in [project.root / "Snakefile", *(project.root / "workflow" / "rules").glob("*.smk")]:
        text = file.read_text()
        assert not re.search(r"^\s*(script|notebook|run):", text, re.M), file
        assert "directory(" not in text, file
