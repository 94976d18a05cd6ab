"""Starting the engine: environment first, then vLLM with the benchmark scheduler and the observers."""

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from producer.heartbeat import Heartbeat
from producer.nodes import ATTEMPT_ID, Place
from schemas.errors import Refusal
from schemas.launch import EngineSettings, GraphSettings, Limits, Precision, Topology

if TYPE_CHECKING:
    from producer.scheduler import BenchmarkScheduler


KV_CACHE_DTYPES = {"bfloat16": "auto", "fp8": "fp8"}
"""Label of the table -> vLLM's `kv_cache_dtype` under a bfloat16 model."""


def graph_config(graph: GraphSettings) -> dict[str, Any]:
    """vLLM's `compilation_config` of a campaign's graph settings; what they leave open stays the engine's."""
    config: dict[str, Any] = {}
    if graph.cudagraph_mode is not None:
        config["cudagraph_mode"] = graph.cudagraph_mode
    if graph.capture_sizes is not None:
        config["cudagraph_capture_sizes"] = list(graph.capture_sizes)
    return config


THREAD_SETTINGS = ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND")


class Launch(Protocol):
    """What an engine is started with: a resolved deployment and a cell identity both have it."""

    @property
    def limits(self) -> Limits: ...
    @property
    def engine(self) -> EngineSettings: ...
    @property
    def topology(self) -> Topology: ...
    @property
    def precision(self) -> Precision: ...


class Rank(NamedTuple):
    """A data-parallel rank of a launch: which of how many, on which of its nodes. Ranks meet at the head."""

    number: int = 0
    size: int = 1
    place: Place = Place()

    @property
    def environment(self) -> dict[str, str]:
        """vLLM's offline data parallelism: one process a rank (vllm/config/parallel.py, `__post_init__`).

        A rank's devices are those of its number on its node (`DP_LOCAL_RANK`, v1/worker/gpu_worker.py).
        """
        if self.size == 1:
            return {}
        return {
            "VLLM_DP_RANK": str(self.number),
            "VLLM_DP_RANK_LOCAL": str(self.number % (self.size // self.place.nodes)),
            "VLLM_DP_SIZE": str(self.size),
            "VLLM_DP_MASTER_IP": self.place.head,
            "VLLM_DP_MASTER_PORT": str(self.place.port),
        }

    @property
    def arguments(self) -> dict[str, Any]:
        """vLLM's tensor parallelism over nodes, by its multiprocessing executor (`--nnodes` of `vllm serve`)."""
        if self.place.nodes == 1 or self.size > 1:
            return {}
        return {
            "nnodes": self.place.nodes,
            "node_rank": self.place.node_rank,
            "master_addr": self.place.head,
            "master_port": self.place.port,
        }

    @property
    def follows(self) -> bool:
        """Whether this process has workers alone, and the scheduler is the head's."""
        return bool(self.arguments) and self.place.node_rank > 0


def network_environment(address: str) -> dict[str, str]:
    """Makes vLLM's queues and gloo listen where the other nodes reach this one.

    By itself vLLM takes the address of the default route (`get_ip`, vllm/utils/network_utils.py), and gloo what the
    host's name resolves to, which is a loopback address on many systems.
    """
    import psutil

    interfaces = psutil.net_if_addrs().items()
    names = [name for name, parts in interfaces if address in (part.address for part in parts)]
    return {"VLLM_HOST_IP": address, **({"GLOO_SOCKET_IFNAME": names[0]} if names else {})}


class Engine:
    """A started engine whose core runs in this process; `start_seconds` covers import, loading and warm-up.

    `group` connects the data-parallel ranks of the launch, None for a single one. `workers` are the records of this
    rank's workers, on whatever node; `threads` are those of each, and what the environment says of them.
    """

    def __init__(self, llm: Any, start_seconds: float) -> None:
        self.llm, self.start_seconds = llm, start_seconds
        self.core = llm.llm_engine.engine_core.engine_core
        self.scheduler: BenchmarkScheduler = self.core.scheduler
        self.group: Any = llm.llm_engine.dp_group
        self.workers = self.observe_workers()
        hardware = [worker["hardware"] for worker in self.workers]
        self.device_names: list[str] = [device["device_name"] for device in hardware]
        self.device: str = self.core.vllm_config.device_config.device_type
        self.threads = {
            "torch_num_threads": [device["threads"] for device in hardware],
            **{name: os.environ[name] for name in THREAD_SETTINGS if name in os.environ},
        }

    def observe_workers(self) -> list[dict[str, Any]]:
        """The records of this rank's workers, as plain values."""
        records: list[dict[str, Any]] = self.llm.collective_rpc("observe_worker")
        return records

    def observe_scheduler(self) -> dict[str, Any]:
        """The scheduler record of this data-parallel rank, as plain values."""
        from producer.observe_memory import scheduler_record

        return scheduler_record(self.scheduler)

    def observe_graph(self) -> dict[str, Any]:
        """The `cudagraph` block that every worker reports.

        Raises:
            Refusal: workers that resolved their graphs otherwise.
        """
        blocks: list[dict[str, Any]] = self.llm.collective_rpc("observe_graph")
        for number, block in enumerate(blocks):
            if block != blocks[0]:
                raise Refusal(f"cudagraph of worker {number}", f"{blocks[0]} of worker 0", block, "engine")
        return blocks[0]

    def collectors(self) -> list[dict[str, bool]]:
        """The garbage collectors of this process and of every worker's, in this order."""
        from producer.observe import collector_state

        states: list[dict[str, bool]] = self.llm.collective_rpc("worker_collector_state")
        return [collector_state(), *states]

    def stop(self) -> None:
        """End the workers and leave the group of ranks, in this order and not at the interpreter's leisure."""
        from vllm.distributed.utils import stateless_destroy_torch_distributed_process_group

        self.core.shutdown()
        if self.group is not None:
            stateless_destroy_torch_distributed_process_group(self.group)
            self.group = self.llm.llm_engine.dp_group = None

    @contextlib.contextmanager
    def frozen_collector(self) -> Iterator[None]:
        """No garbage collection while points are measured, in this process and in every worker's: a full one takes
        longer than a forward pass."""
        from producer.observe import freeze_collector, thaw_collector

        freeze_collector()
        self.llm.collective_rpc("freeze_worker_collector")
        try:
            yield
        finally:
            self.llm.collective_rpc("thaw_worker_collector")
            thaw_collector()

    def run_conversation(self) -> None:
        """Step the engine until its conversation has ended; the scheduler raises what stopped it."""
        while self.scheduler.running_conversation:
            self.core.step()
        if self.scheduler.stopped_by is not None:
            raise self.scheduler.stopped_by


def set_environment(environment: dict[str, str], rank: Rank) -> None:
    """The environment of the engine, before anything imports it. A campaign's own settings come last."""
    os.environ.update(
        CUDA_DEVICE_ORDER="PCI_BUS_ID",  # as NVML counts them
        HF_HUB_OFFLINE="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_LOGGING_STREAM="ext://sys.stderr",
        VLLM_NO_USAGE_STATS="1",
    )
    for name in THREAD_SETTINGS:  # Snakemake exports the job's own
        os.environ.pop(name, None)
    if rank.place.nodes > 1:
        for name, value in network_environment(rank.place.address).items():
            os.environ.setdefault(name, value)
    os.environ.update(environment | rank.environment | {ATTEMPT_ID: rank.place.attempt_id})


def engine_arguments(model: str, launch: Launch, rank: Rank) -> dict[str, Any]:
    """What vLLM is started with on every node of a launch."""
    memory: dict[str, Any] = {}
    if launch.engine.kv_cache_memory_bytes is not None:
        memory["kv_cache_memory_bytes"] = launch.engine.kv_cache_memory_bytes
    else:
        memory["gpu_memory_utilization"] = launch.engine.gpu_memory_utilization
    if launch.engine.mamba_cache_mode is not None:
        memory["mamba_cache_mode"] = launch.engine.mamba_cache_mode
    graph = launch.engine.graph
    if graph is not None:
        memory["compilation_config"] = graph_config(graph)
    return {
        "model": model,
        "load_format": launch.engine.load_format,
        "dtype": "bfloat16",
        "kv_cache_dtype": KV_CACHE_DTYPES[launch.precision.kv_cache],
        "skip_tokenizer_init": True,
        "enforce_eager": launch.engine.enforce_eager,
        "max_model_len": launch.limits.max_model_len,
        "max_num_batched_tokens": launch.limits.max_num_tokens,
        "max_num_seqs": launch.limits.max_batch_size,
        "tensor_parallel_size": launch.topology.tp,
        "enable_expert_parallel": launch.topology.moe_ep > 1,
        "enable_prefix_caching": True,
        "async_scheduling": False,
        "cudagraph_metrics": True,
        "disable_log_stats": True,
        "scheduler_cls": "producer.scheduler.BenchmarkScheduler",
        "worker_extension_cls": "producer.observe.CacheObserver",
        **memory,
        **rank.arguments,
    }


@contextlib.contextmanager
def refused_starts(model: str) -> Iterator[None]:
    """Whatever vLLM raises: the log has its traceback, a person needs one line."""
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        raise Refusal("engine start", "an engine that starts", f"{type(error).__name__}: {error}", model) from None


def start(model: str, launch: Launch, environment: dict[str, str], rank: Rank) -> Engine:
    """Start vLLM on `model`, whatever launch that gives: whoever measures calls `refuse_unmodelled` next.

    Call `check_installed` first: importing an unknown engine may already do harm.
    """
    set_environment(environment, rank)
    began = time.monotonic()
    from vllm import LLM

    with refused_starts(model):
        llm = LLM(**engine_arguments(model, launch, rank))
    return Engine(llm, time.monotonic() - began)


def follow(model: str, launch: Launch, environment: dict[str, str], rank: Rank, heart: Heartbeat) -> None:
    """Run this node's workers of an engine whose scheduler is on the head, until one of them ends, and end like it.

    As `vllm serve --headless` does (vllm/entrypoints/cli/serve.py, `run_headless`). The workers themselves wait for
    ever for a head that is gone: whoever started this process has to end it with the head.
    """
    set_environment(environment, rank)
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    with refused_starts(model):
        arguments = EngineArgs(**engine_arguments(model, launch, rank))
        config = arguments.create_engine_config(headless=True)
        executor = MultiprocExecutor(config, monitor_workers=False)
    heart.ready()
    while all(worker.proc.is_alive() for worker in executor.workers):
        heart.step()  # alive: only the head can see the forwards
        time.sleep(1)
    code = next(worker.proc.exitcode for worker in executor.workers if not worker.proc.is_alive())
    if code < 0:
        os.kill(os.getpid(), -code)  # so that the supervisor knows what ended the worker
    sys.exit("a worker ended by itself")
