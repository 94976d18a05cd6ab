"""The nodes of one launch, in touch: who is there, who failed, and when it is over.

Each follower holds one TCP connection to the head, with a JSON object a line. A follower says which node it is and
what it would run (`facts`); the head lets all of them begin, and ends them. A connection that breaks is a node that
is gone: neither side outlives the other by more than the seconds that TCP takes to notice.
"""

import contextlib
import json
import math
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from producer.exclusive import exclusive_devices
from producer.heartbeat import Pulse
from producer.nodes import Place
from producer.supervise import (
    FOLLOW_SECONDS,
    POLL_SECONDS,
    Ended,
    Patience,
    Stopped,
    Supervised,
    free_port,
    verdict,
    watch_ranks,
    worst,
)
from schemas.errors import HELD, REFUSED, Held, Refusal
from schemas.launch import Topology

FAREWELL_SECONDS = 20.0
"""How long the nodes wait for each other's last word: a follower for the exit code, the head for the followers' end."""

CONNECT_SECONDS = 5.0
LONGEST_LINE = 1 << 20

KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000),
)
"""tcp(7): a node without power says nothing; after 30 s of that it is gone."""


class Engines(NamedTuple):
    """The engines of a launch, one a data-parallel rank: `module` with `arguments` is a rank's command.

    `device` is what they have for themselves, None when others may run beside them.
    """

    module: str
    arguments: list[str]
    topology: Topology
    device: str | None

    def commands(self, place: Place) -> dict[str, list[str]]:
        """The ranks of one node, by name. An engine whose workers are on several nodes has its rank on each: the
        head's schedules, the others' follow."""
        if place.nodes == 1:
            place = place._replace(port=free_port())
        command = [sys.executable, "-m", self.module, *self.arguments, *place.arguments]
        ranks = range(1)
        if self.topology.dp > 1:
            share = self.topology.dp // place.nodes
            ranks = range(place.node_rank * share, (place.node_rank + 1) * share)
        return {f"rank {rank}": [*command, f"--rank={rank}"] for rank in ranks}

    def devices(self, place: Place) -> contextlib.AbstractContextManager[None]:
        """Exclusive use of this node's devices."""
        if self.device is None:
            return contextlib.nullcontext()
        return exclusive_devices(self.device, self.topology.gpus // place.nodes)


class Connection:
    """One connection: JSON objects, a line each. `gone` once the other side is.

    `own` and `other` are the addresses under which the two sides reach each other.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket, self._data, self.gone = connected, b"", False
        connected.setblocking(False)
        for option in KEEPALIVE:
            connected.setsockopt(*option)
        self.own: str = connected.getsockname()[0]
        self.other: str = connected.getpeername()[0]

    def send(self, **message: Any) -> None:
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self.gone = True

    def receive(self) -> list[dict[str, Any]]:
        """What has arrived; never waits."""
        try:
            while not self.gone and len(self._data) < LONGEST_LINE:
                data = self._socket.recv(65536)
                self._data, self.gone = self._data + data, not data
        except BlockingIOError:
            pass
        except OSError:
            self.gone = True
        *lines, self._data = self._data.split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
        except ValueError:
            messages = [None]
        if not all(isinstance(message, dict) for message in messages) or len(self._data) >= LONGEST_LINE:
            self.close()  # somebody who knocks at every port
            return []
        return messages

    def close(self) -> None:
        self.gone = True
        self._socket.close()


def _wait(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


class Head:
    """Node 0's side. `code` is the exit code that the followers get. With one node there is nobody to talk to."""

    def __init__(self, place: Place) -> None:
        self.code = 1
        self._place = place
        self._strangers: list[Connection] = []
        self._followers: dict[int, Connection] = {}
        self._facts: dict[int, dict[str, Any]] = {}
        self._failed: dict[int, Ended] = {}
        self._listener: socket.socket | None = None
        if place.nodes > 1:
            self._listener = self._listen()

    def _listen(self) -> socket.socket:
        address = (self._place.head, self._place.control_port)
        family = _resolve(*address)
        try:
            listener = socket.create_server(("", address[1]), family=family, backlog=self._place.nodes)
        except OSError as error:
            raise Refusal("port", f"{address[1]} to be free on the head", error.strerror, "launch") from None
        listener.setblocking(False)
        return listener

    def _poll(self) -> None:
        while self._listener is not None:
            try:
                self._strangers.append(Connection(self._listener.accept()[0]))
            except BlockingIOError:
                break
            except OSError:  # gone before it was here
                continue
        for stranger in self._strangers:
            for message in stranger.receive():
                node = message.get("node_rank")
                if isinstance(node, int) and node in range(1, self._place.nodes) and node not in self._followers:
                    self._followers[node] = stranger
                    self._hear(node, message)
        self._strangers = [s for s in self._strangers if s not in self._followers.values() and not s.gone]
        for node, follower in self._followers.items():
            for message in follower.receive():
                self._hear(node, message)
            if follower.gone and node not in self._failed:
                self._failed[node] = Ended(-signal.SIGKILL, f"node {node} is gone")

    def _hear(self, node: int, message: dict[str, Any]) -> None:
        if isinstance(message.get("facts"), dict):
            self._facts[node] = message["facts"]
        if isinstance(message.get("code"), int):
            self._failed[node] = Ended(message["code"], f"node {node}: {message.get('reason')}")

    def _all_here(self) -> bool:
        self._poll()
        return len(self._facts) == self._place.nodes - 1 or bool(self._failed)

    def supervise(
        self, engines: Engines, patience: Patience, facts: dict[str, Any], watch: Callable[[list[Pulse]], None]
    ) -> Supervised:
        """Run the engines on all nodes, and watch the ranks of this one.

        Raises:
            Refusal: nodes that do not come together, see `begin`.
            Stopped: this process, a rank or a node got a signal; all have been ended.
        """
        with engines.devices(self._place):
            commands = engines.commands(self.begin(facts, patience.start_seconds))
            ended = watch_ranks(commands, patience, watch, self.ended)
        if ended.code and self._listener:  # what ended a rank here may have happened elsewhere
            _wait(lambda: self.ended() is not None, FOLLOW_SECONDS)
            ended = worst([ended, *self._failed.values()]) or ended
        return verdict(ended)

    def begin(self, facts: dict[str, Any], seconds: float) -> Place:
        """Wait for every follower and let them begin; returns this place with its own address and the attempt.

        Raises:
            Refusal: a node that does not come within `seconds`, or would run something else than `facts`.
        """
        place = self._place._replace(attempt_id=uuid.uuid4().hex)
        if self._listener is None:
            return place
        if not _wait(self._all_here, seconds):
            missing = sorted(set(range(1, self._place.nodes)) - self._facts.keys())
            what = f"every node within {seconds:.0f} s"
            raise Refusal("nodes", what, f"no node {', '.join(map(str, missing))}", self._where)
        failed = worst(self._failed.values())
        if failed is not None:
            raise Refusal("nodes", "every node to begin", failed.reason, self._where)
        facts = json.loads(json.dumps(facts))
        for node, theirs in sorted(self._facts.items()):
            for field in sorted(facts.keys() | theirs.keys()):
                ours, found = facts.get(field), theirs.get(field)
                if ours != found:
                    raise Refusal(f"{field} of node {node}", f"{ours} of the head", found, self._where)
        for follower in self._followers.values():
            follower.send(begin=place.attempt_id)
        own = next(iter(self._followers.values())).own
        return place._replace(head=own, address=own)

    @property
    def _where(self) -> str:
        return f"{self._place.head}:{self._place.control_port}"

    def ended(self) -> Ended | None:
        """The follower that failed, if one has."""
        self._poll()
        return worst(self._failed.values())

    def end(self, seconds: float) -> None:
        """Tell the followers the exit code, and wait until they have gone: then nobody is killed for being late.

        One that is not here yet is waited for when all went well; else whoever started the nodes ends it.
        """
        if self._listener is None:
            return
        if self.code == 0:
            _wait(self._all_here, seconds)
        for follower in self._followers.values():
            follower.send(end=self.code)
        _wait(self._all_gone, FAREWELL_SECONDS)
        for connection in (*self._followers.values(), *self._strangers):
            connection.close()
        self._listener.close()

    def _all_gone(self) -> bool:
        self._poll()
        return all(follower.gone for follower in self._followers.values())


@contextlib.contextmanager
def head_of(place: Place, patience: Patience) -> Iterator[Head]:
    """Node 0 of a launch; whatever ends it, the other nodes end with its exit code."""
    head = Head(place)
    try:
        yield head
    except Stopped as stop:
        head.code = 128 + stop.number
        raise
    except Refusal:
        head.code = REFUSED
        raise
    except Held:
        head.code = HELD
        raise
    finally:
        head.end(patience.start_seconds)


class Follower:
    """The side of another node. `code` is the head's exit code, once it has ended.

    Raises:
        Refusal: no head within `seconds`.
    """

    def __init__(self, place: Place, seconds: float) -> None:
        self.code: int | None = None
        self._place, self._attempt_id = place, ""
        address = (place.head, place.control_port)
        _resolve(*address)
        connected: list[Connection] = []

        def reached() -> bool:
            with contextlib.suppress(OSError):
                connected.append(Connection(socket.create_connection(address, timeout=CONNECT_SECONDS)))
            return bool(connected)

        if not _wait(reached, seconds):
            raise Refusal("head", f"one within {seconds:.0f} s", "none", f"{address[0]}:{address[1]}")
        self._head = connected[0]

    def say(self, **message: Any) -> None:
        self._head.send(node_rank=self._place.node_rank, **message)

    def ended(self) -> Ended | None:
        """How the head ended, once it has."""
        for message in self._head.receive():
            self._attempt_id = self._attempt_id or str(message.get("begin", ""))
            if isinstance(message.get("end"), int):
                self.code = message["end"]
        if self._head.gone and self.code is None:
            self.code = 1
            print(f"node {self._place.node_rank}: the head is gone", file=sys.stderr)
        return None if self.code is None else Ended(self.code, "the head ended")

    def wait_for_begin(self) -> Place | None:
        """This place with its address, the head's and the attempt, once all are to begin; None when the head has ended
        instead."""
        while self.ended() is None and not self._attempt_id:
            time.sleep(POLL_SECONDS)
        if self.code is not None:
            return None
        return self._place._replace(head=self._head.other, address=self._head.own, attempt_id=self._attempt_id)

    def verdict(self, seconds: float | None) -> int:
        """The head's exit code, which is every node's; 1 when it does not say within `seconds`."""
        _wait(lambda: self.ended() is not None, math.inf if seconds is None else seconds)
        self._head.close()
        return 1 if self.code is None else self.code


def follow(place: Place, engines: Engines, patience: Patience, facts: Callable[[], dict[str, Any]]) -> int:
    """Another node of a launch: once the head says so, run this node's ranks until they or the head end.

    `facts` says what this node would run, or refuses. Returns the exit code.

    Raises:
        Refusal: no head in time.
        Stopped: this process got a signal; the head knows.
    """
    follower = Follower(place, patience.start_seconds)
    try:
        follower.say(facts=facts())
        placed = follower.wait_for_begin()
        ended = Ended(0)
        if placed is not None:
            with engines.devices(placed):
                ended = watch_ranks(engines.commands(placed), patience, lambda pulses: None, follower.ended)
    except Refusal as refusal:
        follower.say(code=REFUSED, reason=str(refusal))
        follower.verdict(FAREWELL_SECONDS)
        raise
    except Stopped as stop:
        follower.say(code=-stop.number, reason=str(stop))
        raise
    if ended.code == 0:
        return follower.verdict(None)
    follower.say(code=ended.code, reason=ended.reason)
    return follower.verdict(FAREWELL_SECONDS)


def _resolve(host: str, port: int) -> socket.AddressFamily:
    """The address family of `host`, first of those it has."""
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    except OSError as error:
        raise Refusal("head address", "the name or address of the first node", f"{host}: {error}", "launch") from None
