"""Verdicts: the evidence of a cell, the readiness of a campaign, the finalization."""

from typing import Literal

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


class CellReadiness(Strict):
    name: str
    cell_digest: str
    status: Literal["ready", "blocked", "incomplete"]
    blockers: tuple[str, ...]
    native_regime_counts: dict[str, int]
    formal_regime_counts: dict[str, int]
    direct_eligible_points: int


class Readiness(Strict):
    """`readiness.json`: may this plan be published (formal), or measured in full (smoke)?"""

    schema_version: Literal[1] = 1
    scope: Scope
    plan_sha256: str
    status: Literal["ready", "blocked", "incomplete"]
    blockers: tuple[str, ...]
    cells: tuple[CellReadiness, ...]


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
