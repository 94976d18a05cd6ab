"""Whatever ends a job, at whatever moment: what was measured stays, nothing is measured twice, the next job goes on.

`make test-kill` does this at 30 random moments, `make test` at a few. A failure names the seed that repeats it.
"""

import json
import os
import random
import resource
import signal
import subprocess
import time
from pathlib import Path

import pytest
from conftest import ROOT
from jobs import (
    command,
    copy_of,
    everybody_below,
    points_in,
    ranks_of,
    run,
    start,
    still_alive,
    wait_for_points,
    workers_of,
)
from tampering import accepted_of

from producer.journal import read_journal
from schemas.canonical import read_model, write_atomic
from schemas.layout import rank_files
from schemas.merged import merged_bytes
from schemas.native import CellReceipt, read_struct
from schemas.plan import FrozenCell

from merge_ranks import merge_files
from verify_cell import read_cell, verify

pytestmark = [pytest.mark.engine, pytest.mark.demo]

KILLS = int(os.environ.get("PASSGRID_KILLS", "5"))
SEED = os.environ.get("PASSGRID_KILL_SEED") or str(time.time_ns())

KINDS = ("the job", "an engine", "a worker", "preemption")


def strike(kind: str, job: subprocess.Popen[bytes], chance: random.Random) -> None:
    """End something of a running job; a kind that is not there yet ends the job itself."""
    victims = {"an engine": ranks_of, "a worker": workers_of}.get(kind, lambda job: [])(job)
    if victims:
        chance.choice(victims).kill()
    else:
        job.send_signal(signal.SIGTERM if kind == "preemption" else signal.SIGKILL)


def moment(cell: Path, job: subprocess.Popen[bytes], chance: random.Random) -> None:
    """Wait for a random moment: of the engine's start, or around the end of a point."""
    if chance.random() < 0.25:
        time.sleep(chance.uniform(0.2, 10))
    else:
        wait_for_points(cell, job, points_in(cell) + chance.randint(1, 2))
        time.sleep(chance.uniform(0, 0.5))


def check_finished(cell: Path, sessions_at_least: int) -> None:
    """The cell is whole: each point once, every session listed, and the judges find nothing."""
    frozen = read_model(FrozenCell, cell, "cell")
    journal = read_journal(cell.parent / "repetitions.jsonl", frozen.digest)
    assert sorted(line.benchmark_id for line in journal.points) == list(range(1, len(frozen.points.points()) + 1))
    receipt = read_struct(CellReceipt, cell.parent / "receipt.json", "receipt")
    assert [session.session for session in receipt.sessions] == list(range(1, len(journal.sessions) + 1))
    assert sum(session.points for session in receipt.sessions) == len(journal.points)
    assert len(journal.sessions) >= sessions_at_least
    ranks = rank_files(cell.parent, frozen.identity.topology.dp)
    write_atomic(cell.parent / "merged.json", merged_bytes(merge_files(frozen, cell.parent / "receipt.json", ranks)))
    evidence = verify(read_cell(cell.parent, accepted_of(cell.parent)))
    assert (evidence.state, evidence.failures) == ("recorded", ())


@pytest.mark.parametrize("prefix", ["prefill-tensor", "prefill-data"])
def test_a_job_that_is_killed_at_any_moment_is_resumed(parallel: Path, tmp_path: Path, prefix: str):
    chance = random.Random(f"{SEED} {prefix}")
    kills = KILLS // 2 + (KILLS % 2 if prefix == "prefill-tensor" else 0)
    struck, story, cell, sessions = 0, f"PASSGRID_KILL_SEED={SEED}", copy_of(parallel, prefix, tmp_path / "0"), 0
    total = len(read_model(FrozenCell, cell, "cell").points.points())
    while struck < kills:
        journal = cell.parent / "repetitions.jsonl"
        measured = points_in(cell)
        job, kind = start(cell), chance.choice(KINDS)
        moment(cell, job, chance)
        if job.poll() == 0:  # it finished before its moment came: the next one strikes a new cell
            check_finished(cell, sessions)
            cell, sessions = copy_of(parallel, prefix, tmp_path / str(struck) / "next"), 0
            continue
        below, before = everybody_below(job), journal.read_bytes() if journal.exists() else b""
        strike(kind, job, chance)
        code = job.wait(timeout=120)
        struck += 1
        story += f"; {kind} at {points_in(cell)} points: {code}"
        assert not still_alive(below), story
        if code == 0:
            continue  # it was over already
        # In its first second a job has no handler yet: the signal itself ends it.
        codes = {"the job": {-signal.SIGKILL}, "preemption": {128 + signal.SIGTERM, -signal.SIGTERM}}
        assert code in codes.get(kind, {code}), story
        whole = before[: before.rfind(b"\n") + 1]
        assert journal.exists() or not whole, story
        assert not whole or journal.read_bytes().startswith(whole), story
        assert points_in(cell) >= measured, story
        assert not (cell.parent / "receipt.json").exists() or points_in(cell) == total, story
        sessions += points_in(cell) > measured
    assert run(cell).returncode == 0, story
    check_finished(cell, sessions)
    print(story)


def test_an_engine_that_hangs_is_ended_with_the_point_named(parallel: Path, tmp_path: Path):
    """A worker stops answering in the middle of a forward; nothing else ever tells."""
    cell = copy_of(parallel, "prefill-tensor", tmp_path)
    job = start(cell, "--step-timeout", "4")
    wait_for_points(cell, job, 3)
    below = everybody_below(job)
    workers_of(job)[1].suspend()
    assert job.wait(timeout=60) == 1
    last = (cell.parent / "log").read_text().splitlines()[-1]
    frozen = read_model(FrozenCell, cell, "cell")
    assert last.startswith(f"failed: {frozen.name} at point ")
    assert " new and " in last
    assert ": no step for 4 s" in last
    # Where it hung, for whoever wants to know.
    assert "Current thread" in (cell.parent / "log").read_text()
    status = json.loads((cell.parent / "progress.json").read_text())
    assert (status["state"], status["reason"]) == ("failed", "no step for 4 s")
    assert f"at point {status['current_point']} (" in last
    assert not still_alive(below)
    kept = points_in(cell)
    assert kept >= 3
    assert run(cell).returncode == 0
    check_finished(cell, 2)


def test_a_full_disk_ends_the_cell_and_costs_one_point(parallel: Path, tmp_path: Path):
    cell = copy_of(parallel, "decode-tensor", tmp_path)
    journal = cell.parent / "repetitions.jsonl"
    job = subprocess.Popen(command(cell), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while points_in(cell) < 1:
        assert job.poll() is None
        time.sleep(0.02)
    (rank,) = ranks_of(job)
    full = journal.stat().st_size + 100
    rank.rlimit(resource.RLIMIT_FSIZE, (full, full))
    output, _ = job.communicate(timeout=120)
    assert job.returncode == 2
    refusal = f"refused: journal: expected a disk that takes the line, found File too large: {journal}"
    assert refusal in output.splitlines()
    kept = points_in(cell)
    assert 1 <= kept < 4
    assert journal.read_bytes().endswith(b"\n")
    assert run(cell).returncode == 0
    check_finished(cell, 2)


def test_preemption_says_what_is_kept(parallel: Path, tmp_path: Path):
    cell = copy_of(parallel, "prefill-tensor", tmp_path)
    job = start(cell)
    wait_for_points(cell, job, 2)
    job.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert job.wait(timeout=30) == 128 + signal.SIGTERM
    assert time.monotonic() - began < 10
    last = (cell.parent / "log").read_text().splitlines()[-1]
    name = read_model(FrozenCell, cell, "cell").name
    assert last.startswith(f"stopped by SIGTERM: {name} at point ")
    assert last.endswith(f": {points_in(cell)} of 12 points are measured and kept")
    assert json.loads((cell.parent / "progress.json").read_text())["state"] == "stopped"
