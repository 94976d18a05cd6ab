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
from schemas.layout import RESULTS, policy_file, repeat_prefix
from schemas.plan import Scope
from schemas.policy import read_policy
from schemas.summary import CampaignSummary, CellSummary, PlanSummary

SUMMARIES = Path(".snakemake/passgrid")
"""Beside Snakemake's own records, and as dispensable: each job of a run parses the whole campaign again."""
NO_CELL = "no cell of the campaign as it is now"


class ParsedCampaign(CampaignFiles):
    """Raises nothing: a refusal is printed, and the process ends."""

    def __init__(self, campaign: str, results: Path = RESULTS, policy: str = "collection") -> None:
        super().__init__(campaign, results)
        self.policy_file = str(policy_file(policy))
        self._plans: dict[tuple[Scope, int | None], PlanSummary] = {}
        self._cells: dict[str, dict[str, CellSummary]] = {}
        self._measured: dict[str, MeasuredCells] = {}

    def _file(self, name: str) -> Path:
        return SUMMARIES / self.layout.root / f"{name}.json"

    @cached_property
    def summary(self) -> CampaignSummary:
        def compute() -> CampaignSummary:
            campaign = read_campaign(self.file)
            return summary_of_campaign(campaign, resolve(campaign, self.file))

        with refusing():
            return remembered(self._file("campaign"), self.name, CampaignSummary, compute)

    def plan_summary(self, scope: Scope, max_points: int | None = None) -> PlanSummary:
        """Read once a process, and again when a profile has changed: an import may happen in between."""
        profiles = {name: file_digest(self.profile_file(name)) for name in self.deployments}
        key = (scope, max_points)
        if key not in self._plans or self._plans[key].profiles != profiles:

            def compute() -> PlanSummary:
                with not_recording():  # the causes say it all
                    graph = CampaignGraph(self.name, self.layout.root.parent)
                    return summary_of_plan(graph.planned(scope), max_points)

            causes = [self.summary.request_digest, profiles]
            file = self._file(scope if max_points is None else f"{scope}-points{max_points}")
            with refusing():
                self._plans[key] = remembered(file, causes, PlanSummary, compute)
        return self._plans[key]

    @cached_property
    def repeats(self) -> list[str]:
        """Path prefixes of the repeats that the policy asks for."""
        with refusing():
            policy = read_policy(Path(self.policy_file)).repeatability
        return [repeat_prefix(repeat, policy.max_points) for repeat in range(1, policy.samples + 1)]

    def of_repeats(self, *names: str) -> list[str]:
        """One or more files of every cell of every repeat."""
        return [file for prefix in self.repeats for file in self.of_cells(prefix, *names)]

    def repeat_targets(self, names: tuple[str, ...], of_cells: tuple[str, ...]) -> list[str]:
        """Like `targets` of the formal plan, with the cells of every repeat."""
        targets = self.targets("formal", names, of_cells)
        return targets if self.unaccepted else targets + self.of_repeats(*of_cells)

    def reason(self, wildcards: Any) -> str:
        """Why a cell is measured, in the campaign's words."""
        prefix = wildcards.scope
        if prefix not in self._cells:
            if self.missing_profiles:
                return NO_CELL
            self._cells[prefix] = {cell.name: cell for cell in self.cells_below(prefix)}
            self._measured[prefix] = MeasuredCells(self.layout.cells(prefix))
        cell = self._cells[prefix].get(wildcards.cell)
        if cell is None:
            return NO_CELL
        return self._measured[prefix].reason(cell, self.summary.deployments[cell.deployment])
