"""Two nodes on one machine: each with a network, a host name, shared memory and a device lock of its own.

What they share is what nodes of a cluster share: the file system with the project and its results.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

HEAD, FOLLOWER = "10.77.0.1", "10.77.0.2"
ADDRESSES = (HEAD, FOLLOWER)

ENTER = """
hostname "$0"
mount -t tmpfs tmpfs /dev/shm
touch /tmp/passgrid-cpu.lock
[ "$0" = node0 ] || mount --bind "$1" /tmp/passgrid-cpu.lock
shift
exec "$@"
"""
"""Run as `bash -c ENTER <node> <lock> <command>` in a mount and a UTS namespace. The head's lock stays the machine's:
no other engine runs beside the two."""


class Nodes:
    """The two nodes, `names` of their network namespaces."""

    def __init__(self, names: tuple[str, str], folder: Path) -> None:
        self.names, self._folder = names, folder

    def command(self, node: int, command: Sequence[str]) -> list[str]:
        """`command` on a node; its process is the command's own."""
        lock = self._folder / f"device-lock-{node}"
        lock.touch()
        enter = ["ip", "netns", "exec", self.names[node], "unshare", "--mount", "--uts", "--"]
        return [*enter, "bash", "-c", ENTER, f"node{node}", str(lock), *command]

    def start(self, node: int, command: Sequence[str], log: Path, **options) -> subprocess.Popen[bytes]:
        with log.open("ab") as output:
            return subprocess.Popen(self.command(node, command), stdout=output, stderr=output, **options)

    def cut(self) -> None:
        """The cable between them is pulled."""
        run("ip", "-n", self.names[0], "link", "set", "to-other", "down")


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


def _connect(names: tuple[str, str]) -> None:
    for name in names:
        run("ip", "netns", "add", name)
        run("ip", "-n", name, "link", "set", "lo", "up")
    peer = ("type", "veth", "peer", "name", "to-other", "netns", names[1])
    run("ip", "link", "add", "to-other", "netns", names[0], *peer)
    for name, address in zip(names, ADDRESSES, strict=True):
        run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "to-other")
        run("ip", "-n", name, "link", "set", "to-other", "up")
    # Inside a namespace as the tests use it: some containers allow the one and not the other.
    run(
        "ip",
        "netns",
        "exec",
        names[0],
        "unshare",
        "--mount",
        "--uts",
        "--",
        "mount",
        "-t",
        "tmpfs",
        "tmpfs",
        "/dev/shm",
    )


@contextlib.contextmanager
def two_nodes(folder: Path) -> Iterator[Nodes]:
    """Skips the test, and says why, where a process may not make namespaces."""
    if shutil.which("ip") is None:
        pytest.skip("no iproute2: two nodes on one machine are two network namespaces")
    names = (f"passgrid-{os.getpid()}-0", f"passgrid-{os.getpid()}-1")
    try:
        try:
            _connect(names)
        except OSError as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield Nodes(names, folder)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
