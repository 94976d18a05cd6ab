"""Figures of a whole project, for `make bench`: writes results/bench.json.

demo.*             a demo campaign from nothing, in a copy of the project: all seconds, engine starts apart
producer.breakdown seconds of each cell from engine ready to last point, by kind of step
plan.*             what a campaign of 1,000 cells costs to parse and to look at; ratios to an empty Snakefile
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml
from conftest import ROOT, copy_project

from producer.graph import CampaignGraph
from schemas.canonical import read_model, write_model
from schemas.profile import Profile

CELLS = 1000
REPEATS = 5


def seconds_of(*command: str, cwd: Path) -> float:
    began = time.monotonic()
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    elapsed = time.monotonic() - began
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return elapsed


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def bench_demo(folder: Path) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """The demo from nothing: its seconds, and the breakdown of each cell."""
    copy_project(folder)
    total = seconds_of("snakemake", cwd=folder)
    root = folder / "results" / "cpu-demo"
    receipts = {file.parent.name: json.loads(file.read_text()) for file in sorted(root.glob("cells/*/receipt.json"))}
    starts = sum(receipt["engine_start_seconds"] for receipt in receipts.values())
    measuring = sum(receipt["measuring_seconds"] for receipt in receipts.values())
    return (
        {
            "seconds": total,
            "cell_engine_start_seconds": starts,
            "measuring_seconds": measuring,
            "probes_and_everything_else_seconds": total - starts - measuring,
            "cpus": float(os.cpu_count() or 0),
        },
        {
            name: receipt["breakdown"]
            | {"all": receipt["measuring_seconds"], "seeding_ratio": receipt["seeding"]["ratio"]}
            for name, receipt in receipts.items()
        },
    )  # fmt: skip


def wide_campaign(folder: Path, demo: Path) -> None:
    """A campaign of CELLS cells over CELLS / 2 deployments, with a profile for each."""
    copy_project(folder)
    file = folder / "config/campaigns/cpu-demo.yaml"
    campaign = yaml.safe_load(file.read_text())
    dense = campaign["deployments"]["dense"]
    deployments = {}
    for number in range(CELLS // 2):
        limits = dense["limits"] | {"max_model_len": 3000 + number}
        deployments[f"dense{number:04}"] = dense | {"limits": limits}
    file.write_text(yaml.safe_dump(campaign | {"deployments": deployments}, sort_keys=False))
    (source,) = (demo / "profile").glob("dense-*.json")
    profile = read_model(Profile, source, "profile")
    os.chdir(folder)
    graph = CampaignGraph("cpu-demo")
    for name, deployment in graph.request.deployments.items():
        limits = deployment.limits
        change = {"probe_digest": graph.probes[name], "max_model_len": limits.max_model_len}
        write_model(graph.profile_file(name), profile.model_copy(update=change))


def bench_plan(folder: Path, demo: Path) -> dict[str, float]:
    """Seconds of planning, parsing and a dry run; the empty Snakefile is Snakemake's own share."""
    wide_campaign(folder, demo)
    planning = []
    for _ in range(REPEATS):
        began = time.process_time()
        graph = CampaignGraph("cpu-demo")
        cells = len(graph.planned("formal").plan.cells)
        planning.append(time.process_time() - began)
    assert cells == CELLS
    empty = folder / "empty"
    empty.mkdir()
    (empty / "Snakefile").write_text("rule all:\n")
    parse, bare, dry = [], [], []
    for _ in range(REPEATS):
        parse.append(seconds_of("snakemake", "--list-rules", cwd=folder))
        bare.append(seconds_of("snakemake", "--list-rules", cwd=empty))
        dry.append(seconds_of("snakemake", "-n", "--quiet", cwd=folder))
    return {
        "cells": cells,
        "parse_seconds": median(parse) - median(bare),
        "planning_cpu_seconds": median(planning),
        "empty_snakefile_seconds": median(bare),
        "parse_to_empty_ratio": median([a / b for a, b in zip(parse, bare, strict=True)]),
        "dry_run_seconds": median(dry),
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        demo_folder = Path(temporary) / "demo"
        demo_folder.mkdir()
        demo, breakdown = bench_demo(demo_folder)
        wide = Path(temporary) / "wide"
        wide.mkdir()
        plan = bench_plan(wide, demo_folder / "results" / "cpu-demo")
        os.chdir(ROOT)
    figures = {"demo": demo, "producer": {"breakdown": breakdown}, "plan": plan}
    target = ROOT / "results" / "bench.json"
    target.parent.mkdir(exist_ok=True)
    target.write_bytes(json.dumps(figures, indent=2).encode())
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
