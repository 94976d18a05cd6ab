"""The tests' own Slurm, the real demo campaign, measured once for all tests, and throw-away copies of the project."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from cluster import SlurmCluster, Unavailable

from producer.source_digest import producer_digest

ROOT = Path(__file__).parent.parent
PROJECT = ("Snakefile", "workflow", "config", "profiles", "slurm")
CONSUMER = ROOT / ".consumer-venv" / "bin" / "python"
MEASURING = {"probe", "collect_cell"}


class Job(NamedTuple):
    """One job of a dry run."""

    rule: str
    output: str


class Workspace:
    """A copy of the project in which a test may edit and run whatever it likes."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def snakemake(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["snakemake", *arguments], cwd=self.root, capture_output=True, text=True, timeout=600, check=False
        )

    def dry_run(self, *arguments: str) -> list[Job]:
        done = self.snakemake("-n", *arguments, "--logger", "passgrid")
        assert done.returncode == 0, done.stdout + done.stderr
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        totals = [line for line in lines if line["event"] == "totals"][-1]
        jobs = [Job(line["rule"], ", ".join(line["output"])) for line in lines if line["event"] == "job"]
        assert len(jobs) == totals["total"], "the dry run was not read whole"
        return [job for job in jobs if job.rule not in ("all", "plan", "smoke", "repeatability")]

    def measured_by(self, *arguments: str) -> list[str]:
        """Folder names of the probes and cells that a run would measure."""
        jobs = self.dry_run(*arguments)
        return sorted({Path(job.output.split(",")[0]).parent.name for job in jobs if job.rule in MEASURING})

    def script(self, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """One of the project's scripts, as a rule would run it."""
        command = [sys.executable, f"workflow/scripts/{name}.py", *arguments]
        return subprocess.run(command, cwd=self.root, capture_output=True, text=True, timeout=600, check=False)

    def edit(self, file: str, old: str, new: str) -> None:
        path = self.root / file
        text = path.read_text()
        assert old in text, f"{old!r} is not in {file}"
        path.write_text(text.replace(old, new, 1))

    def cell(self, prefix: str, scope: str = "") -> Path:
        """The one cell folder whose name starts with `prefix`."""
        (folder,) = (self.root / "results/cpu-demo" / scope / "cells").glob(f"{prefix}-*")
        return folder


@pytest.fixture(scope="session")
def cluster() -> Iterator[SlurmCluster | Unavailable]:
    """A Slurm for the whole session, or why there is none.

    Also what runs no job wants it: with Slurm's commands installed and no controller that answers, each start of
    snakemake takes ten seconds longer (the executor plugin asks scontrol while it is imported).
    """
    cluster = SlurmCluster()
    try:
        cluster.start()
    except Unavailable as reason:
        if os.environ.get("PASSGRID_REQUIRE_SLURM") == "1":
            pytest.exit(f"no Slurm: {reason}", 1)
        yield reason
        return
    yield cluster
    cluster.stop()


@pytest.fixture(scope="session")
def slurm(cluster: SlurmCluster | Unavailable) -> SlurmCluster:
    if isinstance(cluster, Unavailable):
        pytest.skip(f"no Slurm: {cluster}")
    return cluster


def refuse_stale(results: Path) -> None:
    """Cells that another state of the producer measured are no evidence for this one, and the judges say so."""
    for journal in results.glob("**/repetitions.jsonl"):
        if f'"producer_digest":"{producer_digest()}"' not in journal.read_text().split("\n", 1)[0]:
            pytest.exit(f"{results.relative_to(ROOT)} was measured by another state of the producer: remove it", 1)


def run_demo(*arguments: str) -> None:
    done = subprocess.run(["snakemake", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="session")
def demo(cluster: SlurmCluster | Unavailable) -> Path:
    """The demo campaign, run to its end by the real engine, as Slurm jobs where Slurm is; a second session finds it
    done. `parallel` and `smoke` run where they are."""
    refuse_stale(ROOT / "results" / "cpu-demo")
    # Two jobs: engines of cells wait for one another, and probes have two cores to share.
    on_slurm = ("--profile", "slurm", "--slurm-init-seconds-before-status-checks", "2", "--jobs", "2")
    run_demo(*(on_slurm if isinstance(cluster, SlurmCluster) else ()))
    return ROOT / "results" / "cpu-demo"


@pytest.fixture(scope="session")
def parallel(cluster: SlurmCluster | Unavailable) -> Path:
    """The campaign of two workers, and of two data-parallel ranks, run to its end."""
    refuse_stale(ROOT / "results" / "cpu-parallel")
    run_demo("--config", "campaign=cpu-parallel")
    return ROOT / "results" / "cpu-parallel"


@pytest.fixture(scope="session")
def smoke(demo: Path) -> Path:
    """The demo's smoke cells: the same files as the full ones, with a few points each."""
    run_demo("smoke")
    return demo / "smoke"


def cell_folder(campaign: Path, prefix: str) -> Path:
    """The one cell of a finished campaign's plan whose name starts with `prefix`."""
    entries = json.loads((campaign / "current" / "plan.json").read_text())["cells"]
    (name,) = [entry["name"] for entry in entries if entry["name"].startswith(prefix)]
    return campaign / "cells" / name


def copy_project(target: Path) -> Workspace:
    for name in PROJECT:
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy2)(source, target / name)
    return Workspace(target)


@pytest.fixture
def project(cluster: SlurmCluster | Unavailable, tmp_path: Path) -> Workspace:
    """The project without results, as a fresh clone has it."""
    return copy_project(tmp_path)


@pytest.fixture
def finished(demo: Path, tmp_path: Path) -> Workspace:
    """The project with the finished demo and Snakemake's own records."""
    workspace = copy_project(tmp_path)
    shutil.copytree(demo, tmp_path / "results" / "cpu-demo", symlinks=True)
    shutil.copytree(ROOT / ".snakemake" / "metadata", tmp_path / ".snakemake" / "metadata")
    return workspace


def in_ci() -> bool:
    return os.environ.get("CI", "").lower() in ("1", "true")


def load(systems: Path) -> subprocess.CompletedProcess[str]:
    """The pair below `systems`, through the consumer's own loader, in the consumer's own environment."""
    assert CONSUMER.exists(), "the consumer's environment is missing: make consumer"
    command = [str(CONSUMER), str(ROOT / "tests" / "consumer_load.py"), str(systems)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
