"""Figures of a whole project, for `make bench`: writes results/bench.json.

demo.*             a demo campaign from nothing, in a copy of the project: all seconds, engine starts apart
producer.breakdown seconds of each cell from engine ready to last point, by kind of step
plan.*             planning 1,000 and 10,000 cells and the GLM list; parsing and a dry run of 1,000 cells
oracle.*           the proof of planned points against the engine's own scheduler
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml
from conftest import ROOT, copy_project
from oracle import prove

from producer.graph import CampaignGraph
from producer.grids import axes
from profiles import profile
from schemas.request import Grid

sys.path.insert(0, str(ROOT / "workflow" / "scripts"))
from plan_campaign import write_plan

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


def wide_campaign(folder: Path, demo: Path, cells: int) -> None:
    """A campaign of `cells` cells over half as many models, each with an imported profile."""
    copy_project(folder)
    file = folder / "config/campaigns/cpu-demo.yaml"
    campaign = yaml.safe_load(file.read_text())
    dense = campaign["deployments"]["dense"]
    deployments = {}
    for number in range(cells // 2):
        model = f"config/models/wide/{number:05}"
        shutil.copytree(folder / dense["model"], folder / model)
        deployments[f"dense{number:05}"] = dense | {"model": model}
    file.write_text(yaml.safe_dump(campaign | {"deployments": deployments}, sort_keys=False))
    (source,) = (demo / "profile").glob("dense-*.json")
    os.chdir(folder)
    graph = CampaignGraph("cpu-demo")
    for name in graph.deployments:
        target = graph.profile_file(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)


def planning_seconds(cells: int) -> float:
    """CPU seconds from a campaign file of `cells` cells, with its profiles, to its plan."""
    began = time.process_time()
    assert len(CampaignGraph("cpu-demo").planned("formal").plan.cells) == cells
    return time.process_time() - began


def bench_plan(folder: Path, demo: Path) -> dict[str, float]:
    """Seconds of planning, parsing and a dry run; the empty Snakefile is Snakemake's own share."""
    figures: dict[str, float] = {}
    for cells, repeats in ((1000, REPEATS), (10_000, 1)):
        campaign = folder / str(cells)
        campaign.mkdir()
        wide_campaign(campaign, demo, cells)
        figures[f"cells_{cells}_seconds"] = median([planning_seconds(cells) for _ in range(repeats)])
    figures["cells_10k_growth"] = figures["cells_10000_seconds"] / figures["cells_1000_seconds"]
    empty = folder / "empty"
    empty.mkdir()
    (empty / "Snakefile").write_text("rule all:\n")
    parse, bare, dry = [], [], []
    for _ in range(REPEATS):
        parse.append(seconds_of("snakemake", "--list-rules", cwd=folder / "1000"))
        bare.append(seconds_of("snakemake", "--list-rules", cwd=empty))
    dry.append(seconds_of("snakemake", "-n", "--quiet", cwd=folder / "1000"))
    os.chdir(ROOT)
    return figures | {
        "parse_seconds": median(parse) - median(bare),
        "empty_snakefile_seconds": median(bare),
        "parse_to_empty_ratio": median([a / b for a, b in zip(parse, bare, strict=True)]),
        "dry_run_1000_cells_seconds": median(dry),
        "glm_seconds": bench_glm(folder),
    }


def bench_glm(folder: Path) -> float:
    """Seconds from the GLM-5.3-Flash campaign to the files of its 577 points, warm."""
    seconds = []
    for number in range(REPEATS + 1):
        began = time.monotonic()
        write_plan(CampaignGraph("glm-5.3-flash-gb300-tp4", results=folder / f"glm{number}"), "formal")
        seconds.append(time.monotonic() - began)
    return median(seconds[1:])


def bench_oracle() -> dict[str, float]:
    """Points a second of the proof against the engine's own scheduler, over the demo's dense grid."""
    dense = profile(free_blocks=1023, max_num_tokens=2048, max_model_len=4096)
    proof = prove(dense, axes.candidates(Grid(), dense).points())
    return {"points": proof.points, "points_per_second": proof.points / proof.seconds}


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        demo_folder = Path(temporary) / "demo"
        demo_folder.mkdir()
        demo, breakdown = bench_demo(demo_folder)
        wide = Path(temporary) / "wide"
        wide.mkdir()
        plan = bench_plan(wide, demo_folder / "results" / "cpu-demo")
        os.chdir(ROOT)
    figures = {"demo": demo, "producer": {"breakdown": breakdown}, "plan": plan, "oracle": bench_oracle()}
    target = ROOT / "results" / "bench.json"
    target.parent.mkdir(exist_ok=True)
    target.write_bytes(json.dumps(figures, indent=2).encode())
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
