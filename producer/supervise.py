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
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import NamedTuple

from producer.heartbeat import Heartbeat, Pulse
from schemas.errors import HELD, REFUSED

POLL_SECONDS = 0.1
END_SECONDS = 30.0
"""How long a killed process has to go. A driver that hangs can keep it for ever; this process goes on without it."""

FOLLOW_SECONDS = 3.0
"""How long the other ranks have to say for themselves why they ended, once one has."""

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


class Ended(NamedTuple):
    """How one process or node ended: exit code, or the negative number of a signal, and why in words."""

    code: int
    reason: str = ""


def worst(ends: Iterable[Ended]) -> Ended | None:
    """The end that the others follow from: whoever was killed comes first, then whoever refuses, then the first."""
    return min(ends, key=lambda end: (end.code >= 0, end.code not in (REFUSED, HELD)), default=None)


class Stopped(Exception):
    """Somebody asked this process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


SIGNALS = (signal.SIGTERM, signal.SIGINT)


def ignore_signals() -> None:
    """From now on this process ends by itself: a second signal must not keep it from ending the ranks."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _raise_stopped(number: int, _frame: FrameType | None) -> None:
    ignore_signals()
    raise Stopped(number)


def stop_on_signals() -> None:
    """SIGTERM and SIGINT end this process in good order from now on, once."""
    for number in SIGNALS:
        signal.signal(number, _raise_stopped)


def prepare_rank(supervisor: int) -> None:
    """Called first in a rank's process: it dies with its supervisor, and tells where it hangs when asked."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:  # it died before it could be watched
        sys.exit(1)
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _died(code: int, name: str) -> str:
    if code >= 0:
        return f"{name} ended with exit code {code}, see above"
    return f"{name} was ended by {signal.Signals(-code).name}"


class Ranks:
    """Running processes with their heartbeats, in rank order, by name."""

    def __init__(self, commands: Mapping[str, list[str]]) -> None:
        self._commands = commands
        self.names = list(commands)
        self.hearts = [Heartbeat.create(f"passgrid {name}") for name in self.names]
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        for command, heart in zip(self._commands.values(), self.hearts, strict=True):
            own = ["--supervisor", str(os.getpid()), "--heartbeat", str(heart.fd)]
            # A session of its own lets the workers that vLLM starts below a rank be ended with it.
            process = subprocess.Popen([*command, *own], pass_fds=(heart.fd,), start_new_session=True)
            self.processes.append(process)

    def pulses(self) -> list[Pulse]:
        return [heart.read() for heart in self.hearts]

    def explain_hang(self) -> None:
        """Every rank writes the stacks of its threads to its stderr."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGUSR1)
        time.sleep(TRACEBACK_SECONDS)

    def codes(self) -> list[int | None]:
        return [process.poll() for process in self.processes]

    def without_engine(self) -> str:
        """The ranks whose engine is not there, in words."""
        return " and ".join(name for name, pulse in zip(self.names, self.pulses(), strict=True) if not pulse.ready)

    def failure(self) -> Ended | None:
        """How the ranks failed, once one has; those that follow it have some seconds to say so."""
        if not any(self.codes()):
            return None
        deadline = time.monotonic() + FOLLOW_SECONDS
        while None in self.codes() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        ends = zip(self.codes(), self.names, self.hearts, strict=True)
        return worst(Ended(code, heart.refusal() or _died(code, name)) for code, name, heart in ends if code)

    def end(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for name, process in zip(self.names, self.processes, strict=False):
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                print(f"{name} (process {process.pid}) does not go: its driver hangs", file=sys.stderr)
        for heart in self.hearts:
            os.close(heart.fd)


def watch_ranks(
    commands: Mapping[str, list[str]],
    patience: Patience,
    watch: Callable[[list[Pulse]], None],
    elsewhere: Callable[[], Ended | None] = lambda: None,
) -> Ended:
    """Run one command a rank until all have ended well, one has not, or something `elsewhere` has ended.

    `watch` sees their pulses now and then. `elsewhere` says how another node of the launch ended.

    Raises:
        Stopped: this process got a signal (see `stop_on_signals`); the ranks have been ended.
    """
    ranks = Ranks(commands)
    last = ranks.pulses()
    alive = [time.monotonic()] * len(last)
    try:
        ranks.start()
        while True:
            failure = ranks.failure() or elsewhere()
            pulses = ranks.pulses()
            watch(pulses)
            if failure is not None:
                return failure
            if all(code == 0 for code in ranks.codes()):
                return Ended(0)
            now = time.monotonic()
            alive = [now if new != old else then for new, old, then in zip(pulses, last, alive, strict=True)]
            last = pulses
            ready = all(pulse.ready for pulse in pulses)
            silent = [now - then for then, code in zip(alive, ranks.codes(), strict=True) if code is None]
            if silent and max(silent) > (patience.step_seconds if ready else patience.start_seconds):
                ranks.explain_hang()
                what = "no step" if ready else f"no engine of {ranks.without_engine()}"
                return Ended(1, f"{what} for {max(silent):.0f} s")
            time.sleep(POLL_SECONDS)
    finally:
        ignore_signals()
        ranks.end()


def verdict(ended: Ended) -> Supervised:
    """What follows for this process from how its ranks ended.

    Raises:
        Stopped: a rank got a signal.
    """
    if ended.code == -signal.SIGTERM:  # a cluster stops every process of a job; this one's turn comes next
        raise Stopped(signal.SIGTERM)
    return Supervised(ended.code if ended.code >= 0 else 1, ended.reason)
