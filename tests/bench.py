"""Figures of a whole project, for `make bench`: writes results/bench.json.

Sections: `measuring` (demo, producer, repeat, seeding), `slurm`, `verify`, `probe` and `import`; after `make demo`
also `planning` (plan and oracle) and `scale`.

demo.*             a demo campaign from nothing, in a copy of the project: all seconds, engine starts apart
producer.*         of each demo cell: the part of the time that is idle, our own microseconds in a measured decode step
                   at batch 8, seeding, seconds by kind of step
seeding_of_the_577_points.*  on the engine's own scheduler, without a model
repeat.*           the demo three times: how far the retained values of the same point lie apart
scale.*            10,000 cells: parse, dry run beside a bare Snakefile of the same shape, status; after `make demo`
slurm.*            seconds of a job beyond the producer's own, of two cells on the tests' Slurm
plan.*             planning 1,000 and 10,000 cells and the GLM list; parsing and a dry run of 1,000 cells
probe.*            an engine of the demo started and observed: seconds of the bare start, and of the records above it
oracle.*           the proof of planned points against the engine's own scheduler
verify.*           cells of 577 points x 10 raw samples, merged, verified and published, beside the original's reader:
                   CPU seconds and peak memory of 1 and 4 ranks; growth from 20 to 200 cells
import.*           probe records of 64 ranks x 6 groups x 64 layers, both phases: read, diagnosed and made a profile,
                   beside `json.loads` of the same bytes; with pools of one size, and of another size on every rank
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from bare import bare_workflow
from cluster import SlurmCluster
from conftest import CONSUMER, ROOT, copy_project
from native_cells import write_campaign
from oracle import measure_cell, prove
from wide import wide_campaign

from producer.admission import drop_rule
from producer.attempts import read_attempts
from producer.graph import CampaignGraph
from producer.grids import axes, candidates, glm53flash
from producer.seeding import distinct_prefix_tokens
from profiles import profile
from schemas.canonical import read_model
from schemas.plan import Plan
from schemas.points import PHASES
from schemas.profile import Profile
from schemas.request import Grid

sys.path.insert(0, str(ROOT / "workflow" / "scripts"))
from plan_campaign import write_plan

REPEATS = 5
SCALE_REPEATS = 2
PROBED = "hybrid"
"""The demo's deployment whose start is observed: recurrent layers and attention in one pool."""

VERIFY_POINTS = 577
VERIFY_CELLS = (20, 200)


def seconds_of(*command: str, cwd: Path) -> float:
    began = time.monotonic()
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    elapsed = time.monotonic() - began
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return elapsed


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def cells_of(root: Path) -> dict[str, Path]:
    return {"-".join(folder.name.split("-")[:2]): folder for folder in sorted((root / "cells").iterdir())}


def overhead_us(folder: Path, batch_size: int) -> float | None:
    """Microseconds of our own code in a measured step at `batch_size`, in the middle of all samples."""
    artifact = json.loads((folder / "benchmark.json").read_text())
    seconds = [
        raw["benchmark_sample"]["producer_overhead_seconds"]
        for row in artifact["results"]
        if row["point"]["batch_size"] == batch_size
        for raw in row["fpms"][0]["benchmark_measurement"]["raw_fpms"]
    ]
    return 1e6 * median(seconds) if seconds else None


def bench_producer(root: Path) -> dict[str, dict[str, object]]:
    """Where each cell's seconds went."""
    figures: dict[str, dict[str, object]] = {}
    for name, folder in cells_of(root).items():
        receipt = json.loads((folder / "receipt.json").read_text())
        figures[name] = {
            "idle_fraction": receipt["idle_fraction"],
            "overhead_us_per_step_at_batch_8": overhead_us(folder, 8) if name.startswith("decode") else None,
            "overhead_us_per_forward": receipt["overhead"]["us_per_forward"],
            "seeding_ratio": receipt["seeding"]["ratio"],
            "rejected_repetitions": receipt["rejected_repetitions"],
            "writing_seconds": receipt["writing_seconds"],
            "seconds": receipt["breakdown"] | {"all": receipt["measuring_seconds"]},
        }
    return figures


def bench_demo(folder: Path) -> dict[str, float]:
    """The demo from nothing: its seconds."""
    copy_project(folder)
    total = seconds_of("snakemake", cwd=folder)
    receipts = [
        json.loads((cell / "receipt.json").read_text()) for cell in cells_of(folder / "results" / "cpu-demo").values()
    ]
    starts = sum(receipt["engine_start_seconds"] for receipt in receipts)
    measuring = sum(receipt["measuring_seconds"] for receipt in receipts)
    return {
        "seconds": total,
        "cell_engine_start_seconds": starts,
        "measuring_seconds": measuring,
        "probes_and_everything_else_seconds": total - starts - measuring,
        "cpus": float(os.cpu_count() or 0),
    }


def retained(root: Path) -> dict[tuple[str, int], float]:
    """Published value of each point, in seconds, by cell and id."""
    values = {}
    for name, folder in cells_of(root).items():
        for group in json.loads((folder / "merged.json").read_text())["iteration_groups"]:
            values[name, group["benchmark_id"]] = group["wall_time"]
    return values


def bench_repeats(roots: list[Path]) -> dict[str, dict[str, float]]:
    """Spread of the same point over whole campaigns, (largest - smallest) / middle value, per phase."""
    runs = [retained(root) for root in roots]
    figures = {}
    for phase in ("prefill", "decode"):
        spreads = sorted(
            (max(values) - min(values)) / median(values)
            for point in runs[0]
            if point[0].startswith(phase)
            for values in [[run[point] for run in runs]]
        )
        figures[phase] = {
            "points": len(spreads),
            "median": median(spreads),
            "p90": spreads[int(0.9 * len(spreads))],
            "largest": spreads[-1],
        }
    return figures


def bench_seeding() -> dict[str, float]:
    """Prefix tokens computed over distinct prefix tokens of the 577-point list, on the engine's own scheduler."""
    glm = read_model(Profile, ROOT / "config/profiles/glm-5.3-flash-gb300-tp4.json", "profile")
    figures = {}
    for phase in PHASES:
        points = candidates(glm53flash.ORIGIN, Grid(), glm).of(phase).points()
        kept = tuple(point for point in points if drop_rule(glm, point) is None)
        cell = measure_cell(glm, phase, kept)
        ranks = [rank for line in cell.lines for rank in line.ranks]
        computed = sum(seed.computed_tokens - 1 for rank in ranks for seed in rank.seeds)
        figures[f"{phase}_points"] = len(cell.lines)
        figures[f"{phase}_ratio"] = computed / distinct_prefix_tokens(kept, glm.cache_hit_alignment_tokens)
        figures[f"{phase}_rejected"] = sum(len(rank.rejections) for rank in ranks)
    return figures


def planning_seconds(cells: int) -> float:
    """CPU seconds from a campaign file of `cells` cells, with its profiles, to its plan."""
    began = time.process_time()
    assert len(CampaignGraph("cpu-demo").planned("formal").plan.cells) == cells
    return time.process_time() - began


def bench_plan(folder: Path, demo: Path) -> dict[str, float]:
    """Seconds of planning, parsing and a dry run; the empty Snakefile is Snakemake's own share."""
    figures: dict[str, float] = {}
    (source,) = (demo / "profile").glob("dense-*.json")
    for cells, repeats in ((1000, REPEATS), (10_000, 1)):
        campaign = folder / str(cells)
        campaign.mkdir()
        wide_campaign(campaign, source, cells)
        os.chdir(campaign)
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
        graph = CampaignGraph("glm-5.3-flash-gb300-tp4")
        write_plan(graph, "formal", folder / f"glm{number}")
        seconds.append(time.monotonic() - began)
    return median(seconds[1:])


def bench_oracle() -> dict[str, float]:
    """Points a second of the proof against the engine's own scheduler, over the demo's dense grid."""
    dense = profile(free_blocks=1023, max_num_tokens=2048, max_model_len=4096)
    proof = prove(dense, axes.candidates(Grid(), dense).points())
    return {"points": proof.points, "points_per_second": proof.points / proof.seconds}


def cpu_seconds_of(*command: str, cwd: Path) -> float:
    """User and system seconds of a command and its children: a machine that is shared adds nothing to them."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds_of(*command, cwd=cwd)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def bench_scale(folder: Path) -> dict[str, object]:
    """10,000 cells of 5,000 models beside a bare Snakefile of the same shape: parse, dry run, status."""
    (source,) = (ROOT / "results" / "cpu-demo" / "profile").glob("dense-*.json")
    ours, bare, empty = folder / "ours", folder / "bare", folder / "empty"
    for path in (ours, bare, empty):
        path.mkdir()
    wide_campaign(ours, source, 10_000)
    bare_workflow(bare, 10_000)
    (empty / "Snakefile").write_text("rule all:\n")
    status = (sys.executable, "workflow/scripts/status.py", "--campaign", "config/campaigns/cpu-demo.yaml", "--json")
    first = cpu_seconds_of(*status, cwd=ours)  # plans the campaign, once
    parse = [(cpu_seconds_of("snakemake", "--list-rules", cwd=path)) for path in (ours, empty) for _ in range(REPEATS)]
    dry = [
        (cpu_seconds_of("snakemake", "-n", cwd=ours), cpu_seconds_of("snakemake", "-n", cwd=bare))
        for _ in range(SCALE_REPEATS)
    ]
    return {
        "scale": {
            "plan_10k_cpu_seconds": first,
            "parse_10k_cpu_seconds_above_snakemake": median(parse[:REPEATS]) - median(parse[REPEATS:]),
            "dryrun_10k_cpu_seconds": median([a for a, _ in dry]),
            "dryrun_10k_bare_cpu_seconds": median([b for _, b in dry]),
            "dryrun.ratio_10k": median([a / b for a, b in dry]),
            "status.seconds_10k": median([seconds_of(*status, cwd=ours) for _ in range(REPEATS)]),
            "peak_mib_of_all": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024,
        }
    }


def bench_slurm(folder: Path) -> dict[str, object]:
    """The demo's dense model through a Slurm of our own: what a job takes beyond the producer's own seconds.

    Of each job: from its start to its end in Slurm's book (whole seconds), without what lies between the beginning and
    the end of the attempt. It is spent on Snakemake's two processes in the job, before and after.
    """
    copy_project(folder)
    file = folder / "config/campaigns/cpu-demo.yaml"
    campaign = yaml.safe_load(file.read_text())
    deployments = {"dense": campaign["deployments"]["dense"]}
    file.write_text(yaml.safe_dump(campaign | {"deployments": deployments}, sort_keys=False))
    cluster = SlurmCluster()
    cluster.start()
    try:
        seconds_of("snakemake", "--profile", "slurm", "--jobs", "1", cwd=folder)
        book = cluster.ended()
    finally:
        cluster.stop()
    beyond = []
    for attempts in folder.glob("results/cpu-demo/cells/*/attempts.jsonl"):
        (attempt,) = read_attempts(attempts)
        job = book[attempt["slurm_job_id"]]
        whole = datetime.fromisoformat(job["EndTime"]) - datetime.fromisoformat(job["StartTime"])
        own = datetime.fromisoformat(attempt["ended_at"]) - datetime.fromisoformat(attempt["started_at"])
        beyond.append((whole - own).total_seconds())
    return {"slurm.overhead_seconds": beyond}


def bench_measuring(folder: Path) -> dict[str, object]:
    """The demo three times over."""
    roots = []
    for number in range(3):
        (folder / str(number)).mkdir()
        figures = bench_demo(folder / str(number))
        roots.append((figures, folder / str(number) / "results" / "cpu-demo"))
    return {
        "demo": roots[0][0],
        "producer": bench_producer(roots[0][1]),
        "repeat": bench_repeats([root for _, root in roots]),
        "seeding_of_the_577_points": bench_seeding(),
    }


def bench_planning(folder: Path) -> dict[str, object]:
    return {"plan": bench_plan(folder, ROOT / "results" / "cpu-demo"), "oracle": bench_oracle()}


def figures_of(*command: object) -> dict[str, Any]:
    """What a command prints as its last line, one JSON object."""
    done = subprocess.run([*map(str, command)], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def bench_reading(folder: Path, ranks: int) -> dict[str, float]:
    """One cell judged by us and by the original, in turns, each time in a process of its own.

    Raises:
        SystemExit: the two do not publish the same latencies.
    """
    plan_file = write_campaign(folder, 1, VERIFY_POINTS, ranks)
    (entry,) = read_model(Plan, plan_file, "plan").cells
    version = read_model(Plan, plan_file, "plan").runtime_backend_version
    artifacts = folder / "artifacts"
    ours, original = [], []
    for _ in range(REPEATS):
        ours.append(figures_of(sys.executable, "tests/judge_once.py", plan_file))
        original.append(figures_of(CONSUMER, "tests/original_reader.py", artifacts, folder / "model", version))
        if ours[-1]["latencies"] != original[-1]["latencies"] or ours[-1]["rows"] != VERIFY_POINTS:
            sys.exit(f"{entry.name}: the original publishes other latencies")
    own, other = (median([each["cpu_seconds"] for each in figures]) for figures in (ours, original))
    own_peak, other_peak = (max(each["peak_mib"] for each in figures) for figures in (ours, original))
    return {
        "mib_of_artifacts": sum(file.stat().st_size for file in artifacts.iterdir()) / 2**20,
        "cpu_seconds": own,
        "seconds": median([each["seconds"] for each in ours]),
        "points_per_second": VERIFY_POINTS / own,
        "peak_mib": own_peak,
        "before_mib": ours[0]["before_mib"],
        "original_cpu_seconds": other,
        "original_peak_mib": other_peak,
        "original_before_mib": original[0]["before_mib"],
        "ratio_to_original": other / own,
        "peak_ratio_to_original": own_peak / other_peak,
    }


def bench_campaign(folder: Path, cells: int) -> dict[str, float]:
    """CPU seconds a cell, and peak memory, of so many cells of one rank in one process; the table of all apart."""
    figures = figures_of(sys.executable, "tests/judge_once.py", write_campaign(folder, cells, VERIFY_POINTS, 1))
    return {
        "cpu_seconds_per_cell": (figures["cpu_seconds"] - figures["table_cpu_seconds"]) / cells,
        "peak_mib": figures["cells_peak_mib"],
        "table_cpu_seconds_per_cell": figures["table_cpu_seconds"] / cells,
        "table_peak_mib": figures["peak_mib"],
    }


def bench_verify(folder: Path) -> dict[str, object]:
    figures: dict[str, Any] = {
        f"verify.ranks_{ranks}": bench_reading(folder / f"ranks{ranks}", ranks) for ranks in (1, 4)
    }
    few, many = (bench_campaign(folder / f"cells{cells}", cells) for cells in VERIFY_CELLS)
    growth = many["cpu_seconds_per_cell"] / few["cpu_seconds_per_cell"]
    return figures | {"verify.cells_20": few, "verify.cells_200": many, "verify.growth": growth}


def bench_probe(folder: Path) -> dict[str, object]:
    """What observing costs above the bare engine start: the median of starts in processes of their own, in seconds."""
    starts = [figures_of(sys.executable, "tests/observe_once.py", PROBED) for _ in range(REPEATS)]
    figures = {name: median([start[name] for start in starts]) for name in starts[0]}
    observing = median([sum(start.values()) - start["start_seconds"] for start in starts])
    share = observing / figures["start_seconds"]
    return {"probe": figures | {"seconds": observing, "share_of_start": share, "starts": len(starts)}}


def bench_import_of(folder: Path, pools: str) -> dict[str, float]:
    """The wide records beside their bare JSON, in turns, each time in a process of its own."""
    folder.mkdir()
    wide = (sys.executable, "tests/wide_records.py")
    megabytes = figures_of(*wide, "write", folder, pools)["mib"]
    bare, ours = [], []
    for _ in range(REPEATS):
        bare.append(figures_of(*wide, "parse", folder, pools))
        ours.append(figures_of(*wide, "import", folder, pools))
    return {
        "mib_of_records": megabytes,
        **{key: median([each[key] for each in ours]) for key in ours[0] if key.endswith("seconds")},
        "peak_mib": max(each["peak_mib"] for each in ours),
        "json_cpu_seconds": median([each["cpu_seconds"] for each in bare]),
        "json_peak_mib": max(each["peak_mib"] for each in bare),
        "ratio_to_json": median([a["cpu_seconds"] / b["cpu_seconds"] for a, b in zip(ours, bare, strict=True)]),
    }


def bench_import(folder: Path) -> dict[str, object]:
    return {f"import.{pools}_pools": bench_import_of(folder / pools, pools) for pools in ("equal", "other")}


SECTIONS: dict[str, Callable[[Path], dict[str, object]]] = {
    "measuring": bench_measuring,
    "planning": bench_planning,
    "probe": bench_probe,
    "scale": bench_scale,
    "slurm": bench_slurm,
    "verify": bench_verify,
    "import": bench_import,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", default=list(SECTIONS), help=" ".join(SECTIONS))
    arguments = parser.parse_args()
    target = ROOT / "results" / "bench.json"
    figures: dict[str, object] = json.loads(target.read_text()) if target.exists() else {}
    for section in arguments.sections:
        with tempfile.TemporaryDirectory() as temporary:
            figures |= SECTIONS[section](Path(temporary))
        os.chdir(ROOT)
    target.parent.mkdir(exist_ok=True)
    target.write_bytes(json.dumps(figures, indent=2).encode())
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
