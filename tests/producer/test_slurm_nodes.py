"""The launch line under a real Slurm of two nodes: who is started where, and what is left when something ends."""

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from conftest import ROOT, copy_project
from slurm_nodes import SlurmNodes, slurm_nodes
from two_nodes import write_campaign

from producer.nodes import launch_words
from schemas.request import Execution

PROGRAM = ROOT / "tests" / "producer" / "node_program.py"

JOB = """#!/bin/sh
# As the executor plugin starts a job (snakemake_executor_plugin_slurm_jobstep 0.6.1): one step on one node, to whose
# srun it leaves the job's number alone.
env $(env | grep -o '^SLURM_[A-Z_]*' | grep -v 'SLURM_JOB_ID' | sed 's/^/-u /') \\
  srun -n1 --cpu-bind=q --cpus-per-task=1 --nodes=2 sh -c {shell}
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmNodes]:
    with slurm_nodes(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


class Job:
    """A job that runs `body` as the rank of every node, from the generated launch line on.

    Its options are those of the executor plugin (2.8.0, submit_string.py).
    """

    def __init__(self, slurm: SlurmNodes, folder: Path, body: str, gres: str | None = None) -> None:
        self._slurm, self.log = slurm, folder / "log"
        line = shlex.join(launch_words(Execution(nodes=2, gres=gres)))
        shell = f"{line} {shlex.join([sys.executable, str(PROGRAM), 'slurm', body])}"
        (folder / "job").write_text(JOB.format(shell=shlex.quote(shell)))
        options = ["--parsable", "--nodes=2", "--mem=2000", "--cpus-per-task=1", f"--output={self.log}"]
        options.append(f"--gres={gres}" if gres else "--ntasks=2")
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = slurm.run("sbatch", *options, str(folder / "job"), env=environment, cwd=str(ROOT))
        assert done.returncode == 0, done.stderr
        self.number = done.stdout.strip()

    def state(self) -> tuple[str, str]:
        """State and exit code as Slurm has them."""
        words = self._slurm.run("scontrol", "show", "job", self.number).stdout.split()
        found = dict(word.split("=", 1) for word in words if "=" in word)
        return found["JobState"], found["ExitCode"]

    def wait(self, seconds: float = 90) -> tuple[str, str]:
        deadline = time.monotonic() + seconds
        while (state := self.state())[0] in ("PENDING", "RUNNING", "COMPLETING"):
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.3)
        return state


def pids(folder: Path) -> list[int]:
    """Those of the ranks on both nodes."""
    deadline = time.monotonic() + 60
    while len(found := [file for file in folder.glob("pid*") if file.read_text()]) < 2:
        assert time.monotonic() < deadline, (folder / "log").read_text()
        time.sleep(0.05)
    return [int(file.read_text()) for file in sorted(found)]


def still_there(numbers: list[int]) -> list[int]:
    deadline = time.monotonic() + 30
    while any(psutil.pid_exists(pid) for pid in numbers) and time.monotonic() < deadline:
        time.sleep(0.1)
    return [pid for pid in numbers if psutil.pid_exists(pid)]


def waiting(folder: Path) -> str:
    """A rank that leaves its process id, which is the machine's: the nodes share the table of processes."""
    file = f"{folder}/pid%d' % place[1]"
    return f"open('{file}, 'w').write(str(os.getpid()))\nwhile True: heart.step(); time.sleep(0.1)"


def saying(folder: Path, name: str, text: str) -> str:
    """A rank that writes down a text, and waits for the other's: the first one to end would end the launch."""
    return (
        f"import socket\nopen('{folder}/{name}%d' % place[1], 'w').write({text})\n"
        f"while not all(os.path.exists(f'{folder}/{name}{{node}}') for node in (0, 1)): time.sleep(0.05)"
    )


def test_both_nodes_find_each_other_by_what_slurm_says(slurm: SlurmNodes, tmp_path: Path):
    job = Job(slurm, tmp_path, saying(tmp_path, "node", "f'{socket.gethostname()} {place[:5]} {place[5]}'"))
    assert job.wait() == ("COMPLETED", "0:0"), job.log.read_text()
    port = 20000 + 10 * (int(job.number) % 1200)
    *head, attempt = (tmp_path / "node0").read_text().split(" ")
    *other, same = (tmp_path / "node1").read_text().split(" ")
    assert " ".join(head) == f"node0 (2, 0, '10.77.0.1', {port}, '10.77.0.1')"
    assert " ".join(other) == f"node1 (2, 1, '10.77.0.1', {port}, '10.77.0.2')"
    # Both are of the launch that the head began.
    assert attempt == same
    assert re.fullmatch(r"[0-9a-f]{32}", attempt)
    assert "ended: \n" in job.log.read_text()


def test_each_node_has_its_gpus(slurm: SlurmNodes, tmp_path: Path):
    job = Job(slurm, tmp_path, saying(tmp_path, "gpus", "os.environ['CUDA_VISIBLE_DEVICES']"), gres="gpu:2")
    assert job.wait() == ("COMPLETED", "0:0"), job.log.read_text()
    assert [(tmp_path / f"gpus{node}").read_text() for node in (0, 1)] == ["0,1", "0,1"]


def test_a_rank_that_dies_on_the_other_node_ends_the_job_with_its_reason(slurm: SlurmNodes, tmp_path: Path):
    job = Job(slurm, tmp_path, waiting(tmp_path))
    ranks = pids(tmp_path)
    psutil.Process(ranks[1]).kill()
    assert job.wait() == ("FAILED", "1:0")
    assert "ended: node 1: rank 1 was ended by SIGKILL\n" in job.log.read_text()
    assert still_there(ranks) == []


@pytest.mark.parametrize("node", [0, 1])
def test_a_supervisor_that_is_killed_ends_the_job(slurm: SlurmNodes, tmp_path: Path, node: int):
    job = Job(slurm, tmp_path, waiting(tmp_path))
    ranks = pids(tmp_path)
    psutil.Process(ranks[node]).parent().kill()
    assert job.wait()[0] == "FAILED"
    assert still_there(ranks) == []


def test_a_cancelled_job_leaves_nothing_on_either_node(slurm: SlurmNodes, tmp_path: Path):
    job = Job(slurm, tmp_path, waiting(tmp_path))
    ranks = pids(tmp_path)
    slurm.run("scancel", job.number)
    assert job.wait()[0] == "CANCELLED"
    assert still_there(ranks) == []


OPT_IN = "PASSGRID_TWO_NODES"


@pytest.mark.engine
@pytest.mark.skipif(OPT_IN not in os.environ, reason=f"{OPT_IN} is not set: make test-two-nodes, several minutes")
def test_a_campaign_over_two_nodes_is_measured_by_snakemake(slurm: SlurmNodes, tmp_path: Path):
    """From the campaign file to the report: probes and cells are jobs of two nodes each."""
    (tmp_path / "project").mkdir()
    workspace = copy_project(tmp_path / "project")
    write_campaign(workspace.root)
    options = ["--profile", "slurm", "--jobs=1", "--latency-wait=5", "--slurm-init-seconds-before-status-checks=2"]
    command = ["snakemake", *options, "--seconds-between-status-checks=2", "--config", "campaign=two-nodes"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        slurm.command(command), cwd=workspace.root, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert (workspace.root / "results/two-nodes/current/report.html").exists()
    assert len(list((workspace.root / "results/two-nodes/cells").glob("*/benchmark*.json"))) == 3
