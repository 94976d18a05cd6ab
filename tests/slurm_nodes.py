"""A Slurm of two nodes on one machine: one slurmd in each of the two network namespaces of `two_nodes`."""

import contextlib
import os
import shutil
import stat
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from two_nodes import ADDRESSES, HEAD, Nodes, two_nodes

ROOT = Path("/tmp")
"""Sockets lie below it, and their names must be short."""

DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "sinfo")

CONFIGURATION = f"""
ClusterName=passgrid-nodes
SlurmctldHost=node0({HEAD})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={{root}}/munge/socket
StateSaveLocation={{root}}/state
SlurmdSpoolDir={{root}}/%n
SlurmctldPidFile={{root}}/slurmctld.pid
SlurmdPidFile={{root}}/%n.pid
MpiDefault=none
SwitchType=switch/none
TaskPlugin=task/none
ProctrackType=proctrack/linuxproc
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MinJobAge=3600
KillWait=5
InactiveLimit=0
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerParameters=sched_interval=2,batch_sched_delay=0
DefMemPerCPU=500
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=node0 NodeAddr={ADDRESSES[0]} CPUs=4 RealMemory=32768 Gres=gpu:2
NodeName=node1 NodeAddr={ADDRESSES[1]} CPUs=4 RealMemory=32768 Gres=gpu:2
PartitionName=cpu Nodes=node[0-1] Default=YES MaxTime=24:00:00 State=UP
"""


class SlurmNodes:
    """Commands on node 0 of the cluster."""

    def __init__(self, nodes: Nodes, folder: Path) -> None:
        self._nodes, self.root = nodes, folder

    def command(self, command: Sequence[str], node: int = 0) -> list[str]:
        return self._nodes.command(node, command, str(self.root / "etc"), "/etc/slurm")

    def run(self, *command: str, **options) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.command(command), capture_output=True, text=True, check=False, **options)


def _configure(root: Path) -> None:
    for name in ("munge", "state", "node0", "node1", "etc", "dev", "log"):
        (root / name).mkdir()
    (root / "munge" / "key").write_bytes(os.urandom(1024))
    (root / "munge" / "key").chmod(0o400)
    (root / "etc" / "slurm.conf").write_text(CONFIGURATION.format(root=root))
    # Two pretended GPUs a node: with device files Slurm sets CUDA_VISIBLE_DEVICES.
    for number in range(2):
        os.mknod(root / "dev" / f"gpu{number}", stat.S_IFCHR | 0o666, Path("/dev/null").stat().st_rdev)
    (root / "etc" / "gres.conf").write_text(f"AutoDetect=off\nNodeName=node[0-1] Name=gpu File={root}/dev/gpu[0-1]\n")
    # Autodetection finds no cgroups in a namespace, and slurmd would not start.
    (root / "etc" / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")


@contextlib.contextmanager
def slurm_nodes(folder: Path) -> Iterator[SlurmNodes]:
    """Skips the test, and says why, where no such cluster can run."""
    missing = [name for name in DAEMONS if shutil.which(name) is None]
    if missing:
        pytest.skip(f"not installed: {' '.join(missing)} (slurmctld slurmd slurm-client munge)")
    if not Path("/etc/slurm").is_dir():
        pytest.skip("no /etc/slurm, over which the cluster's own configuration is mounted")
    root = ROOT / f"passgrid-nodes-{os.getpid()}"
    daemons: list[subprocess.Popen[bytes]] = []
    with two_nodes(folder) as nodes:
        root.mkdir(mode=0o755)
        slurm = SlurmNodes(nodes, root)

        def start(*command: str) -> None:
            with (root / "log" / f"{len(daemons)}-{Path(command[0]).name}").open("wb") as log:
                # With the process that started it, a daemon ends too.
                command = ("setpriv", "--pdeathsig", "KILL", *command)
                daemons.append(subprocess.Popen(command, stdout=log, stderr=log))

        try:
            _configure(root)
            files = [f"--{name}-file={root}/munge/{name}" for name in ("key", "pid", "log", "seed")]
            start("munged", "--foreground", "--force", f"--socket={root}/munge/socket", *files)
            deadline = time.monotonic() + 30
            while not (root / "munge" / "socket").exists():
                assert time.monotonic() < deadline
                time.sleep(0.05)
            start(*slurm.command(["slurmctld", "-D", "-c"]))
            for node in (0, 1):
                start(*slurm.command(["slurmd", "-D", "-c", "-N", f"node{node}"], node))
            while slurm.run("sinfo", "-h", "-o", "%T %D").stdout.split() != ["idle", "2"]:
                logs = "\n".join(log.read_text()[-1500:] for log in sorted((root / "log").iterdir()))
                assert time.monotonic() < deadline, logs
                time.sleep(0.2)
            yield slurm
        finally:
            if len(daemons) > 1:
                slurm.run("scancel", "--user=root", timeout=30)
            for daemon in reversed(daemons):
                daemon.terminate()
            for daemon in daemons:
                daemon.wait(30)
            shutil.rmtree(root, ignore_errors=True)
