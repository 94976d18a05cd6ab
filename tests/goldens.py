"""Rule graphs and dry runs of whole campaigns, as they were when somebody last looked: `make goldens` writes them anew.

A golden is a file of tests/fixtures/goldens: `<campaign>.mermaid`, the rule graph, and `<campaign>.jsonl`, the lines of
`snakemake -n --logger passgrid`. Both are sorted, because Snakemake's order changes from process to process; so do the
numbers of the graph's nodes, which have the rules' names here, and its colours, left out here, follow the number of
rules. Nothing else is changed. Of very many cells the golden is a summary.
"""

import argparse
import difflib
import hashlib
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from conftest import ROOT, Workspace, copy_project
from wide import wide_campaign

GOLDENS = ROOT / "tests" / "fixtures" / "goldens"
CAMPAIGNS = ROOT / "tests" / "campaigns"
PROBES = ROOT / "tests" / "fixtures" / "probes"
CORES = "64"
"""Threads of a job are cut to the driver's cores, and machines differ."""


def lines_of(workspace: Workspace, *arguments: str) -> list[str]:
    """The sorted lines of a dry run."""
    done = workspace.snakemake("-n", *arguments, "--cores", CORES, "--logger", "passgrid")
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(done.stdout.splitlines())


def rule_graph(workspace: Workspace, *arguments: str) -> str:
    """The rule graph as mermaid text: a node for each rule, then an edge for each pair."""
    done = workspace.snakemake("--rulegraph", "mermaid-js", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    names = dict(re.findall(r"^\t(id\d+)\[(\w+)\]$", done.stdout, re.M))
    edges = [(names[one], names[other]) for one, other in re.findall(r"^\t(id\d+) --> (id\d+)$", done.stdout, re.M)]
    read = len(names) + len(edges) + len(re.findall(r"^\tstyle id\d+ ", done.stdout, re.M))
    assert read == len(re.findall(r"^\t", done.stdout, re.M)), "the graph was not read whole"
    nodes = [f"    {name}" for name in sorted(names.values())]
    return "\n".join(["flowchart TB", *nodes, *(f"    {one} --> {other}" for one, other in sorted(edges))]) + "\n"


def summary(lines: list[str]) -> str:
    """How many jobs of each rule, a digest over all lines, and the lines at both ends."""
    (totals,) = [line for line in map(json.loads, lines) if line["event"] == "totals"]
    text = "".join(f"{line}\n" for line in lines)
    figures = totals | {"lines": len(lines), "sha256": hashlib.sha256(text.encode()).hexdigest()}
    return "\n".join([json.dumps(figures, sort_keys=True), *lines[:2], *lines[-2:]]) + "\n"


def whole(lines: list[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def write_records(deployment: str, files: Iterable[Path]) -> None:
    """The recorded launch of a deployment in the place of each phase's probe: each has an attempt of its own."""
    for file in files:
        record = json.loads((PROBES / f"{deployment}.json").read_text()) | {"phase": file.stem}
        for part in (record, *record["workers"], *record["schedulers"]):
            part["attempt_id"] = hashlib.sha256(file.stem.encode()).hexdigest()[:32]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(record))


def with_profiles(folder: Path) -> Workspace:
    """cpu-demo with the profiles that are imported from the recorded probes."""
    workspace = copy_project(folder)
    imports = [line for line in map(json.loads, lines_of(workspace)) if line.get("rule") == "import_profile"]
    for job in imports:
        write_records(job["wildcards"]["deployment"], [workspace.root / file for file in job["input"]])
    done = workspace.snakemake(*(file for job in imports for file in job["output"]))
    assert done.returncode == 0, done.stdout + done.stderr
    return workspace


def with_own_campaigns(folder: Path) -> Workspace:
    """The project with the campaigns of the tests beside its own."""
    workspace = copy_project(folder)
    for file in CAMPAIGNS.rglob("*.*"):
        target = folder / "config" / file.relative_to(CAMPAIGNS)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.read_bytes())
    return workspace


def with_many_cells(folder: Path) -> Workspace:
    (folder / "demo").mkdir()
    demo = with_profiles(folder / "demo")
    (profile,) = (demo.root / "results/cpu-demo/profile").glob("dense-*.json")
    (folder / "wide").mkdir()
    return wide_campaign(folder / "wide", profile, 10_000)


class Golden(NamedTuple):
    """A campaign, the workspace in which it is run, and how its lines are kept."""

    prepare: Callable[[Path], Workspace]
    campaign: str
    keep: Callable[[list[str]], str] = whole


TABLE = {
    "cpu-demo-unprobed": Golden(copy_project, "cpu-demo"),
    "cpu-demo": Golden(with_profiles, "cpu-demo"),
    "glm-5.3-flash-gb300-tp4": Golden(copy_project, "glm-5.3-flash-gb300-tp4"),
    "qwen3-moe-h200": Golden(with_own_campaigns, "qwen3-moe-h200"),
    "cells-10k": Golden(with_many_cells, "cpu-demo", summary),
}


def made(name: str, folder: Path) -> dict[str, str]:
    """File name -> text of a golden, from the project as it is; `folder` is empty."""
    golden = TABLE[name]
    workspace, config = golden.prepare(folder), ("--config", f"campaign={golden.campaign}")
    return {
        f"{name}.mermaid": rule_graph(workspace, *config),
        f"{name}.jsonl": golden.keep(lines_of(workspace, *config)),
    }


def difference(file: str, text: str) -> str:
    """Unified diff from the golden to `text`; empty when they are equal."""
    golden = GOLDENS / file
    before = golden.read_text() if golden.exists() else ""
    lines = (before.splitlines(keepends=True), text.splitlines(keepends=True))
    return "".join(difflib.unified_diff(*lines, fromfile=f"golden {file}", tofile=f"now {file}", n=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("campaigns", nargs="*", default=list(TABLE), help=" ".join(TABLE))
    GOLDENS.mkdir(exist_ok=True)
    for name in parser.parse_args().campaigns:
        with tempfile.TemporaryDirectory() as folder:
            for file, text in made(name, Path(folder)).items():
                sys.stdout.write(difference(file, text) or f"{file}: as it was\n")
                (GOLDENS / file).write_text(text)


if __name__ == "__main__":
    main()
