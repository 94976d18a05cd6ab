"""The tests' own Slurm: nothing of it is left behind, and what a killed session left does not break the next one."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from cluster import SlurmCluster, Unavailable, processes_of, wait_for
from conftest import ROOT

NAMES = ["gres.conf", "slurm.conf"]


@pytest.fixture
def second(slurm: SlurmCluster, tmp_path: Path) -> SlurmCluster:
    """A cluster beside the session's own, with its links elsewhere. Its root is short: it holds sockets."""
    cluster = SlurmCluster(Path(f"/tmp/passgrid-slurm-{time.monotonic_ns()}"), tmp_path / "etc")
    yield cluster
    cluster.stop()
    Path(f"{cluster.root}.lock").unlink(missing_ok=True)


def test_it_runs_jobs_with_their_gpus_and_leaves_nothing(second: SlurmCluster, tmp_path: Path):
    began = time.monotonic()
    second.start()
    assert time.monotonic() - began < 10
    assert sorted(path.name for path in (tmp_path / "etc").iterdir()) == NAMES
    devices = [
        second.command("srun", "--immediate=10", f"--gres=gpu:h200:{count}", "printenv", "CUDA_VISIBLE_DEVICES").strip()
        for count in (1, 4)
    ]
    assert devices == ["0", "0,1,2,3"]
    wait_for(lambda: len(second.ended()) == 2, 10, "the completion file")
    assert {job["JobState"] for job in second.ended().values()} == {"COMPLETED"}
    sockets = [socket for process in processes_of(second.root) for socket in process.net_connections("inet")]
    assert {socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN} == {"127.0.0.1"}
    second.stop()
    assert processes_of(second.root) == []
    assert not second.root.exists()
    assert list((tmp_path / "etc").iterdir()) == []


def test_a_killed_session_leaves_nothing_that_stops_the_next(second: SlurmCluster, tmp_path: Path):
    code = f"""
from pathlib import Path
from cluster import *
cluster = SlurmCluster(Path({str(second.root)!r}), Path({str(tmp_path / "etc")!r}))
cluster.start()
cluster.command("sbatch", "--output=/dev/null", "--wrap=srun sleep 1000")
wait_for(lambda: len(cluster.steps()) == 2, 20, "batch script and step")
print("up", flush=True)
time.sleep(1000)
"""
    session = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT / "tests", stdout=subprocess.PIPE, text=True)
    assert session.stdout.readline() == "up\n"
    with pytest.raises(Unavailable, match=f"another test session runs one below {second.root}"):
        second.start()
    sleeping = [p for p in psutil.process_iter(["cmdline"]) if (p.info["cmdline"] or [])[-2:] == ["sleep", "1000"]]
    assert len(sleeping) >= 1
    session.send_signal(signal.SIGKILL)
    session.wait()
    session.stdout.close()
    assert (tmp_path / "etc/slurm.conf").is_symlink()
    second.start()
    assert second.node_state() == "idle"
    assert second.command("squeue", "--noheader") == ""
    assert not [process for process in sleeping if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def test_another_clusters_configuration_is_left_alone(second: SlurmCluster, tmp_path: Path):
    (tmp_path / "etc").mkdir()
    conf = tmp_path / "etc/slurm.conf"
    conf.write_text("ClusterName=theirs\n")
    with pytest.raises(Unavailable, match=f"{conf} is another cluster's"):
        second.start()
    second.stop()
    assert conf.read_text() == "ClusterName=theirs\n"
