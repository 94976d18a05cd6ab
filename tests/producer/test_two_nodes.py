"""One engine over two nodes, and two engines of a deployment on a node each: the real engine, on the CPU.

The nodes are network namespaces with host names, shared memory and device locks of their own (tests/two_nodes.py).
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl
import psutil
import pytest
from conftest import ROOT, Workspace, cell_folder, copy_project
from two_nodes import HEAD, Nodes, two_nodes, write_campaign

from schemas.native import RankArtifact, read_struct

pytestmark = [pytest.mark.engine, pytest.mark.demo]

PORT = 23000


class Launches:
    """Starts one command on both nodes, as `srun` does, in a copy of the project that both of them see."""

    def __init__(self, workspace: Workspace, nodes: Nodes) -> None:
        self.workspace, self._nodes = workspace, nodes

    def log(self, name: str, node: int) -> str:
        return (self.workspace.root / f"{name}.{node}.log").read_text()

    def start(self, name: str, module: str, *arguments: str) -> list[subprocess.Popen[bytes]]:
        processes = []
        for node in (0, 1):
            place = ["--nodes=2", f"--node-rank={node}", f"--head-address={HEAD}", f"--port={PORT}"]
            command = [sys.executable, "-m", module, *arguments, "--start-timeout=120", *place]
            options = {"cwd": self.workspace.root, "env": os.environ | {"PYTHONPATH": str(ROOT)}}
            log = self.workspace.root / f"{name}.{node}.log"
            processes.append(self._nodes.start(node, command, log, **options))
        return processes

    def run(self, name: str, module: str, *arguments: str) -> None:
        processes = self.start(name, module, *arguments)
        codes = [process.wait(timeout=300) for process in processes]
        assert codes == [0, 0], self.log(name, 0)[-3000:] + self.log(name, 1)[-3000:]

    def snakemake(self, *targets: str) -> None:
        done = self.workspace.snakemake(*targets, "--config", "campaign=two-nodes")
        assert done.returncode == 0, done.stdout + done.stderr

    def cell(self, prefix: str) -> Path:
        (file,) = (self.workspace.root / "results/two-nodes/cells").glob(f"{prefix}-*/cell.json")
        return file


def probe(launches: Launches) -> None:
    jobs = [job for job in launches.workspace.dry_run("--config", "campaign=two-nodes") if job.rule == "probe"]
    assert len(jobs) == 2
    for job in jobs:
        folder = Path(job.output).parent.name
        deployment, digest = folder.rsplit("-", 1)
        arguments = ["--campaign=config/campaigns/two-nodes.yaml", f"--deployment={deployment}", f"--digest={digest}"]
        phase = Path(job.output).stem
        launches.run(
            f"probe-{deployment}", "producer.run_probe", *arguments, f"--phase={phase}", f"--output={job.output}"
        )


def freeze(launches: Launches) -> None:
    launches.snakemake("plan")
    jobs = launches.workspace.dry_run("--config", "campaign=two-nodes")
    cells = [Path(job.output.split(", ")[0]).parent for job in jobs if job.rule == "collect_cell"]
    assert len(cells) == 2
    for cell in cells:
        files = ["--campaign", "config/campaigns/two-nodes.yaml", "--cell", cell.name, "--output", f"{cell}/cell.json"]
        done = launches.workspace.script("freeze_cell", *files)
        assert done.returncode == 0, done.stderr


def has_a_point(cell: Path) -> bool:
    journal = cell.parent / "repetitions.jsonl"
    return journal.exists() and b'{"kind":"point"' in journal.read_bytes()


def workers_below(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    found = []
    for below in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [below] if "Worker" in " ".join(below.cmdline()) else []
    return found


def kill_a_worker_of_node_1(launches: Launches, cell: Path) -> tuple[list[int], float, list[psutil.Process]]:
    """Once a point is finished; returns the exit codes, the seconds until both nodes had ended, and who still runs."""
    processes = launches.start("killed", "producer.run_cell", f"--cell={cell}")
    deadline = time.monotonic() + 200
    workers: list[psutil.Process] = []
    while not has_a_point(cell):
        assert time.monotonic() < deadline, launches.log("killed", 0)[-3000:]
        assert [process.poll() for process in processes] == [None, None], launches.log("killed", 0)[-3000:]
        workers = workers or workers_below(processes[1])
        time.sleep(0.02)
    (worker,) = workers
    worker.suspend()  # the cell has two more points, which take no longer than a look at all processes
    everybody = [p for process in processes for p in psutil.Process(process.pid).children(recursive=True)]
    began = time.monotonic()
    worker.kill()
    codes = [process.wait(timeout=120) for process in processes]
    seconds = time.monotonic() - began
    _, alive = psutil.wait_procs(everybody, timeout=10)
    return codes, seconds, [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


class Measured(NamedTuple):
    """The campaign after all, and how the launch ended whose worker was killed."""

    launches: Launches
    results: Path
    killed: tuple[list[int], float, list[psutil.Process]]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Measured]:
    folder = tmp_path_factory.mktemp("two-nodes")
    with two_nodes(folder) as nodes:
        (folder / "project").mkdir()
        launches = Launches(copy_project(folder / "project"), nodes)
        write_campaign(launches.workspace.root)
        probe(launches)
        freeze(launches)
        killed = kill_a_worker_of_node_1(launches, launches.cell("decode-tensor"))
        launches.run("tensor", "producer.run_cell", f"--cell={launches.cell('decode-tensor')}")
        launches.run("data", "producer.run_cell", f"--cell={launches.cell('prefill-data')}")
        launches.snakemake()
        yield Measured(launches, launches.workspace.root / "results/two-nodes", killed)


def artifact(file: Path) -> RankArtifact:
    return read_struct(RankArtifact, file, "rank")


def shape(value: Any, path: str = "") -> set[str]:
    """Every path in a JSON value with the type at its end; of a list what its elements have."""
    if isinstance(value, dict):
        return {found for key, part in value.items() for found in shape(part, f"{path}.{key}")}
    if isinstance(value, list):
        return {found for part in value for found in shape(part, f"{path}[]")}
    return {f"{path}: {type(value).__name__}"}


BY_CHANCE = (".drifting[]", ".rejections[]")
"""Lists that say what happened: how many points drifted, and which repetitions ran again."""


def built_otherwise(one: Any, two: Any) -> set[str]:
    """Paths and types that one of two JSON values has and the other has not."""
    return {path for path in shape(one) ^ shape(two) if not any(chance in path for chance in BY_CHANCE)}


def test_a_probe_has_the_records_of_the_workers_on_every_node(measured: Measured):
    records = {
        file.parent.name.rsplit("-", 1)[0]: json.loads(file.read_text())
        for file in measured.results.glob("probe/*/*.json")
    }
    tensor, data = records["tensor"], records["data"]
    assert [(worker["dp_rank"], worker["tp_rank"]) for worker in tensor["workers"]] == [(0, 0), (0, 1)]
    assert [(worker["dp_rank"], worker["tp_rank"]) for worker in data["workers"]] == [(0, 0), (1, 0)]
    assert (len(tensor["schedulers"]), len(data["schedulers"])) == (1, 2)
    assert tensor["launch"]["nodes"] == data["launch"]["nodes"] == 2
    # Two KV heads over two workers: one each. 4 layers x K and V x 128 tokens x 64 x 2 bytes, of 64 MiB a worker.
    blocks = (64 << 20) // (4 * 2 * 128 * 64 * 2)
    assert [worker["cache"]["num_blocks"] for worker in tensor["workers"]] == [blocks] * 2
    for record in (tensor, data):
        everybody = [*record["workers"], *record["schedulers"]]
        assert {each["attempt_id"] for each in everybody} == {record["attempt_id"]}


def test_a_worker_that_dies_on_another_node_ends_both_and_costs_no_finished_point(measured: Measured):
    codes, seconds, alive = measured.killed
    assert codes == [1, 1]
    assert seconds < 30
    assert alive == []
    name = measured.launches.cell("decode-tensor").parent.name
    (line,) = [line for line in measured.launches.log("killed", 0).splitlines() if line.startswith("failed: ")]
    assert line.startswith(f"failed: {name} at point ")
    assert line.endswith(": node 1: rank 0 was ended by SIGKILL")
    found = artifact(measured.launches.cell("decode-tensor").with_name("benchmark.json"))
    assert len(found.sessions) == 2
    assert len(found.results) == 3


@pytest.mark.parametrize(
    ("cell", "names"),
    [("decode-tensor", ["benchmark.json"]), ("prefill-data", ["benchmark.json", "benchmark_dp1.json"])],
)
def test_artifacts_are_built_like_those_of_one_machine(measured: Measured, parallel: Path, cell: str, names: list[str]):
    folder, alone = measured.launches.cell(cell).parent, cell_folder(parallel, cell)
    assert sorted(file.name for file in folder.glob("benchmark*.json")) == names
    for name in (*names, "receipt.json", "merged.json", "evidence.json"):
        assert built_otherwise(*(json.loads((each / name).read_text()) for each in (folder, alone))) == set(), name
    assert json.loads((folder / "evidence.json").read_text())["failures"] == []


def test_ranks_on_two_nodes_run_the_same_forwards(measured: Measured):
    first, second = [
        artifact(measured.launches.cell("prefill-data").with_name(name))
        for name in ("benchmark.json", "benchmark_dp1.json")
    ]
    indices = [
        [raw.benchmark_sample.forward_index for row in a.results for raw in row.fpms[0].benchmark_measurement.raw_fpms]
        for a in (first, second)
    ]
    assert indices[0] == indices[1]
    assert len(indices[0]) == 4 * 10
    assert (first.dp.rank, second.dp.rank, first.dp.size, second.dp.size) == (0, 1, 2, 2)


def test_the_head_alone_claims_and_writes(measured: Measured):
    for prefix in ("decode-tensor", "prefill-data"):
        assert json.loads(measured.launches.cell(prefix).with_name("progress.json").read_text())["host"] == "node0"
    for name in ("tensor", "data"):
        assert "points/s" in measured.launches.log(name, 0)
        assert "points/s" not in measured.launches.log(name, 1)


def test_the_table_has_the_rows_of_both(measured: Measured):
    table = pl.read_parquet(next((measured.results / "current/systems").resolve().rglob("*.parquet")))
    rows = table.select("tp", "dp", "workload_kind").rows()
    assert sorted(rows) == [(1, 2, "prefill")] * 4 + [(2, 1, "decode")] * 3
