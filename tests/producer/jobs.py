"""Jobs that measure a cell in processes of their own, for tests that watch, stop or kill them."""

import subprocess
import sys
import time
from pathlib import Path

import psutil
from conftest import ROOT, cell_folder

from producer.journal import read_journal
from schemas.canonical import read_model, write_model
from schemas.plan import FrozenCell


def copy_of(campaign: Path, prefix: str, target: Path) -> Path:
    """The frozen cell alone, as a GPU job finds it; returns its cell.json."""
    cell = read_model(FrozenCell, cell_folder(campaign, prefix) / "cell.json", "cell")
    file = target / cell.name / "cell.json"
    write_model(file, cell)
    return file


def command(cell: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "producer.run_cell", "--cell", str(cell), *options]


def start(cell: Path, *options: str) -> subprocess.Popen[bytes]:
    log = (cell.parent / "log").open("ab")
    return subprocess.Popen(command(cell, *options), cwd=ROOT, stdout=log, stderr=log)


def run(cell: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(cell, *options), cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)


def points_in(cell: Path) -> int:
    """Points with a whole line in the journal."""
    journal = cell.parent / "repetitions.jsonl"
    return len(read_journal(journal, read_model(FrozenCell, cell, "cell").digest).finished)


def wait_for_points(cell: Path, process: subprocess.Popen[bytes], count: int) -> None:
    """Until `count` points are in the journal, or the job has ended well."""
    deadline = time.monotonic() + 300
    while points_in(cell) < count and process.poll() != 0:
        assert process.poll() is None, (cell.parent / "log").read_text()[-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def ranks_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The engine processes below a job."""
    return [p for p in psutil.Process(process.pid).children() if "producer.measure_rank" in p.cmdline()]


def workers_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The worker processes that vLLM started below the ranks; they name themselves (multiproc_executor.py)."""
    return [p for rank in ranks_of(process) for p in rank.children(recursive=True) if "Worker" in " ".join(p.cmdline())]


def everybody_below(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def still_alive(processes: list[psutil.Process], seconds: float = 30) -> list[psutil.Process]:
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    return [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
