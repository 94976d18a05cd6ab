"""Where a cell stands, from what lies in its folder: finished files, the claim of its holder, its progress, its log."""

import contextlib
import os
import re
import socket
import time
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from producer.recollection import COLLECTED, MeasuredCells
from schemas.summary import CellSummary, DeploymentSummary

State = Literal["judged", "measured", "running", "claimed", "queued", "failed", "stopped", "interrupted", "missing"]
"""judged: evidence is written. measured: artifacts and receipt are. running: points are being measured. claimed: a job
has the cell, its engine is not ready. queued: a job waits. failed, stopped: the last job ended so and said why.
interrupted: the last job ended without a word. missing: nobody has begun."""

SILENT_SECONDS = 120.0
"""A job writes its progress each second; one on another machine that has not for so long counts as gone."""

LAST_LINES = 3
REFUSALS = ("refused: ", "held: ")
LOG_TAIL_BYTES = 4000


class Claim(msgspec.Struct, frozen=True):
    """`claim.json`: who has the cell."""

    host: str
    pid: int
    since: str
    slurm_job_id: str | None = None


class Progress(msgspec.Struct, frozen=True):
    """`progress.json`: what the job last said."""

    state: str
    points_done: int
    current_point: int
    seconds_left: float | None = None
    reason: str = ""


class ReceiptTimes(msgspec.Struct, frozen=True):
    engine_start_seconds: float
    measuring_seconds: float


class CellStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """One cell. `collect` tells whether the next run collects it, `why` in the campaign's words or the job's.

    `seconds_left` is the running job's own estimate.
    """

    name: str
    deployment: str
    phase: str
    state: State
    collect: bool
    points: int
    points_done: int
    why: str = ""
    job_id: str | None = None
    host: str | None = None
    current_point: int | None = None
    seconds_left: float | None = None
    last_lines: list[str] = []


T = TypeVar("T")


def _read(file: Path, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError):
        return None


def receipt_times(folder: Path) -> ReceiptTimes | None:
    return _read(folder / "receipt.json", ReceiptTimes)


def last_lines(log: str) -> list[str]:
    """The last lines of a log that say something."""
    try:
        with open(log, "rb") as file:  # noqa: PTH123 (thousands of files)
            file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-LAST_LINES:]


def said_no(log: list[str]) -> bool:
    """Whether a job ended before its supervisor could say so: refused, or with an error of its own."""
    return bool(log) and (log[-1].startswith(REFUSALS) or re.match(r"\w*(Error|Exception)\b", log[-1]) is not None)


def journaled_points(folder: Path) -> int:
    """Points that the journal keeps: its lines that are whole and no session's."""
    try:
        with (folder / "repetitions.jsonl").open("rb") as file:
            return sum(line.startswith(b'{"kind":"point"') and line.endswith(b"\n") for line in file)
    except OSError:
        return 0


def is_alive(claim: Claim, folder: Path, slurm_jobs: dict[str, str]) -> bool:
    """Whether the holder of a claim still is: asked of Slurm, of this machine's processes, or of the clock."""
    if claim.slurm_job_id in slurm_jobs:
        return True
    if claim.host == socket.gethostname():
        return Path(f"/proc/{claim.pid}").exists()
    with contextlib.suppress(OSError):
        return time.time() - (folder / "progress.json").stat().st_mtime < SILENT_SECONDS
    return False


class CellFolders:
    """The cells of a plan, as they lie on the disk; `slurm_jobs` are the ids of jobs that Slurm has, with their state,
    `queued` the job that waits for a cell."""

    def __init__(self, measured: MeasuredCells, logs: Path, slurm_jobs: dict[str, str], queued: dict[str, str]) -> None:
        self._measured, self._logs, self._jobs, self._queued = measured, logs, slurm_jobs, queued

    def status(self, cell: CellSummary, deployment: DeploymentSummary) -> CellStatus:
        files = self._measured.files(cell.name)
        known = CellStatus(cell.name, cell.deployment, cell.phase, "judged", False, cell.points, cell.points)
        if all(name in files for name in COLLECTED):
            return known if "evidence.json" in files else msgspec.structs.replace(known, state="measured")
        folder = self._measured.folder / cell.name
        known = msgspec.structs.replace(known, collect=True, points_done=journaled_points(folder) if files else 0)
        claim = _read(folder / "claim.json", Claim) if "claim.json" in files else None
        progress = _read(folder / "progress.json", Progress) if "progress.json" in files else None
        if claim is not None and is_alive(claim, folder, self._jobs):
            return _held(known, claim, progress)
        log = last_lines(f"{self._logs}/collect-{cell.name}.log")
        if claim is not None or said_no(log) or (progress is not None and progress.state != "finished"):
            ended = _ended(known, claim, progress, log)
        else:
            ended = msgspec.structs.replace(known, state="missing", why=self._measured.reason(cell, deployment))
        if (job := self._queued.get(cell.name)) is not None:
            return msgspec.structs.replace(ended, state="queued", job_id=job)
        return ended


def _held(known: CellStatus, claim: Claim, progress: Progress | None) -> CellStatus:
    held = msgspec.structs.replace(known, state="claimed", job_id=claim.slurm_job_id, host=claim.host)
    if progress is None or progress.state != "measuring":
        return held
    return msgspec.structs.replace(
        held, state="running", current_point=progress.current_point, seconds_left=progress.seconds_left
    )


def _ended(known: CellStatus, claim: Claim | None, progress: Progress | None, log: list[str]) -> CellStatus:
    """The last job is over, and left the cell unfinished."""
    state: State = "failed"
    if claim is not None:  # who ends in good order takes the claim back
        state, why = "interrupted", f"the job of {claim.since} ended without a word"
    elif log and log[-1].startswith(REFUSALS):
        why = log[-1]
    elif progress is not None and progress.state in ("failed", "stopped"):
        state, why = ("failed" if progress.state == "failed" else "stopped"), progress.reason
    else:
        why = log[-1] if log else "nothing is known of its end"
    job = claim.slurm_job_id if claim is not None else None
    return msgspec.structs.replace(known, state=state, why=why, job_id=job, last_lines=log)
