"""Deployments over several nodes: how many they take, how Slurm starts them, and which node this process is on."""

import argparse
import re
from collections.abc import Mapping
from itertools import count
from typing import NamedTuple

from schemas.errors import Refusal
from schemas.launch import Topology
from schemas.request import Execution

FIRST_PORT = 20000
"""Below Linux's ephemeral ports (32768 and up), which any connection may hold."""

PORTS = 10
"""Ports of a launch: vLLM counts up from the first for each group of ranks it makes (`get_next_dp_init_port`,
vllm/config/parallel.py), the nodes' own connection is at the last."""

LAUNCHES = 1200
"""How many launches with ports of their own fit below the ephemeral ones."""


def nodes_needed(topology: Topology, gpus_per_node: int) -> int:
    """The fewest nodes that take the topology in equal parts."""
    fewest = -(-topology.gpus // gpus_per_node)
    return next(nodes for nodes in count(fewest) if topology.gpus % nodes == 0)


def slurm_tasks(execution: Execution) -> int | None:
    """Slurm's tasks of a job of several nodes: the executor plugin asks for one, which one node runs. In a job with
    GPUs it asks for none, and would take a number for the tasks of each GPU (2.8.0, submit_string.py)."""
    return execution.nodes if execution.nodes > 1 and execution.gres is None else None


def launch_words(execution: Execution) -> list[str]:
    """What stands before a command that runs once a node; empty for one node.

    It stands in a job step of one node, which Snakemake's executor plugin starts. `--overlap` and `--mem=0` share what
    that step holds, and without SLURM_JOB_NODELIST, where Slurm 22.05 names the nodes of the step, `srun` finds all of
    the job. One process that fails ends all: none of them can go on alone.
    """
    nodes = execution.nodes
    if nodes == 1:
        return []
    words = ["env", "-u", "SLURM_JOB_NODELIST", "srun", "--overlap", "--mem=0"]
    words += [f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
    words += [f"--cpus-per-task={execution.cpus_per_task}", "--kill-on-bad-exit=1"]
    if execution.gres is not None:
        words.append(f"--gres={execution.gres}")
    return words


ATTEMPT_ID = "PASSGRID_ATTEMPT_ID"
"""Environment variable of every process of an engine: which launch it is of."""


class Place(NamedTuple):
    """One node of a launch. Node 0 is the head: the others find it at `head`, and it claims, writes and decides.

    `address` is the one under which the other nodes reach this one, known once they have met; `attempt_id` is of the
    launch, made by the head when all begin, and empty in an engine that nobody supervises.
    """

    nodes: int = 1
    node_rank: int = 0
    head: str = "127.0.0.1"
    port: int = 0
    address: str = ""
    attempt_id: str = ""

    @property
    def control_port(self) -> int:
        return self.port + PORTS - 1

    @property
    def arguments(self) -> list[str]:
        """For the command line of a rank's process."""
        values = {"--nodes": self.nodes, "--node-rank": self.node_rank, "--head-address": self.head}
        values |= {"--port": self.port, "--own-address": self.address}
        values["--attempt-id"] = self.attempt_id
        return [f"{name}={value}" for name, value in values.items()]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The place of a process, for those who start it without Slurm."""
    parser.add_argument("--nodes", type=int, default=1, help="nodes of the deployment; with srun it is known")
    parser.add_argument("--node-rank", type=int, default=0, help="this node, 0 for the head")
    parser.add_argument("--head-address", default="127.0.0.1", help="where the other nodes reach node 0")
    parser.add_argument("--port", type=int, default=0, help=f"first of {PORTS} free ports of node 0")
    parser.add_argument("--own-address", default="", help=argparse.SUPPRESS)
    parser.add_argument("--attempt-id", default="", help=argparse.SUPPRESS)


def given_place(arguments: argparse.Namespace) -> Place:
    """The place of `add_arguments`."""
    return Place(
        arguments.nodes,
        arguments.node_rank,
        arguments.head_address,
        arguments.port,
        arguments.own_address,
        arguments.attempt_id,
    )


def first_host(nodelist: str) -> str:
    """The first host of Slurm's hostlist expression: `gpu[003-004,007]` is gpu003."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodelist)
    assert first is not None
    return re.sub(r"\[([^\]\-,]*)[^\]]*\]", r"\1", first[0])


def slurm_place(environment: Mapping[str, str]) -> Place | None:
    """The place that `srun` gave this process (srun(1), output environment variables); None without a job step.

    The ports follow from the job's number, so every node knows them.

    Raises:
        Refusal: a step with more than one process a node.
    """
    if "SLURM_STEP_NUM_NODES" not in environment:
        return None
    nodes, tasks = int(environment["SLURM_STEP_NUM_NODES"]), int(environment["SLURM_STEP_NUM_TASKS"])
    if tasks != nodes:
        raise Refusal("srun --ntasks", f"{nodes}, one a node", tasks, "job step")
    return Place(
        nodes=nodes,
        node_rank=int(environment["SLURM_NODEID"]),
        head=first_host(environment["SLURM_STEP_NODELIST"]),
        port=FIRST_PORT + PORTS * (int(environment["SLURM_JOB_ID"]) % LAUNCHES),
    )


def place_of(wanted: int, given: Place, environment: Mapping[str, str]) -> Place:
    """Where this process runs a deployment of `wanted` nodes: as `given` on its command line, or as Slurm says.

    Raises:
        Refusal: another number of nodes, or a node rank or port that cannot be.
    """
    place = given
    if given.nodes == 1 < wanted:
        place = slurm_place(environment) or given
    if place.nodes != wanted:
        raise Refusal("nodes", f"{wanted} of this deployment", place.nodes, "launch")
    if not 0 <= place.node_rank < place.nodes:
        raise Refusal("node rank", f"one of 0 to {place.nodes - 1}", place.node_rank, "launch")
    if place.nodes > 1 and not 0 < place.port <= 65535 - PORTS:
        raise Refusal("port", f"a port whose next {PORTS - 1} are ports too", place.port, "launch")
    return place
