"""The processes of an engine, one a data-parallel rank: started together, watched, and never left behind."""

import contextlib
import ctypes
import faulthandler
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import NamedTuple

from producer.heartbeat import Heartbeat, Pulse

POLL_SECONDS = 0.1
TRACEBACK_SECONDS = 2.0
"""How long a silent process has to write down where it hangs."""

PR_SET_PDEATHSIG = 1
"""prctl(2): a signal for this process when its parent dies."""


class Patience(NamedTuple):
    """Seconds until a silent engine counts as hanging: while it starts, and from one step to the next."""

    start_seconds: float
    step_seconds: float


class Supervised(NamedTuple):
    """How the processes ended: exit code, and why in words when it is not 0."""

    code: int
    reason: str = ""


class Stopped(Exception):
    """Somebody asked this process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


def _raise_stopped(number: int, _frame: FrameType | None) -> None:
    raise Stopped(number)


def stop_on_signals() -> None:
    """SIGTERM and SIGINT end this process in good order from now on, once."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _raise_stopped)


def prepare_rank() -> None:
    """Called first in a rank's process: it dies with its supervisor, and tells where it hangs when asked."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _died(code: int, rank: int) -> str:
    if code >= 0:
        return f"rank {rank} ended with exit code {code}, see above"
    return f"rank {rank} was ended by {signal.Signals(-code).name}"


def without_engine(pulses: list[Pulse]) -> str:
    """The ranks whose engine is not there, in words."""
    return " and ".join(f"rank {rank}" for rank, pulse in enumerate(pulses) if not pulse.ready)


class Ranks:
    """Running processes with their heartbeats, in rank order."""

    def __init__(self, commands: list[list[str]]) -> None:
        self.hearts = [Heartbeat.create(f"passgrid-rank{rank}") for rank in range(len(commands))]
        # A session of its own lets the workers that vLLM starts below a rank be ended with it.
        self.processes = [
            subprocess.Popen([*command, "--heartbeat", str(heart.fd)], pass_fds=(heart.fd,), start_new_session=True)
            for command, heart in zip(commands, self.hearts, strict=True)
        ]

    def pulses(self) -> list[Pulse]:
        return [heart.read() for heart in self.hearts]

    def explain_hang(self) -> None:
        """Every rank writes the stacks of its threads to its stderr."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGUSR1)
        time.sleep(TRACEBACK_SECONDS)

    def end(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for heart in self.hearts:
            os.close(heart.fd)


def supervise(commands: list[list[str]], patience: Patience, watch: Callable[[list[Pulse]], None]) -> Supervised:
    """Run one command a rank until all have ended well, or one has not; `watch` sees their pulses now and then.

    Raises:
        Stopped: this process got a signal (see `stop_on_signals`); the ranks have been ended.
    """
    ranks = Ranks(commands)
    last, alive = ranks.pulses(), time.monotonic()
    try:
        while True:
            codes = [process.poll() for process in ranks.processes]
            pulses = ranks.pulses()
            watch(pulses)
            # A rank that was killed comes first: the others then fail because of it.
            for code, rank in sorted((code, rank) for rank, code in enumerate(codes) if code):
                return Supervised(code if code > 0 else 1, _died(code, rank))
            if not any(code is None for code in codes):
                return Supervised(0)
            if pulses != last:
                last, alive = pulses, time.monotonic()
            silent = time.monotonic() - alive
            ready = all(pulse.ready for pulse in pulses)
            if silent > (patience.step_seconds if ready else patience.start_seconds):
                ranks.explain_hang()
                what = "no step" if ready else f"no engine of {without_engine(pulses)}"
                return Supervised(1, f"{what} for {silent:.0f} s")
            time.sleep(POLL_SECONDS)
    finally:
        ranks.end()


def rank_commands(module: str, arguments: list[str], dp: int) -> list[list[str]]:
    """The command of each data-parallel rank; they meet at a port of this machine."""
    port = str(free_port())
    return [[sys.executable, "-m", module, *arguments, "--rank", str(rank), "--port", port] for rank in range(dp)]
