"""The plan: which cells a campaign has, what identifies each, and what was left out."""

from typing import Annotated, Literal

from pydantic import Field

from schemas.canonical import Strict, digest, short
from schemas.launch import EngineSettings, ExecutionIdentity, Limits, Precision, Strategy, Topology
from schemas.points import Phase, PointManifest

Scope = Literal["formal", "smoke"]

TABLE_REVISION = "passgrid-table-1"
"""Raised when rows or sidecar are made otherwise from the same cells: then every plan publishes anew."""


class Measurement(Strict):
    """How often a point is run and which value is kept; of an imported point, what its producer kept."""

    warmup_repeats: int
    measurement_repeats: int
    reduction: Literal["adjacent_upper_median", "dynamo_native"]


class CellIdentity(Strict):
    """Everything that determines a cell's numbers, and nothing else: the cell digest covers exactly this.

    Names, comments, paths, labels and places of execution are left out. `points_sha256` is the digest of the
    manifest with this phase's points only, so a new decode batch leaves the prefill cell alone.
    """

    schema_version: Literal[1] = 1
    phase: Phase
    system: str
    backend: Literal["vllm"]
    runtime_backend_version: str
    pins_sha256: str
    probe_digest: str
    model_config_sha256: str
    model_sidecar_sha256: str | None = None
    model_revision: str
    parallel_strategy: Strategy
    topology: Topology
    precision: Precision
    limits: Limits
    engine: EngineSettings
    environment: dict[str, str]
    contract: str
    producer_protocol: int
    measurement: Measurement
    token_generator: str
    token_seed: str
    points_sha256: str
    execution_identity: ExecutionIdentity | None = None
    warmup_iterations: int | None = None
    nodes: Annotated[int, Field(ge=2)] | None = None
    """Nodes that the topology is spread over; absent for one."""


class FrozenCell(Strict):
    """`cells/<phase>-<deployment>-<digest>/cell.json`: all that a GPU job needs to measure one cell."""

    schema_version: Literal[1] = 1
    deployment: str
    model: str
    vocab_size: int
    block_size: int
    hash_block_size: int
    cache_hit_alignment_tokens: int
    free_blocks: int
    device_name: str
    identity: CellIdentity
    points: PointManifest

    @property
    def digest(self) -> str:
        return digest(self.identity)

    @property
    def name(self) -> str:
        return cell_name(self.identity.phase, self.deployment, self.digest)


class CellEntry(Strict):
    """One cell of a plan."""

    name: str
    deployment: str
    phase: Phase
    digest: str
    points_sha256: str
    points: int


class DeploymentPlan(Strict):
    """What a plan holds of one deployment; `dropped` counts candidate points by the rule that dropped them.

    `peak_blocks` is what the engine holds at the largest kept point, `estimated_blocks` the original planner's figure.
    """

    model: str
    probe_digest: str
    profile_sha256: str
    points_sha256: str
    origin: str
    prefill_points: int
    decode_points: int
    dropped: dict[str, int]
    contract: str
    peak_blocks: int
    estimated_blocks: int
    free_blocks: int


class Plan(Strict):
    """`plan-<digest>/plan.json`; the digest is the sha256 of the file.

    Beside the cells it covers what else a published table holds: the system file, by digest, and the revision of
    the table's making.
    """

    schema_version: Literal[1] = 1
    scope: Scope
    system: str
    system_sha256: str
    backend: Literal["vllm"]
    backend_version: str
    runtime_backend_version: str
    table_revision: str = TABLE_REVISION
    deployments: dict[str, DeploymentPlan]
    cells: tuple[CellEntry, ...]


def cell_name(phase: Phase, deployment: str, cell_digest: str) -> str:
    return f"{phase}-{deployment}-{short(cell_digest)}"


def deployment_of(name: str) -> str:
    """The deployment in a cell's name `<phase>-<deployment>-<digest>`."""
    return name.split("-", 1)[1].rsplit("-", 1)[0]


def phase_of(name: str) -> str:
    """The phase in a cell's name `<phase>-<deployment>-<digest>`."""
    return name.split("-", 1)[0]
