"""The graph as the Snakefile holds it: read from summaries, and a refusal ends the parse with its one line."""

from functools import cached_property
from pathlib import Path
from typing import Any

from producer.graph import CampaignFiles, CampaignGraph, summary_of_campaign, summary_of_plan
from producer.recollection import MeasuredCells
from producer.remember import remembered
from producer.resolving import read_campaign, resolve
from schemas.canonical import file_digest, not_recording
from schemas.errors import refusing
from schemas.layout import RESULTS, scope_of
from schemas.plan import Scope
from schemas.summary import CampaignSummary, CellSummary, PlanSummary

SUMMARIES = Path(".snakemake/passgrid")
"""Beside Snakemake's own records, and as dispensable: each job of a run parses the whole campaign again."""
NO_CELL = "no cell of the campaign as it is now"


class ParsedCampaign(CampaignFiles):
    """Raises nothing: a refusal is printed, and the process ends."""

    def __init__(self, campaign: str, results: Path = RESULTS) -> None:
        super().__init__(campaign, results)
        self._plans: dict[Scope, PlanSummary] = {}
        self._cells: dict[Scope, dict[str, CellSummary]] = {}
        self._measured: dict[Scope, MeasuredCells] = {}

    def _file(self, name: str) -> Path:
        return SUMMARIES / self.layout.root / f"{name}.json"

    @cached_property
    def summary(self) -> CampaignSummary:
        def compute() -> CampaignSummary:
            campaign = read_campaign(self.file)
            return summary_of_campaign(campaign, resolve(campaign, self.file))

        with refusing():
            return remembered(self._file("campaign"), self.name, CampaignSummary, compute)

    def plan_summary(self, scope: Scope) -> PlanSummary:
        """Read once a process, and again when a profile has changed: an import may happen in between."""
        profiles = {name: file_digest(self.profile_file(name)) for name in self.deployments}
        if scope not in self._plans or self._plans[scope].profiles != profiles:

            def compute() -> PlanSummary:
                with not_recording():  # the causes say it all
                    return summary_of_plan(CampaignGraph(self.name, self.layout.root.parent).planned(scope))

            causes = [self.summary.request_digest, profiles]
            with refusing():
                self._plans[scope] = remembered(self._file(scope), causes, PlanSummary, compute)
        return self._plans[scope]

    def reason(self, wildcards: Any) -> str:
        """Why a cell is measured, in the campaign's words."""
        scope = scope_of(wildcards.scope)
        if scope not in self._cells:
            if self.missing_profiles:
                return NO_CELL
            self._cells[scope] = {cell.name: cell for cell in self.plan_summary(scope).cells}
            self._measured[scope] = MeasuredCells(self.layout.cells(scope))
        cell = self._cells[scope].get(wildcards.cell)
        if cell is None:
            return NO_CELL
        return self._measured[scope].reason(cell, self.summary.deployments[cell.deployment])
