"""A campaign: the file a person writes, and the request it resolves to."""

from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from schemas.canonical import Strict
from schemas.model_config import ModelConfig
from schemas.points import PHASES, NonNegative, Phase, Positive
from schemas.system import System

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Label = Annotated[str, StringConstraints(pattern=r"^[^\s/\\\x00.][^\s/\\\x00]*$")]
"""A database label that is a path component."""
MUTABLE_REVISIONS = ("main", "master", "latest", "head")
WORKER_PHASES: dict[str, tuple[Phase, ...]] = {
    "aggregated": PHASES,
    "prefill": ("prefill",),
    "decode": ("decode",),
}
WorkerType = Literal["aggregated", "prefill", "decode"]
Strategy = Literal["single", "tp", "pure_tp", "tep", "dep"]


def _increasing(name: str, values: tuple[int, ...] | None) -> None:
    if values is not None and (not values or any(a >= b for a, b in pairwise(values))):
        raise ValueError(f"{name} a strictly increasing list")


class Topology(Strict):
    """Widths in GPUs. Pipeline and context parallelism are 1: nothing here measures them."""

    tp: Positive = 1
    pp: Literal[1] = 1
    dp: Positive = 1
    moe_tp: Positive = 1
    moe_ep: Positive = 1
    cp: Literal[1] = 1

    @property
    def gpus(self) -> int:
        return self.tp * self.dp


def strategy(topology: Topology, is_moe: bool) -> Strategy | None:
    """The parallel strategy of a topology, or None when no engine launch has it.

    Dense: experts and data parallelism are 1. MoE: pure TP (moe_tp = tp), TEP (moe_ep = tp, dp 1),
    DEP (tp 1, moe_ep = dp).
    """
    tp, dp, moe = topology.tp, topology.dp, (topology.moe_tp, topology.moe_ep)
    if not is_moe:
        return None if dp > 1 or moe != (1, 1) else ("single" if tp == 1 else "tp")
    if dp == 1 and moe == (tp, 1):
        return "single" if tp == 1 else "pure_tp"
    if dp == 1 and moe == (1, tp):
        return "tep"
    return "dep" if tp == 1 and moe == (1, dp) else None


class Precision(Strict):
    """Labels of the published table."""

    gemm: str = "bfloat16"
    moe: str = "bfloat16"
    fmha: str = "bfloat16"
    kv_cache: Literal["bfloat16"] = "bfloat16"
    comm: Literal["half"] = "half"


class Limits(Strict):
    """Scheduler limits: tokens of one step, requests of one step, tokens of one request."""

    max_num_tokens: Annotated[int, Field(ge=2)] = 8192
    max_batch_size: Positive = 256
    max_model_len: Positive

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.max_num_tokens < self.max_batch_size:
            raise ValueError(f"max_num_tokens of at least max_batch_size {self.max_batch_size}")
        return self


class PrefillGrid(Strict):
    """Axes of the prefill points; an absent axis takes the planner's doublings up to the limits."""

    new_tokens: tuple[Positive, ...] | None = None
    batch_sizes: tuple[Positive, ...] | None = None
    prefix_blocks: tuple[NonNegative, ...] | None = None

    @model_validator(mode="after")
    def _axes(self) -> Self:
        for axis in type(self).model_fields:
            _increasing(axis, getattr(self, axis))
        return self


class DecodeGrid(Strict):
    """Axes of the decode points; an absent axis takes the planner's doublings up to the limits."""

    contexts: tuple[Annotated[int, Field(ge=2)], ...] | None = None
    batch_sizes: tuple[Positive, ...] | None = None

    @model_validator(mode="after")
    def _axes(self) -> Self:
        for axis in type(self).model_fields:
            _increasing(axis, getattr(self, axis))
        return self


class Grid(Strict):
    prefill: PrefillGrid = PrefillGrid()
    decode: DecodeGrid = DecodeGrid()


class EngineSettings(Strict):
    """What the engine is started with, beyond limits and topology."""

    load_format: Literal["auto", "dummy"] = "auto"
    enforce_eager: bool = False
    mamba_cache_mode: Literal["align"] | None = None
    kv_cache_memory_bytes: Positive | None = None
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None

    @model_validator(mode="after")
    def _one_memory(self) -> Self:
        if (self.kv_cache_memory_bytes is None) == (self.gpu_memory_utilization is None):
            raise ValueError("exactly one of kv_cache_memory_bytes and gpu_memory_utilization")
        return self


class Execution(Strict):
    """Where GPU rules run. Determines no number, so no digest of a measurement covers it.

    `gres` is `gpu:<n>` or `gpu:<type>:<n>`, with n the GPUs of the deployment (tp x dp).
    """

    partition: str | None = None
    account: str | None = None
    gres: Annotated[str, StringConstraints(pattern=r"^gpu:([A-Za-z0-9_]+:)?[1-9][0-9]*$")] | None = None
    cpus_per_task: Positive = 1
    mem_mb: Positive = 8000
    runtime_minutes: Positive = 240


class Deployment(Strict):
    """One deployment of a campaign file."""

    model: str
    model_revision: str | None = None
    worker_type: WorkerType = "aggregated"
    topology: Topology = Topology()
    precision: Precision = Precision()
    limits: Limits
    engine: EngineSettings
    grid: Grid = Grid()
    execution: Execution | None = None

    @model_validator(mode="after")
    def _revision(self) -> Self:
        if self.model_revision is None and self.engine.load_format != "dummy":
            raise ValueError("model_revision for a checkpoint with weights")
        if self.model_revision is not None and self.model_revision.lower() in MUTABLE_REVISIONS:
            raise ValueError(f"an immutable model_revision, not {self.model_revision!r}")
        return self


class Campaign(Strict):
    """`config/campaigns/<campaign>.yaml`, as a person writes it."""

    campaign: Name
    description: str = ""
    system: Name
    backend: Literal["vllm"] = "vllm"
    backend_version: Label
    runtime_backend_version: str | None = None
    acceptance: Literal["auto"] | dict[Name, Sha256] = {}
    environment: dict[str, str] = {}
    execution: Execution = Execution()
    deployments: Annotated[dict[Name, Deployment], Field(min_length=1)]


class ResolvedDeployment(Strict):
    """A deployment with everything filled in."""

    model: str
    model_revision: str
    config: ModelConfig
    worker_type: WorkerType
    parallel_strategy: Strategy
    topology: Topology
    precision: Precision
    limits: Limits
    engine: EngineSettings
    grid: Grid

    @property
    def phases(self) -> tuple[Phase, ...]:
        return WORKER_PHASES[self.worker_type]


class Request(Strict):
    """`request.json`: the campaign, strict, defaults filled in, without words for people."""

    schema_version: Literal[1] = 1
    campaign: Name
    system: System
    backend: Literal["vllm"]
    backend_version: Label
    runtime_backend_version: str
    environment: dict[str, str]
    deployments: dict[Name, ResolvedDeployment]
