"""Deployments over nodes: how many they take, what starts them, where a process finds itself, and what vLLM is told."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Workspace
from two_nodes import write_campaign

from producer.control import Engines
from producer.engine import Rank, set_environment
from producer.graph import CampaignGraph
from producer.launch import command_of
from producer.nodes import FIRST_PORT, PORTS, Place, first_host, launch_words, nodes_needed, place_of, slurm_place
from producer.resolving import launch_of, probe_digest, read_campaign, resolve
from schemas.errors import Refusal
from schemas.launch import Topology
from schemas.request import Container, Execution

VLLM_033 = "PASSGRID_VLLM_033"


@pytest.mark.parametrize(
    ("topology", "gpus_per_node", "nodes"),
    [
        ({"tp": 4}, 4, 1),
        ({"tp": 2}, 1, 2),
        ({"tp": 8}, 4, 2),
        ({"tp": 6}, 4, 2),  # 3 + 3
        ({"tp": 10}, 4, 5),  # on 3 nodes some would have 4 and some 3
        ({"tp": 7}, 4, 7),
        ({"dp": 16, "moe_ep": 16}, 8, 2),
        ({"dp": 5, "moe_ep": 5}, 4, 5),
    ],
)
def test_as_many_nodes_as_take_equal_parts(topology, gpus_per_node: int, nodes: int):
    assert nodes_needed(Topology(**topology), gpus_per_node) == nodes


# What a campaign may ask for.

CAMPAIGN = """
campaign: c
system: gb300
backend_version: "0.33.0"
execution: {{nodes: {nodes}, gres: "{gres}"}}
deployments:
  d:
    model: config/models/{model}
    topology: {topology}
    limits: {{max_model_len: 2048}}
    engine: {{load_format: dummy, kv_cache_memory_bytes: 67108864}}
"""


def campaign(folder: Path, topology: str, nodes: int, gres: str = "gpu:4", model: str = "qwen3-tiny") -> Path:
    file = folder / "c.yaml"
    file.write_text(CAMPAIGN.format(topology=topology, nodes=nodes, gres=gres, model=model))
    return file


def resolved(file: Path):
    return resolve(read_campaign(file), file)


@pytest.mark.parametrize(
    ("topology", "nodes", "gres", "line"),
    [
        ("{tp: 8}", 1, "gpu:8", "deployments.d.topology: expected at most 4 GPUs of gb300, found tp 8 x dp 1"),
        (
            "{tp: 12}",
            2,
            "gpu:4",
            "deployments.d.topology: expected at most 8 GPUs of 2 nodes of gb300, found tp 12 x dp 1",
        ),
        (
            "{tp: 4}",
            2,
            "gpu:2",
            "deployments.d.execution.nodes: expected 1, the fewest that take tp 4 x dp 1 in equal parts of at most "
            "4 GPUs, found 2",
        ),
        (
            "{tp: 10}",
            3,
            "gpu:4",
            "deployments.d.execution.nodes: expected 5, the fewest that take tp 10 x dp 1 in equal parts of at most "
            "4 GPUs, found 3",
        ),
        (
            "{tp: 8}",
            2,
            "gpu:8",
            "deployments.d.execution.gres: expected gpu:4, the GPUs of deployment d on each node, found gpu:8",
        ),
    ],
)
def test_an_allocation_that_the_topology_does_not_fill_evenly_is_refused(tmp_path: Path, topology, nodes, gres, line):
    file = campaign(tmp_path, topology, nodes, gres)
    with pytest.raises(Refusal) as refusal:
        resolved(file)
    assert str(refusal.value) == f"{line}: {file}"


def test_tensor_parallel_ranks_of_data_parallel_engines_are_refused_on_any_number_of_nodes(tmp_path: Path):
    file = campaign(tmp_path, "{tp: 2, dp: 4, moe_ep: 8}", 2, model="llama-moe-tiny")
    with pytest.raises(Refusal, match=r"deployments.d.topology: expected pure TP .* or DEP \(tp 1, moe_ep = dp\)"):
        resolved(file)


def test_the_number_of_nodes_is_part_of_what_is_measured(tmp_path: Path):
    """The same engine on one node of eight GPUs and on two of four gives other numbers."""
    request = resolved(campaign(tmp_path, "{tp: 8}", 2))
    deployment = request.deployments["d"]
    assert launch_of(request, deployment)["nodes"] == 2
    node = request.system.node.model_copy(update={"num_gpus_per_node": 8})
    larger = request.model_copy(update={"system": request.system.model_copy(update={"node": node})})
    assert "nodes" not in launch_of(larger, deployment)
    assert probe_digest(request, deployment) != probe_digest(larger, deployment)


# What starts it.


AGAIN = ["python", "-m", "producer.launch", "--on-node"]
TWO_NODES = "env -u SLURM_JOB_NODELIST srun --overlap --mem=0 --nodes=2 --ntasks=2 --ntasks-per-node=1"


def test_one_node_needs_no_launcher():
    assert launch_words(Execution(gres="gpu:4", cpus_per_task=32)) == []


def test_several_nodes_are_started_once_a_node_and_end_together():
    line = " ".join(launch_words(Execution(nodes=2, gres="gpu:h200:8", cpus_per_task=64)))
    assert line == f"{TWO_NODES} --cpus-per-task=64 --kill-on-bad-exit=1 --gres=gpu:h200:8"
    assert "--gres" not in " ".join(launch_words(Execution(nodes=3)))


def test_a_command_of_several_nodes_is_launched_again_on_each():
    execution, command = Execution(nodes=2), ["producer.run_cell", "--cell", "c"]
    first = command_of(execution, "/project", "d1", command, AGAIN)
    assert " ".join(first) == f"{TWO_NODES} --cpus-per-task=1 --kill-on-bad-exit=1 {' '.join(AGAIN)}"
    assert command_of(execution, "/project", "d1", command) == [sys.executable, "-m", *command]


def test_a_container_of_several_nodes_is_entered_on_each():
    command = ["producer.run_cell", "--cell", "c"]
    apptainer = Execution(nodes=2, container=Container(runtime="apptainer", image="i.sif"))
    assert command_of(apptainer, "/project", "d1", command, AGAIN)[-len(AGAIN) :] == AGAIN
    assert command_of(apptainer, "/project", "d1", command)[:2] == ["apptainer", "exec"]
    pyxis = Execution(nodes=2, container=Container(runtime="pyxis", image="i"))
    line = " ".join(command_of(pyxis, "/project", "d1", command, AGAIN))
    assert line.startswith(f"{TWO_NODES} --cpus-per-task=1 --kill-on-bad-exit=1 --container-image=i ")


def test_the_rules_ask_for_the_nodes_of_a_deployment(project: Workspace):
    write_campaign(project.root)
    asked = resources_of(project, "two-nodes")
    assert [(one["nodes"], one["tasks"]) for one in asked] == [(2, 2)] * 2
    assert [(one["nodes"], "tasks" in one) for one in resources_of(project, "cpu-parallel")] == [(1, False)] * 4


def resources_of(project: Workspace, campaign: str) -> list[dict[str, Any]]:
    done = project.snakemake("-n", "--config", f"campaign={campaign}", "--logger", "passgrid")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return [line["resources"] for line in lines if line.get("rule") == "probe"]


def test_a_job_with_gpus_names_no_tasks(project: Workspace, monkeypatch: pytest.MonkeyPatch):
    """The executor plugin would take them for tasks of each GPU."""
    campaign(project.root / "config/campaigns", "{tp: 8}", 2)
    monkeypatch.chdir(project.root)
    asked = CampaignGraph("c").resources
    assert (asked["nodes"], asked["gres"]) == (2, "gpu:4")
    assert "tasks" not in asked


NODELISTS = ["node7", "gpu[003-004,007]", "a,b[1-2]", "rack[1-2]n[04-06]", "x[9,1-3]", "h1-[2-3]", "n10-ib,m1"]


@pytest.mark.parametrize("nodelist", NODELISTS)
def test_the_first_host_is_the_one_that_slurm_names_first(nodelist: str, tmp_path: Path):
    if shutil.which("scontrol") is None:
        pytest.skip("no scontrol: apt-get install slurm-client")
    (tmp_path / "slurm.conf").write_text("ClusterName=c\nSlurmctldHost=localhost\n")
    environment = os.environ | {"SLURM_CONF": str(tmp_path / "slurm.conf")}
    command = ["scontrol", "show", "hostnames", nodelist]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert first_host(nodelist) == done.stdout.split()[0]


# Where a process finds itself.

STEP = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_NODEID": "1",
}


def test_a_job_step_says_which_node_this_is():
    assert slurm_place(STEP) == Place(nodes=2, node_rank=1, head="gpu03", port=FIRST_PORT + 34 * 10)
    assert slurm_place({"SLURM_JOB_ID": "1234", "SLURM_JOB_NUM_NODES": "2"}) is None  # a batch script is no step


def test_the_ports_of_neighbouring_jobs_are_apart_and_below_the_ephemeral_ones():
    ports = [slurm_place(STEP | {"SLURM_JOB_ID": str(job)}).port for job in range(5000, 6200)]
    assert len({port // PORTS for port in ports}) == 1200
    assert min(ports) > 1024
    assert max(ports) + PORTS <= 32768


def test_two_processes_on_a_node_are_refused():
    with pytest.raises(Refusal, match="srun --ntasks: expected 2, one a node, found 4"):
        slurm_place(STEP | {"SLURM_STEP_NUM_TASKS": "4"})


def test_arguments_come_before_slurm_and_one_node_asks_nobody():
    given = Place(nodes=2, node_rank=0, head="10.0.0.1", port=30000)
    assert place_of(2, given, STEP) == given
    assert place_of(2, Place(), STEP).node_rank == 1
    assert place_of(1, Place(), STEP | {"SLURM_STEP_NUM_NODES": "1"}) == Place()


@pytest.mark.parametrize(
    ("wanted", "given", "environment", "line"),
    [
        (2, Place(), {}, "nodes: expected 2 of this deployment, found 1"),
        (4, Place(), STEP, "nodes: expected 4 of this deployment, found 2"),
        (1, Place(nodes=2, port=30000), {}, "nodes: expected 1 of this deployment, found 2"),
        (2, Place(nodes=2, node_rank=2, port=30000), {}, "node rank: expected one of 0 to 1, found 2"),
        (2, Place(nodes=2), {}, "port: expected a port whose next 9 are ports too, found 0"),
        (2, Place(nodes=2, port=65530), {}, "port: expected a port whose next 9 are ports too, found 65530"),
    ],
)
def test_a_place_that_is_not_the_deployments_is_refused(wanted: int, given: Place, environment, line: str):
    with pytest.raises(Refusal, match=f"^{line}: launch$"):
        place_of(wanted, given, environment)


# What vLLM is told.

ON_NODE_1 = Place(nodes=2, node_rank=1, head="10.0.0.1", port=20000, address="10.0.0.2")


def test_each_node_starts_its_share_of_the_data_parallel_ranks():
    engines = Engines("module", ["--cell", "c"], Topology(dp=8, moe_ep=8), "cuda")
    for place, names in ((ON_NODE_1._replace(node_rank=0), range(4)), (ON_NODE_1, range(4, 8))):
        assert list(engines.commands(place)) == [f"rank {rank}" for rank in names]
    assert Rank(5, 8, ON_NODE_1).environment == {
        "VLLM_DP_RANK": "5",
        "VLLM_DP_RANK_LOCAL": "1",
        "VLLM_DP_SIZE": "8",
        "VLLM_DP_MASTER_IP": "10.0.0.1",
        "VLLM_DP_MASTER_PORT": "20000",
    }
    assert Rank(5, 8, ON_NODE_1).arguments == {}
    assert not Rank(5, 8, ON_NODE_1).follows


def test_every_process_of_an_engine_knows_its_launch(monkeypatch):
    monkeypatch.setattr(os, "environ", {"PASSGRID_ATTEMPT_ID": "of another launch"})
    set_environment({"OMP_NUM_THREADS": "1"}, Rank(place=Place(attempt_id="a" * 32)))
    assert os.environ["PASSGRID_ATTEMPT_ID"] == "a" * 32
    assert os.environ["OMP_NUM_THREADS"] == "1"


def test_an_engine_over_nodes_schedules_on_the_head_alone():
    engines = Engines("module", [], Topology(tp=8), "cuda")
    assert list(engines.commands(ON_NODE_1)) == list(engines.commands(ON_NODE_1._replace(node_rank=0))) == ["rank 0"]
    assert Rank(0, 1, ON_NODE_1).follows
    assert not Rank(0, 1, ON_NODE_1._replace(node_rank=0)).follows
    assert Rank(0, 1, ON_NODE_1).environment == {}


CONFIGS = """
import json, sys
if sys.argv[1] == "0.33.0":  # only its Python files are here: its platform cannot be found out
    import vllm.platforms as platforms
    from vllm.platforms.cpu import CpuPlatform
    platforms._current_platform = CpuPlatform()
import os
import vllm
import vllm.entrypoints.llm as offline
from vllm.config.parallel import ParallelConfig
from vllm.engine.arg_utils import EngineArgs
from producer.engine import Rank, engine_arguments
from producer.nodes import Place
from cells import frozen_cell
from schemas.launch import Topology

ENGINE = {"kv_cache_memory_bytes": 1 << 28, "graph": {"cudagraph_capture_sizes": [1, 2]}}
found = {"version": vllm.__version__}
place = Place(nodes=2, head="10.0.0.1", port=20000)
for node in (0, 1):
    launch = frozen_cell(topology={"tp": 4}).identity
    arguments = engine_arguments("config/models/qwen3-tiny", launch, Rank(0, 1, place._replace(node_rank=node)))
    config = EngineArgs(**arguments).create_engine_config(headless=node > 0).parallel_config
    names = "nnodes_within_dp node_rank_within_dp local_world_size world_size master_addr master_port"
    found[f"tensor {node}"] = [getattr(config, name) for name in names.split()] + [config.distributed_executor_backend]
class Caught(Exception):
    pass


class LLMEngine:
    def from_engine_args(engine_args, usage_context):
        raise Caught(engine_args.create_engine_config(usage_context))


offline.LLMEngine = LLMEngine
launch = frozen_cell(topology={"tp": 4}, engine=ENGINE).identity
heads, followers = [
    engine_arguments("config/models/qwen3-tiny", launch, Rank(0, 1, place._replace(node_rank=node))) for node in (0, 1)
]
try:
    vllm.LLM(**heads)
except Caught as caught:
    head = caught.args[0]
follower = EngineArgs(**followers).create_engine_config(headless=True)
parts = "model_config cache_config scheduler_config load_config compilation_config kernel_config observability_config"
found["differ"] = [part for part in parts.split() if repr(getattr(head, part)) != repr(getattr(follower, part))]
found["hash"] = head.compute_hash() == follower.compute_hash()
os.environ.update(Rank(5, 8, place._replace(node_rank=1)).environment)
config = ParallelConfig(is_moe_model=True)
names = "data_parallel_rank data_parallel_rank_local data_parallel_size data_parallel_master_ip nnodes_within_dp"
found["data"] = [getattr(config, name) for name in names.split()]
ports = {config.get_next_dp_init_port() for _ in range(3)}
found["ports"] = sorted(ports)
if hasattr(config, "get_local_gpu_index"):
    found["gpu"] = config.get_local_gpu_index(0)
print(json.dumps(found))
"""


def configs(version: str, *folders: str) -> dict[str, object]:
    """What a release's own configuration makes of our arguments and environment."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*folders, str(ROOT), str(ROOT / "tests")])}
    command = [sys.executable, "-c", CONFIGS, version]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def check_configs(found: dict[str, object], version: str) -> None:
    assert str(found["version"]).startswith(version)
    assert found["tensor 0"] == [2, 0, 2, 4, "10.0.0.1", 20000, "mp"]
    assert found["tensor 1"] == [2, 1, 2, 4, "10.0.0.1", 20000, "mp"]
    # A follower builds its configuration without the class that the head starts with.
    assert (found["differ"], found["hash"]) == ([], True)
    assert found["data"] == [5, 1, 8, "10.0.0.1", 1]
    assert found["ports"] == [20000, 20001, 20002]  # upwards, away from the nodes' own


def test_the_installed_release_understands_it():
    pytest.importorskip("vllm")
    check_configs(configs("0.32.0"), "0.32.0")


@pytest.mark.skipif(VLLM_033 not in os.environ, reason=f"{VLLM_033} names no folder with vllm 0.33.0's Python files")
def test_vllm_0_33_understands_it():
    found = configs("0.33.0", str(Path(os.environ[VLLM_033]).resolve()))
    check_configs(found, "0.33.0")
    assert found["gpu"] == 1  # rank 5 is the second of its node
