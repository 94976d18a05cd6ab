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
while [ "$1" != -- ]; do mount --bind "$1" "$2"; shift 2; done
shift
exec "$@"
"""
"""Run as `bash -c ENTER <node> <file> <where it appears> ... -- <command>`, in mount and UTS namespaces of its own."""

DEVICE_LOCK = "/tmp/passgrid-cpu.lock"
"""Node 0 keeps the machine's: no other engine runs beside the two."""


class Nodes:
    """The two nodes, `names` of their network namespaces. They know each other as node0 and node1."""

    def __init__(self, names: tuple[str, str], folder: Path) -> None:
        self.names, self._folder = names, folder
        self._hosts = folder / "hosts"
        self._hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{a} node{n}\n" for n, a in enumerate(ADDRESSES)))
        Path(DEVICE_LOCK).touch()
        (folder / "device-lock").touch()

    def command(self, node: int, command: Sequence[str], *binds: str) -> list[str]:
        """`command` on a node; its process is the command's own. `binds` are pairs of a file and where it appears."""
        own = [str(self._hosts), "/etc/hosts", *binds]
        if node == 1:
            own += [str(self._folder / "device-lock"), DEVICE_LOCK]
        enter = ["ip", "netns", "exec", self.names[node], "unshare", "--mount", "--uts", "--"]
        return [*enter, "bash", "-c", ENTER, f"node{node}", *own, "--", *command]

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
    enter = ("ip", "netns", "exec", names[0], "unshare", "--mount", "--uts", "--")
    run(*enter, "mount", "-t", "tmpfs", "tmpfs", "/dev/shm")


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


CAMPAIGN = """
campaign: two-nodes
system: cpu-1core
backend_version: "0.32.0"
acceptance: auto
environment: {OMP_NUM_THREADS: "1", VLLM_CPU_OMP_THREADS_BIND: nobind}
execution: {nodes: 2}
deployments:
  tensor:
    model: config/models/qwen3-tiny
    worker_type: decode
    topology: {tp: 2}
    limits: &limits {max_num_tokens: 1024, max_batch_size: 4, max_model_len: 2048}
    engine: &engine {load_format: dummy, enforce_eager: true, kv_cache_memory_bytes: 67108864}
    grid:
      decode: {contexts: [256], batch_sizes: [1, 2, 4]}
  data:
    model: config/models/llama-moe-tiny
    worker_type: prefill
    topology: {tp: 1, dp: 2, moe_tp: 1, moe_ep: 2}
    limits: *limits
    engine: *engine
    grid:
      prefill: {new_tokens: [64], batch_sizes: [1, 2], prefix_blocks: [0, 1]}
"""


def write_campaign(project: Path) -> None:
    """The campaign `two-nodes`, on nodes of one core: the machine's system file with half of its node."""
    system = (project / "config/systems/cpu-2core.yaml").read_text()
    for old, new in (("name: cpu-2core", "name: cpu-1core"), ("num_gpus_per_node: 2", "num_gpus_per_node: 1")):
        assert old in system
        system = system.replace(old, new)
    (project / "config/systems/cpu-1core.yaml").write_text(system)
    (project / "config/campaigns/two-nodes.yaml").write_text(CAMPAIGN)
