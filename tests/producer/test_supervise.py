"""The supervisor, on small programs that stand in for an engine: what ends badly is ended whole, and said in words."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from conftest import ROOT

from producer.heartbeat import Heartbeat, Pulse
from producer.supervise import SIGNALS, Patience, Stopped, Supervised, verdict, watch_ranks

PATIENT = Patience(start_seconds=30, step_seconds=30)


@pytest.fixture(autouse=True)
def own_signals():
    """A supervisor that has begun to end ignores signals for good; this process goes on."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def program(body: str) -> list[str]:
    """A rank's command: `heart` is its pulse. The supervisor adds `--supervisor PID --heartbeat FD`."""
    prologue = """
    import os, sys, time, signal, subprocess
    from producer.heartbeat import Heartbeat
    from producer.supervise import prepare_rank
    prepare_rank(int(sys.argv[-3]))
    heart = Heartbeat(int(sys.argv[-1]))
    """
    return [sys.executable, "-c", textwrap.dedent(prologue) + textwrap.dedent(body)]


def runs(pid: int) -> bool:
    """A process that is more than an entry which nobody has collected."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def still_running(pids: list[int]) -> list[int]:
    """Those that run some seconds from now: a signal takes its time to arrive."""
    deadline = time.monotonic() + 10
    while any(runs(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    return [pid for pid in pids if runs(pid)]


def named(commands: list[list[str]]) -> dict[str, list[str]]:
    return {f"rank {rank}": command for rank, command in enumerate(commands)}


def watched(commands: list[list[str]], patience: Patience = PATIENT) -> tuple[Supervised, list[list[Pulse]]]:
    pulses: list[list[Pulse]] = []
    return verdict(watch_ranks(named(commands), patience, pulses.append)), pulses


def test_ranks_that_end_well():
    ended, pulses = watched([program("heart.ready(); heart.started(7); heart.step(); heart.finished()")] * 2)
    assert ended == Supervised(0)
    assert pulses[-1] == [Pulse(ready=1, steps=1, benchmark_id=7, points=1, rejections=0)] * 2


@pytest.mark.parametrize(
    ("body", "ended"),
    [
        ("sys.exit(2)", Supervised(2, "rank 1 ended with exit code 2, see above")),
        ("os.kill(os.getpid(), signal.SIGKILL)", Supervised(1, "rank 1 was ended by SIGKILL")),
        ("os.kill(os.getpid(), signal.SIGSEGV)", Supervised(1, "rank 1 was ended by SIGSEGV")),
    ],
)
def test_one_rank_that_ends_badly_ends_all(body: str, ended: Supervised, tmp_path: Path):
    """The other rank has a child of its own, as an engine has workers: it goes too."""
    pids = tmp_path / "pids"
    waiting = f"""
    child = subprocess.Popen(["sleep", "1000"])
    open({str(pids)!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")
    time.sleep(1000)
    """
    dying = f"""
    while not os.path.exists({str(pids)!r}): time.sleep(0.01)
    time.sleep(0.2)
    {body}
    """
    assert watched([program(waiting), program(dying)])[0] == ended
    assert still_running([int(pid) for pid in pids.read_text().split()]) == []


def test_a_rank_that_the_cluster_stops_stops_the_job():
    """`scancel` and preemption signal every process of a job, in any order."""
    with pytest.raises(Stopped, match="stopped by SIGTERM"):
        watched([program("os.kill(os.getpid(), signal.SIGTERM)")])


def test_a_killed_rank_is_the_reason_and_not_the_ones_that_fail_after_it(tmp_path: Path):
    flag = tmp_path / "flag"
    follower = f"""
    while not os.path.exists({str(flag)!r}): time.sleep(0.001)
    sys.exit(1)
    """
    ended, _ = watched([program(follower), program(f"open({str(flag)!r}, 'w'); os.kill(os.getpid(), 9)")])
    assert ended.reason == "rank 1 was ended by SIGKILL"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("time.sleep(1000)", "no engine of rank 0 for 1 s"),
        ("heart.ready(); heart.step(); time.sleep(1000)", "no step for 2 s"),
    ],
)
def test_silence_is_ended_after_its_patience(body: str, reason: str):
    began = time.monotonic()
    ended, _ = watched([program(body)], Patience(start_seconds=1, step_seconds=2))
    assert ended == Supervised(1, reason)
    assert time.monotonic() - began < 15


def test_the_rank_that_never_gets_ready_is_named():
    ended, _ = watched([program("heart.ready(); time.sleep(1000)"), program("time.sleep(1000)")], Patience(1, 30))
    assert ended == Supervised(1, "no engine of rank 1 for 1 s")


def test_steps_keep_an_engine_alive_for_as_long_as_it_takes():
    body = """
    heart.ready()
    for _ in range(20):
        heart.step()
        time.sleep(0.2)
    """
    assert watched([program(body)], Patience(start_seconds=30, step_seconds=1.5))[0] == Supervised(0)


def test_a_rank_dies_with_its_supervisor(tmp_path: Path):
    """Killed at once, the supervisor can end nobody: the kernel does."""
    pid = tmp_path / "pid"
    rank = program(f"open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(1000)")
    code = f"from producer.supervise import *; watch_ranks({named([rank])!r}, Patience(30, 30), lambda pulses: None)"
    supervisor = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    while not pid.exists() or not pid.read_text():
        time.sleep(0.01)
    supervisor.send_signal(signal.SIGKILL)
    supervisor.wait()
    assert still_running([int(pid.read_text())]) == []


def test_a_rank_whose_supervisor_is_gone_before_it_began_ends_at_once():
    """Importing takes a second; the kernel's promise counts from the call on."""
    command = program("time.sleep(1000)")
    heart = Heartbeat.create("test")
    own = ["--supervisor", "1", "--heartbeat", str(heart.fd)]
    done = subprocess.run([*command, *own], cwd=ROOT, pass_fds=(heart.fd,), timeout=30, check=False)
    assert done.returncode == 1


@pytest.mark.parametrize("code", [2, 75])
def test_the_rank_that_refuses_speaks_for_all(code: int, tmp_path: Path):
    """The others lose their connection to it, and may even end first."""
    flag = tmp_path / "flag"
    follower = f"""
    while not os.path.exists({str(flag)!r}): time.sleep(0.001)
    sys.exit(1)
    """
    refusing = f"open({str(flag)!r}, 'w'); time.sleep(0.5); sys.exit({code})"
    for commands, rank in (([program(follower), program(refusing)], 1), ([program(refusing), program(follower)], 0)):
        assert watched(commands)[0] == Supervised(code, f"rank {rank} ended with exit code {code}, see above")
        flag.unlink()


def test_a_refusal_is_told_in_its_own_words():
    refusing = """
    from schemas.errors import Refusal, run
    def main():
        with heart.telling():
            raise Refusal("engine free blocks", "at least 2000", 1023, "cell.json")
    run(main)
    """
    ended, _ = watched([program("time.sleep(1000)"), program(refusing)])
    assert ended == Supervised(2, "engine free blocks: expected at least 2000, found 1023: cell.json")


def test_two_signals_in_a_row_still_end_every_rank(tmp_path: Path):
    """A cluster says it twice, or a person does."""
    pids = tmp_path / "pids"
    rank = program(f"open({str(pids)!r}, 'a').write(f'{{os.getpid()}} '); time.sleep(1000)")
    code = f"""
from producer.supervise import *
stop_on_signals()
try:
    watch_ranks({named([rank] * 4)!r}, Patience(60, 60), lambda pulses: None)
except Stopped as stop:
    sys.exit(128 + stop.number)
"""
    supervisor = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    while not pids.exists() or len(pids.read_text().split()) < 4:
        time.sleep(0.01)
    for _ in range(20):
        supervisor.send_signal(signal.SIGTERM)
        time.sleep(0.003)
    assert supervisor.wait(timeout=60) == 128 + signal.SIGTERM
    assert still_running([int(pid) for pid in pids.read_text().split()]) == []


def test_one_silent_rank_is_enough_however_busy_the_others_are():
    busy = """
    heart.ready()
    for _ in range(300):
        heart.step()
        time.sleep(0.1)
    """
    ended, _ = watched([program(busy), program("heart.ready(); heart.step(); time.sleep(1000)")], Patience(30, 2))
    assert ended == Supervised(1, "no step for 2 s")


def test_the_pulse_is_read_by_another_process():
    heart = Heartbeat.create("test")
    pid = os.fork()
    if pid == 0:
        heart.ready()
        heart.rejected()
        os._exit(0)
    os.waitpid(pid, 0)
    assert heart.read() == Pulse(ready=1, rejections=1)
