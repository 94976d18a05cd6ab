"""Exclusive use: one process measures a cell, and one engine at a time runs on a device."""

import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from producer.devices import granted_by_slurm, named_gpus
from schemas.canonical import canonical_bytes, write_atomic
from schemas.errors import Held


def utc_now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def slurm_job() -> dict[str, str]:
    """The job that this process runs in, as `squeue` names it: a task of an array by the array and its number."""
    array, number = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    job = f"{array}_{number}" if array else os.environ.get("SLURM_JOB_ID")
    return {"slurm_job_id": job} if job else {}


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
        facts = {"host": socket.gethostname(), "pid": os.getpid(), "since": utc_now()}
        write_atomic(holder, canonical_bytes(facts | slurm_job()))
        yield
    finally:
        holder.unlink(missing_ok=True)
        lock.release()


def devices_of(device: str, count: int) -> list[str]:
    """Names of the devices that an engine of `count` GPUs takes on this machine."""
    if device == "cpu":
        return ["cpu"]
    named = named_gpus(os.environ)
    names = [str(index) for index in range(count)] if named is None else named
    return [f"gpu-{name}" for name in names[:count]]


@contextlib.contextmanager
def exclusive_devices(device: str, count: int) -> Iterator[None]:
    """Wait until no other engine of passgrid runs on the devices, whoever started it; then keep them.

    Snakemake's `machine` resource orders the jobs of one driver; two drivers, or a driver with other resources on
    its command line, only meet here. Devices are locked in order, so that two engines never wait for each other.
    Slurm gives a GPU to one job alone and shows it as number 0, so nothing is locked there.
    """
    if device != "cpu" and granted_by_slurm(os.environ):
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
