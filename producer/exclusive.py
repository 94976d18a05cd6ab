"""Exclusive use: one process measures a cell, and one engine at a time runs on a device."""

import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from schemas.canonical import canonical_bytes, write_atomic
from schemas.errors import Held

SLURM_GPUS = ("SLURM_JOB_GPUS", "SLURM_STEP_GPUS")
"""Set by Slurm in a job that was given GPUs (sbatch(1), output environment variables)."""


def utc_now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


@contextlib.contextmanager
def claim(folder: Path) -> Iterator[None]:
    """Exclusive claim on a cell. The lock belongs to the process, so a dead holder's claim is free at once.

    Raises:
        Held: somebody else has it; names host and process.
    """
    folder.mkdir(parents=True, exist_ok=True)
    holder = folder / "claim.json"
    lock = FileLock(folder / "claim.lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        who = holder.read_text() if holder.exists() else "an unknown process"
        raise Held(f"{folder} is being measured by {who}") from None
    try:
        job = os.environ.get("SLURM_JOB_ID")
        facts = {"host": socket.gethostname(), "pid": os.getpid(), "since": utc_now()}
        write_atomic(holder, canonical_bytes(facts | ({"slurm_job_id": job} if job else {})))
        yield
    finally:
        holder.unlink(missing_ok=True)
        lock.release()


def devices_of(device: str, count: int) -> list[str]:
    """Names of the devices that an engine of `count` GPUs takes on this machine."""
    if device == "cpu":
        return ["cpu"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    ids = visible.split(",") if visible else [str(index) for index in range(count)]
    return [f"gpu-{index.strip()}" for index in ids[:count]]


@contextlib.contextmanager
def exclusive_devices(device: str, count: int) -> Iterator[None]:
    """Wait until no other engine of passgrid runs on the devices, whoever started it; then keep them.

    Snakemake's `machine` resource orders the jobs of one driver; two drivers, or a driver with other resources on
    its command line, only meet here. Devices are locked in order, so that two engines never wait for each other.
    Slurm gives a GPU to one job alone and shows it as number 0, so nothing is locked there.
    """
    if device != "cpu" and any(name in os.environ for name in SLURM_GPUS):
        yield
        return
    with contextlib.ExitStack() as held:
        for name in sorted(devices_of(device, count)):
            # Not TMPDIR: drivers set it for their jobs, and all must meet at one file, whoever made it.
            lock = FileLock(f"/tmp/passgrid-{name}.lock", mode=0o666)  # noqa: S108
            try:
                lock.acquire(timeout=0)
            except Timeout:
                print(f"waiting for another engine on {name}", file=sys.stderr, flush=True)
                lock.acquire()
            held.callback(lock.release)
        yield
