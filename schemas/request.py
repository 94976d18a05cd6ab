"""A campaign: the file a person writes, and the request it resolves to."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from schemas.canonical import Strict
from schemas.launch import (
    EngineSettings,
    ExecutionIdentity,
    Limits,
    Precision,
    Strategy,
    Topology,
    increasing,
)
from schemas.model_config import ModelConfig
from schemas.points import PHASES, NonNegative, Phase, PointManifest, Positive
from schemas.system import System

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Label = Annotated[str, StringConstraints(pattern=r"^[^\s/\\{}\x00.][^\s/\\{}\x00]*$")]
"""A database label that is a path component, and no wildcard of a rule."""
MUTABLE_REVISIONS = ("main", "master", "latest", "head")
WORKER_PHASES: dict[str, tuple[Phase, ...]] = {
    "aggregated": PHASES,
    "prefill": ("prefill",),
    "decode": ("decode",),
}
WorkerType = Literal["aggregated", "prefill", "decode"]


class PrefillGrid(Strict):
    """Axes of the prefill points; an absent axis takes the planner's doublings up to the limits."""

    new_tokens: tuple[Positive, ...] | None = None
    batch_sizes: tuple[Positive, ...] | None = None
    prefix_blocks: tuple[NonNegative, ...] | None = None

    @model_validator(mode="after")
    def _axes(self) -> Self:
        for axis in type(self).model_fields:
            increasing(axis, getattr(self, axis))
        return self


class DecodeGrid(Strict):
    """Axes of the decode points; an absent axis takes the planner's doublings up to the limits."""

    contexts: tuple[Annotated[int, Field(ge=2)], ...] | None = None
    batch_sizes: tuple[Positive, ...] | None = None

    @model_validator(mode="after")
    def _axes(self) -> Self:
        for axis in type(self).model_fields:
            increasing(axis, getattr(self, axis))
        return self


class SampleLimits(Strict):
    """Most values of an axis that the campaign does not give; both ends are kept."""

    prefill_new_tokens: Annotated[int, Field(ge=2)] = 64
    prefill_kv_read_tokens: Annotated[int, Field(ge=2)] = 16
    prefix_batch_sizes: Positive = 3
    decode_kv_read_tokens: Annotated[int, Field(ge=2)] = 128
    decode_batch_sizes: Annotated[int, Field(ge=2)] = 128


class Grid(Strict):
    prefill: PrefillGrid = PrefillGrid()
    decode: DecodeGrid = DecodeGrid()
    samples: SampleLimits = SampleLimits()


def _form(pattern: str, words: str) -> BeforeValidator:
    """A string of a form that a person is told in words."""

    def check(value: Any) -> Any:
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            raise ValueError(words)
        return value

    shown: Any = Annotated[str, StringConstraints(pattern=f"^{pattern}$")]
    return BeforeValidator(check, json_schema_input_type=shown)


SiteName = Annotated[str, _form(r"[A-Za-z0-9][A-Za-z0-9_.,@+-]*", "a name of letters, digits and . , _ @ + -")]
"""A partition or an account: it becomes a word of the cluster's own command line."""
GRES_FORM = "gpu:<n> or gpu:<type>:<n> without quotes of its own, like gpu:4 or gpu:h200:4"
Gres = Annotated[str, _form(r"gpu:([A-Za-z0-9_.-]+:)?[1-9][0-9]*", GRES_FORM)]
Runtime = Annotated[str, _form(r"[1-9][0-9]*[mhd]", "minutes, hours or days, such as 90m, 4h or 2d")]
VariableName = Annotated[str, _form(r"[A-Za-z_][A-Za-z0-9_]*", "the name of an environment variable, without a value")]
Mount = Annotated[
    str, _form(r"/[^:,\x00-\x1f]*:/[^:,\x00-\x1f]*(:ro|:rw)?", "/outside:/inside, then :ro, :rw or neither")
]
Image = Annotated[str, _form(r"[^-\x00-\x1f][^\x00-\x1f]*", "a path, or a reference such as docker://name:tag")]
ProfilePath = Annotated[str, _form(r"[^{}\x00-\x1f]+", "a path without braces and control characters")]
"""An input of rules, where braces are wildcards."""
MINUTES = {"m": 1, "h": 60, "d": 24 * 60}


class Container(Strict):
    """Image in which engines run, and folders of the machine that they see in it beside the project's own."""

    runtime: Literal["apptainer", "pyxis"]
    image: Image
    mounts: tuple[Mount, ...] = ()


class Execution(Strict):
    """Where GPU rules run. Determines no number, so no digest of a measurement covers it.

    `gres` is `gpu:<n>` or `gpu:<type>:<n>`, with n the GPUs of the deployment on each of `nodes` machines. `runtime`
    is the job's limit. `environment` names variables that a container gets from the job; their values are written
    nowhere. An engine that does not run after `start_timeout_seconds`, or takes longer than `step_timeout_seconds` for
    one step, is ended as hanging.
    """

    partition: SiteName | None = None
    account: SiteName | None = None
    gres: Gres | None = None
    nodes: Positive = 1
    cpus_per_task: Positive = 1
    mem_mb: Positive = 8000
    runtime: Runtime = "4h"
    container: Container | None = None
    environment: tuple[VariableName, ...] = ()
    start_timeout_seconds: Positive = 3600
    step_timeout_seconds: Positive = 600

    @property
    def runtime_minutes(self) -> int:
        return int(self.runtime[:-1]) * MINUTES[self.runtime[-1]]


class Deployment(Strict):
    """One deployment of a campaign file.

    `points` is a point manifest to measure instead of a grid; `profile` a declared profile instead of a probe;
    `artifacts` a folder in which Dynamo's self-benchmark left what it measured, to be imported instead of measured.
    """

    model: str
    model_revision: str | None = None
    worker_type: WorkerType = "aggregated"
    topology: Topology = Topology()
    precision: Precision = Precision()
    limits: Limits
    engine: EngineSettings
    grid: Grid = Grid()
    points: str | None = None
    profile: ProfilePath | None = None
    artifacts: str | None = None
    warmup_iterations: NonNegative | None = None
    engram_residency: Name = "none"
    execution: Execution | None = None

    @model_validator(mode="after")
    def _revision(self) -> Self:
        if self.model_revision is None and self.engine.load_format != "dummy":
            raise ValueError("model_revision for a checkpoint with weights")
        if self.model_revision is not None and self.model_revision.lower() in MUTABLE_REVISIONS:
            raise ValueError(f"an immutable model_revision, not {self.model_revision!r}")
        graph = self.engine.graph
        if graph is not None and graph.cudagraph_capture_sizes and "worker_type" not in self.model_fields_set:
            raise ValueError("a worker_type for cudagraph_capture_sizes")
        if self.points is not None and "grid" in self.model_fields_set:
            raise ValueError("a grid or points, not both")
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

    def execution_of(self, deployment: str) -> Execution:
        """Where the engines of a deployment run: its own block, or the campaign's."""
        return self.deployments[deployment].execution or self.execution


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
    points: PointManifest | None = None
    profile: str | None = None
    profile_sha256: Sha256 | None = None
    warmup_iterations: int | None = None
    execution_identity: ExecutionIdentity | None = None
    contract: str

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
