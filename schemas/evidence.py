"""Verdicts: the evidence of a cell, the readiness of a campaign, the finalization."""

from typing import Any, Literal

from schemas.canonical import Strict
from schemas.plan import Scope
from schemas.points import Phase

EvidenceState = Literal["recorded", "unestablished", "failed"]


class CellEvidence(Strict):
    """`evidence.json`: all findings of one cell. Any failure makes the state `failed`; a gap, `unestablished`."""

    schema_version: Literal[1] = 1
    cell_digest: str
    phase: Phase
    state: EvidenceState
    failures: tuple[str, ...]
    gaps: tuple[str, ...]
    drifting: tuple[str, ...] = ()
    points: int
    native_regime_counts: dict[str, int]
    formal_regime_counts: dict[str, int]
    formal_regimes: tuple[str, ...]
    merged_sha256: str
    run_id: str
    grid_digest: str


ReadinessState = Literal["ready", "blocked", "incomplete"]
"""blocked: a blocker stands in the way, which no further measuring removes by itself. incomplete: not all is there."""

Coverage = Literal["partial", "sampled_points_only", "unverified"]
"""partial: some points fell back to fake content. sampled_points_only: none did; between points nothing is measured.
unverified: there is no verdict, or it failed, or it is of something else."""

CompatibilityState = Literal["compatible", "mismatch", "unestablished"]


class LastAttempt(Strict):
    """How the last attempt at a cell ended; one that runs, or was killed, has no end."""

    attempts: int
    started_at: str
    ended_at: str | None = None
    code: int | None = None
    reason: str | None = None


class RuntimeCompatibility(Strict):
    """What ran against the accepted profile. `unestablished` names what the artifact does not say.

    `observed_free_blocks` are the fewest blocks of any rank and phase.
    """

    status: CompatibilityState
    mismatches: tuple[str, ...] = ()
    unestablished: tuple[str, ...] = ()
    accepted_free_blocks: int | None = None
    observed_free_blocks: int | None = None


class CellReadiness(Strict):
    """One cell of a plan. `direct_eligible_points` are those without fake content; `kvwarm` is the artifact's block."""

    name: str
    cell_digest: str
    status: ReadinessState
    blockers: tuple[str, ...]
    native_regime_counts: dict[str, int] = {}
    formal_regime_counts: dict[str, int] = {}
    direct_eligible_points: int = 0
    coverage: Coverage = "unverified"
    attempt: LastAttempt | None = None
    kvwarm: dict[str, Any] | None = None
    observed_backend_version: str | None = None
    run_id: str | None = None
    grid_digest: str | None = None
    gaps: tuple[str, ...] = ()
    runtime_compatibility: RuntimeCompatibility | None = None


class Readiness(Strict):
    """`readiness.json`: may this plan be published (formal), or measured in full (smoke)?

    `plan_blockers` are those of the `blockers` that no single cell has. `runtime_compatibility` is by deployment, over
    its measured phases.
    """

    schema_version: Literal[1] = 1
    scope: Scope
    plan_sha256: str
    status: ReadinessState
    blockers: tuple[str, ...]
    plan_blockers: tuple[str, ...] = ()
    cells: tuple[CellReadiness, ...]
    runtime_compatibility: dict[str, RuntimeCompatibility] = {}


class SelectedCell(Strict):
    """Whose word counts for one phase of a deployment: the smoke cell's, or the formal one's once it was begun."""

    deployment: str
    phase: Phase
    scope: Scope
    cell: CellReadiness


class CampaignReadiness(Strict):
    """A campaign over both scopes: may it be measured in full? `plans` are the digests of its plans as they are now."""

    schema_version: Literal[1] = 1
    campaign: str
    request_sha256: str
    status: ReadinessState
    ready_for_full_collection: bool
    blockers: tuple[str, ...]
    plans: dict[Scope, str] = {}
    selected_cells: tuple[SelectedCell, ...] = ()
    runtime_compatibility: dict[str, RuntimeCompatibility] = {}


class Finalization(Strict):
    """`final/finalization.json`: everything was derived again and compared. Says nothing about accuracy."""

    schema_version: Literal[1] = 1
    plan_sha256: str
    collection_quality: Literal["passed"] = "passed"
    accuracy: Literal["not_assessed"] = "not_assessed"
    requires_review: bool
    rows: int
    minimum_free_blocks: dict[str, int]
    files_sha256: dict[str, str]
