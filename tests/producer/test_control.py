"""The nodes of one launch: all begin together, and whatever ends one of them ends all, with the reason in words."""

import contextlib
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import ROOT
from two_nodes import HEAD, Nodes, two_nodes

from producer.control import Head
from producer.nodes import PORTS, Place
from producer.supervise import Ended, free_port, worst

PROGRAM = ROOT / "tests" / "producer" / "node_program.py"
WAITING = "open(FILE, 'w').write(str(os.getpid()))\nwhile True: heart.step(); time.sleep(0.1)"
"""A rank that leaves its process id and goes on until somebody ends it."""


class Launch:
    """Two nodes or more, all on this machine's loopback or each on one of `nodes`."""

    def __init__(self, folder: Path, nodes: Nodes | None = None) -> None:
        self._folder, self._nodes, self.size = folder, nodes, 2
        self.head = HEAD if nodes else "127.0.0.1"
        self.port = free_port() % 20000 + 10000  # nine more after it
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, node: int, body: str, *facts: str) -> subprocess.Popen[bytes]:
        body = body.replace("FILE", repr(str(self._folder / f"pid{node}")))
        command = [sys.executable, str(PROGRAM), f"{node}/{self.size}", self.head, str(self.port), body, *facts]
        with (self._folder / f"log{node}").open("wb") as log:
            options = {"stdout": log, "stderr": log, "cwd": ROOT, "env": os.environ | {"PYTHONPATH": str(ROOT)}}
            if self._nodes:
                command = self._nodes.command(node, command)
            self.processes[node] = subprocess.Popen(command, **options)
        return self.processes[node]

    def log(self, node: int) -> str:
        return (self._folder / f"log{node}").read_text()

    def codes(self, seconds: float = 40) -> list[int]:
        return [self.processes[node].wait(seconds) for node in sorted(self.processes)]

    def rank(self, node: int) -> psutil.Process:
        """The rank of a node that is WAITING, once it runs."""
        file, deadline = self._folder / f"pid{node}", time.monotonic() + 30
        while not file.exists() or not file.read_text():
            assert time.monotonic() < deadline, self.log(node)
            time.sleep(0.02)
        return psutil.Process(int(file.read_text()))


def gone(process: psutil.Process) -> bool:
    psutil.wait_procs([process], timeout=10)
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.fixture
def launch(tmp_path: Path):
    launch = Launch(tmp_path)
    yield launch
    for process in launch.processes.values():
        process.kill()


def test_nodes_that_end_well_end_with_the_heads_code(launch: Launch):
    """The follower's rank ends first, and its node waits for the head's word."""
    launch.start(1, "assert place[1] == 1")
    time.sleep(1)  # it has to wait for its head
    launch.start(0, "time.sleep(1)")
    assert launch.codes() == [0, 0]
    assert launch.log(0) == "ended: \n"


def test_each_node_learns_its_own_address_the_heads_and_the_attempt(launch: Launch, tmp_path: Path):
    body = "assert place[:5] == (2, %d, '127.0.0.1', place[3], '127.0.0.1'), place\nopen(FILE, 'a').write(place[5])"
    launch.start(0, body % 0)
    launch.start(1, body % 1)
    assert launch.codes() == [0, 0]
    (attempt,) = {(tmp_path / f"pid{node}").read_text() for node in (0, 1)}
    assert re.fullmatch("[0-9a-f]{32}", attempt)


def test_each_launch_is_an_attempt_of_its_own():
    attempts = {Head(Place()).begin({}, 1).attempt_id for _ in range(3)}
    assert len(attempts) == 3
    assert all(re.fullmatch("[0-9a-f]{32}", attempt) for attempt in attempts)


def test_a_head_with_nothing_to_do_waits_for_the_others_to_say_so(launch: Launch):
    launch.start(0, "")
    time.sleep(1)
    launch.start(1, WAITING)
    assert launch.codes() == [0, 0]
    assert launch.log(1) == ""


@pytest.mark.parametrize(
    ("victim", "reason"),
    [(0, "rank 0 was ended by SIGKILL"), (1, "node 1: rank 1 was ended by SIGKILL")],
)
def test_a_killed_rank_ends_both_nodes_and_is_named(launch: Launch, victim: int, reason: str):
    for node in (0, 1):
        launch.start(node, WAITING)
    ranks = [launch.rank(node) for node in (0, 1)]
    ranks[victim].kill()
    assert launch.codes() == [1, 1]
    assert launch.log(0) == f"ended: {reason}\n"
    assert all(gone(rank) for rank in ranks)


def test_three_nodes_end_together_too(launch: Launch):
    launch.size = 3
    for node in (2, 0, 1):
        launch.start(node, WAITING)
    ranks = [launch.rank(node) for node in (0, 1, 2)]
    ranks[2].kill()
    assert launch.codes() == [1, 1, 1]
    assert launch.log(0) == "ended: node 2: rank 2 was ended by SIGKILL\n"
    assert all(gone(rank) for rank in ranks)


def test_a_rank_that_fails_because_another_nodes_was_killed_is_not_the_reason(launch: Launch, tmp_path: Path):
    launch.start(1, WAITING)
    flag = tmp_path / "flag"
    launch.start(0, f"while not os.path.exists({str(flag)!r}): heart.step(); time.sleep(0.001)\nsys.exit(1)")
    rank = launch.rank(1)
    flag.touch()
    time.sleep(0.3)
    rank.kill()
    assert launch.codes() == [1, 1]
    assert launch.log(0) == "ended: node 1: rank 1 was ended by SIGKILL\n"


def test_whoever_was_killed_or_refuses_is_the_reason():
    killed, refused, failed, second = Ended(-9, "k"), Ended(2, "r"), Ended(1, "f"), Ended(1, "s")
    assert worst([failed, refused, killed]) == killed
    assert worst([failed, refused]) == refused
    assert worst([failed, second]) == failed
    assert worst([]) is None


def test_a_node_that_is_gone_ends_the_head(launch: Launch):
    for node in (0, 1):
        launch.start(node, WAITING)
    ranks = [launch.rank(node) for node in (0, 1)]
    launch.processes[1].kill()
    assert launch.processes[0].wait(20) == 1
    assert launch.log(0) == "ended: node 1 is gone\n"
    assert all(gone(rank) for rank in ranks)


def test_a_follower_does_not_outlive_its_head(launch: Launch):
    for node in (0, 1):
        launch.start(node, WAITING)
    ranks = [launch.rank(node) for node in (0, 1)]
    launch.processes[0].kill()
    assert launch.processes[1].wait(20) == 1
    assert launch.log(1) == "node 1: the head is gone\n"
    assert all(gone(rank) for rank in ranks)


@pytest.mark.parametrize("signalled", [0, 1])
def test_a_node_that_the_cluster_stops_stops_the_launch(launch: Launch, signalled: int):
    for node in (0, 1):
        launch.start(node, WAITING)
    ranks = [launch.rank(node) for node in (0, 1)]
    launch.processes[signalled].terminate()
    assert launch.codes() == [143, 143]
    assert launch.log(0) == "stopped by SIGTERM\n"
    assert all(gone(rank) for rank in ranks)


def test_a_node_that_would_run_something_else_is_refused(launch: Launch):
    launch.start(0, WAITING, '{"cell": "c", "python_version": "3.11.7"}')
    launch.start(1, WAITING, '{"cell": "c", "python_version": "3.11.9"}')
    assert launch.codes() == [2, 2]
    where = f"127.0.0.1:{launch.port + PORTS - 1}"
    line = f"refused: python_version of node 1: expected 3.11.7 of the head, found 3.11.9: {where}\n"
    assert launch.log(0) == line


def test_a_node_that_refuses_speaks_for_all(launch: Launch):
    launch.start(0, WAITING)
    launch.start(1, WAITING, "another model")
    assert launch.codes() == [2, 2]
    refusal = "facts: expected none, found another model: test"
    assert launch.log(1) == f"refused: {refusal}\n"
    assert launch.log(0).startswith(f"refused: nodes: expected every node to begin, found node 1: {refusal}: ")


@pytest.mark.parametrize(
    ("node", "line"),
    [
        (0, "refused: nodes: expected every node within 6 s, found no node 1: {where}\n"),
        (1, "refused: head: expected one within 6 s, found none: {where}\n"),
    ],
)
def test_a_node_waits_for_the_other_as_long_as_an_engine_may_take(launch: Launch, node: int, line: str):
    launch.start(node, WAITING)
    assert launch.codes() == [2]
    assert launch.log(node) == line.format(where=f"127.0.0.1:{launch.port + PORTS - 1}")


def test_a_head_whose_name_nobody_knows_is_refused(launch: Launch):
    launch.head = "no-such-host.invalid"
    launch.start(1, WAITING)
    assert launch.codes() == [2]
    assert launch.log(1).startswith(
        "refused: head address: expected the name or address of the first node, found no-such"
    )


def test_a_port_that_is_taken_is_refused(launch: Launch):
    with socket.create_server(("127.0.0.1", launch.port + PORTS - 1)):
        launch.start(0, WAITING)
        assert launch.codes() == [2]
    assert launch.log(0).startswith(f"refused: port: expected {launch.port + PORTS - 1} to be free on the head, found ")


def test_strangers_at_the_port_change_nothing(launch: Launch, tmp_path: Path):
    """Whoever scans a network connects to every port, and says nothing or anything."""
    launch.start(0, "while time.sleep(0.1) is None and not os.path.exists(FILE): heart.step()")
    address = (launch.head, launch.port + PORTS - 1)
    words = (b"", b"GET / HTTP/1.1\r\n\r\n", b'{"node_rank": 7, "facts": {}}\n', b"[1]\n", b"\xff\n", b"x" * 3_000_000)
    strangers: list[socket.socket] = []
    deadline = time.monotonic() + 20
    while len(strangers) < len(words):
        with contextlib.suppress(ConnectionRefusedError):
            strangers.append(socket.create_connection(address, timeout=5))
        assert time.monotonic() < deadline
    for stranger, said in zip(strangers, words, strict=True):
        with contextlib.suppress(OSError):  # thrown out while it talked
            stranger.sendall(said)
    launch.start(1, "time.sleep(1)")
    time.sleep(2)
    (tmp_path / "pid0").touch()
    assert launch.codes() == [0, 0]
    for stranger in strangers:
        stranger.close()


def test_nodes_whose_cable_is_pulled_end_by_themselves(tmp_path: Path):
    """Nobody says goodbye: TCP notices (half a minute), on both sides."""
    with two_nodes(tmp_path) as nodes:
        launch = Launch(tmp_path, nodes)
        for node in (0, 1):
            launch.start(node, WAITING)
        ranks = [launch.rank(node) for node in (0, 1)]
        began = time.monotonic()
        nodes.cut()
        assert launch.codes(90) == [1, 1]
        assert time.monotonic() - began < 75
        assert launch.log(0) == "ended: node 1 is gone\n"
        assert launch.log(1) == "node 1: the head is gone\n"
        assert all(gone(rank) for rank in ranks)
