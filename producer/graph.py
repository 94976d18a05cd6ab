"""What the Snakefile asks at parse time: which files a campaign has, and which of them can be planned yet."""

import json
import re
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import msgspec

from producer.nodes import slurm_tasks
from producer.planning import AcceptedProfile, PlannedCampaign, bounded, freeze_deployment, plan_campaign
from producer.resolving import import_digest, profile_digest, read_campaign, resolve
from schemas.canonical import SHORT, canonical_bytes, digest, file_digest, is_file, parse, read_bytes, sha256, short
from schemas.errors import Refusal
from schemas.layout import (
    RESULTS,
    SCOPE_PREFIX,
    Layout,
    campaign_file,
    max_points_of,
    pair_folder,
    rank_file,
    scope_of,
)
from schemas.plan import FrozenCell, Scope, deployment_of, phase_of
from schemas.profile import Profile
from schemas.request import Campaign, Request
from schemas.summary import CampaignSummary, CellSummary, DeploymentSummary, Job, PlanSummary, axes_of


def read_profile(file: Path) -> AcceptedProfile:
    """A profile with the digest of its file."""
    data = read_bytes(file, "profile")
    try:
        return AcceptedProfile(parse(Profile, json.loads(data), file), sha256(data))
    except ValueError as error:
        raise Refusal("profile", "JSON", error, file) from None


def job_of(campaign: Campaign, deployment: str) -> Job:
    """What the jobs of a deployment ask for."""
    execution = campaign.execution_of(deployment)
    fields: dict[str, Any] = {field: getattr(execution, field, None) for field in Job.__struct_fields__}
    return Job(**fields | {"tasks": slurm_tasks(execution)})


def summary_of_campaign(campaign: Campaign, request: Request) -> CampaignSummary:
    return CampaignSummary(
        request_digest=digest(request),
        system=request.system.name,
        embedded=request.system.embedded,
        backend=request.backend,
        backend_version=request.backend_version,
        acceptance=campaign.acceptance,
        deployments={
            name: DeploymentSummary(
                model=deployment.model,
                phases=deployment.phases,
                dp=deployment.topology.dp,
                gpus=deployment.topology.gpus,
                probe_digest=profile_digest(request, deployment),
                profile_digest=import_digest(request, deployment),
                job=job_of(campaign, name),
                profile=deployment.profile,
                points=deployment.points is not None,
                artifacts=campaign.deployments[name].artifacts,
            )
            for name, deployment in request.deployments.items()
        },
    )


def summary_of_cell(cell: FrozenCell) -> CellSummary:
    points = cell.points.points()
    return CellSummary(
        name=cell.name,
        deployment=cell.deployment,
        phase=cell.identity.phase,
        points=len(points),
        axes=axes_of(cell.identity.phase, points),
        identity=msgspec.Raw(canonical_bytes(cell.identity)),
    )


def summary_of_plan(planned: PlannedCampaign, max_points: int | None = None) -> PlanSummary:
    """A plan, or with `max_points` the plan with its cells bounded to so many points."""
    cells = [planned.cells[entry.name] for entry in planned.plan.cells]
    return PlanSummary(
        digest=planned.digest,
        profiles={name: deployment.profile_sha256 for name, deployment in planned.plan.deployments.items()},
        cells=[summary_of_cell(cell if max_points is None else bounded(cell, max_points)) for cell in cells],
    )


JOB_RESOURCES = {
    "cpus_per_task": "cpus_per_task",  # Snakemake cuts threads to the driver's cores, not these
    "mem_mb": "mem_mb",
    "runtime": "runtime_minutes",
    "nodes": "nodes",
    "tasks": "tasks",
    "slurm_partition": "partition",
    "slurm_account": "account",
    "gres": "gres",
    "start_timeout": "start_timeout_seconds",
    "step_timeout": "step_timeout_seconds",
}
"""Resource of a job, as Snakemake and its executors call it -> field of `Job`."""


class CampaignFiles:
    """The files of one campaign, by its summaries."""

    def __init__(self, campaign: str, results: Path = RESULTS) -> None:
        self.name = campaign
        self.file = campaign_file(campaign)
        self.layout = Layout(campaign, results)

    @cached_property
    def summary(self) -> CampaignSummary:
        raise NotImplementedError

    def plan_summary(self, scope: Scope, max_points: int | None = None) -> PlanSummary:
        raise NotImplementedError

    def cells_below(self, prefix: str) -> list[CellSummary]:
        """The cells that lie below a path's prefix. What is imported is not measured, so no repeat has it."""
        cells = self.plan_summary(scope_of(prefix), max_points_of(prefix)).cells
        if prefix in SCOPE_PREFIX.values():
            return cells
        return [cell for cell in cells if self.summary.deployments[cell.deployment].artifacts is None]

    @cached_property
    def request_file(self) -> str:
        return str(self.layout.request(self.summary.request_digest))

    @property
    def request_name(self) -> str:
        return short(self.summary.request_digest)

    @property
    def system(self) -> str:
        return self.summary.system

    @property
    def deployments(self) -> list[str]:
        return list(self.summary.deployments)

    def deployment(self, name: str) -> DeploymentSummary:
        if name not in self.summary.deployments:
            raise Refusal("deployment", f"one of {', '.join(self.deployments)}", name, self.file)
        return self.summary.deployments[name]

    def profile_file(self, deployment: str) -> Path:
        """The declared profile, or the one that is imported from a probe."""
        summary = self.deployment(deployment)
        if summary.profile is not None:
            return Path(summary.profile)
        return self.layout.profile(deployment, summary.profile_digest)

    @property
    def profile_files(self) -> list[str]:
        return [str(self.profile_file(name)) for name in self.deployments]

    def probe_files(self, deployment: str) -> list[str]:
        """The probe records that a profile is imported from."""
        summary = self.deployment(deployment)
        return [str(self.layout.probe(deployment, summary.probe_digest, phase)) for phase in summary.phases]

    def accepted_files(self, cell: str) -> list[str]:
        """What the launches of a measured cell are bound to: its deployment's profile and, unless that is declared,
        the probe's record of the cell's phase. An imported cell has no launches."""
        deployment, phase = deployment_of(cell), phase_of(cell)
        summary = self.deployment(deployment)
        if summary.artifacts is not None:
            return []
        profile = str(self.profile_file(deployment))
        if summary.profile is not None:
            return [profile]
        return [profile, str(self.layout.probe(deployment, summary.probe_digest, phase))]

    @property
    def missing_profiles(self) -> list[str]:
        """Deployments whose profile is not there yet."""
        return [name for name in self.deployments if not is_file(self.profile_file(name))]

    def is_accepted(self, deployment: str, profile_sha256: str) -> bool:
        acceptance = self.summary.acceptance
        return acceptance == "auto" or acceptance.get(deployment) == profile_sha256

    @property
    def unaccepted(self) -> list[str]:
        """Markers of the imported profiles that no person has accepted; making one refuses and names the digest."""
        if self.summary.acceptance == "auto":
            return []
        return [
            str(self.layout.profile(name, self.summary.deployments[name].profile_digest).with_suffix(".accepted"))
            for name in self.deployments
            if not self.is_accepted(name, file_digest(self.profile_file(name)))
        ]

    def require_accepted(self, *deployments: str) -> None:
        """Nothing is measured or finalized on a profile that nobody accepted, whatever target was asked for.

        Raises:
            Refusal: the deployment, and the digest that its acceptance would name.
        """
        for name in deployments or self.deployments:
            imported = read_profile(self.profile_file(name)).sha256
            if not self.is_accepted(name, imported):
                raise Refusal(
                    f"acceptance.{name}", f"the digest of its profile {imported}", "another or none", self.file
                )

    def plan_folder(self, scope: Scope) -> Path:
        return self.layout.plan(scope, self.plan_summary(scope).digest)

    def targets(self, scope: Scope, names: tuple[str, ...], of_cells: tuple[str, ...]) -> list[str]:
        """Files below the plan's folder and of its cells; before acceptance, what a person has to accept.

        The cells' files are targets too: Snakemake does not miss a lost intermediate file while what was made of it
        is there.
        """
        if unaccepted := self.unaccepted:
            return unaccepted
        return [str(self.plan_folder(scope) / name) for name in names] + self.of_cells(SCOPE_PREFIX[scope], *of_cells)

    def pair(self, plan_folder: str) -> str:
        """Folder of the published pair of a plan."""
        summary = self.summary
        return str(pair_folder(plan_folder, summary.system, summary.backend, summary.backend_version))

    def of_deployments(self, prefix: str) -> list[str]:
        """The point list and the accepted profile of every deployment, below a plan's folder."""
        return [f"{prefix}/{kind}/{name}.json" for kind in ("points", "profiles") for name in self.deployments]

    def of_cells(self, prefix: str, *names: str) -> list[str]:
        """One or more files of every cell below a path's prefix: "", "smoke/" or a repeat's."""
        folder = str(self.layout.cells(prefix))
        return [f"{folder}/{cell.name}/{name}" for cell in self.cells_below(prefix) for name in names]

    @property
    def rank_files(self) -> str | Callable[[Any], list[str]]:
        """The artifacts of a cell's data-parallel ranks: a pattern while no deployment has more than one."""
        pattern = f"{self.layout.root}/{{scope}}cells/{{cell}}"
        if all(deployment.dp == 1 for deployment in self.summary.deployments.values()):
            return f"{pattern}/{rank_file(0)}"

        def files(wildcards: Any) -> list[str]:
            ranks = self.deployment(deployment_of(wildcards.cell)).dp
            return [f"{pattern}/{rank_file(rank)}".format(**wildcards) for rank in range(ranks)]

        return files

    def cells_that_are(self, kind: Literal["measured", "imported"]) -> str:
        """The wildcard `cell` of deployments whose cells are measured, or imported."""
        kinds = {name: "imported" if own.artifacts else "measured" for name, own in self.summary.deployments.items()}
        names = [re.escape(name) for name, own in kinds.items() if own == kind]
        return f"(prefill|decode)-({'|'.join(names) or '(?!)'})-[0-9a-f]{{{SHORT}}}"

    @property
    def probe_machine(self) -> int:
        """The `machine` resource of a probe: engines on one GPU never overlap; on the CPU a probe may."""
        return 0 if self.summary.embedded else 1

    @cached_property
    def resources(self) -> dict[str, Any]:
        """What the job of a probe or a cell asks for, by Snakemake's name of it; what nobody asks for is left out.

        A rule's own value, also None, keeps `--default-resources` away. A value is the same for all deployments, or a
        function of the wildcards: Snakemake takes half a millisecond to call one, for each of thousands of cells.
        """
        asked = {}
        for resource, field in JOB_RESOURCES.items():
            values = {getattr(deployment.job, field) for deployment in self.summary.deployments.values()}
            if values != {None}:
                asked[resource] = values.pop() if len(values) == 1 else self._of_deployment(field)
        return asked

    def _of_deployment(self, field: str) -> Callable[[Any], Any]:
        def value(wildcards: Any) -> Any:
            name = getattr(wildcards, "deployment", None) or deployment_of(wildcards.cell)
            return getattr(self.deployment(name).job, field)

        return value


class CampaignGraph(CampaignFiles):
    """The whole campaign: read once, planned only as far as it is asked for."""

    def __init__(self, campaign: str, results: Path = RESULTS) -> None:
        super().__init__(campaign, results)
        self.campaign = read_campaign(self.file)
        self.request = resolve(self.campaign, self.file)
        self._planned: dict[tuple[str, tuple[tuple[str, str], ...]], PlannedCampaign] = {}

    @cached_property
    def summary(self) -> CampaignSummary:
        return summary_of_campaign(self.campaign, self.request)

    def planned(self, scope: Scope) -> PlannedCampaign:
        """The plan, computed anew only when a profile has changed."""
        profiles = {name: read_profile(self.profile_file(name)) for name in self.deployments}
        key = (scope, tuple((name, profile.sha256) for name, profile in profiles.items()))
        if key not in self._planned:
            self._planned[key] = plan_campaign(self.request, profiles, scope, str(self.file))
        return self._planned[key]

    def plan_summary(self, scope: Scope, max_points: int | None = None) -> PlanSummary:
        return summary_of_plan(self.planned(scope), max_points)

    def plan_folder(self, scope: Scope) -> Path:
        return self.layout.plan(scope, self.planned(scope).digest)

    def frozen_cell(self, prefix: str, name: str) -> FrozenCell:
        """One cell below a path's prefix, without planning the others.

        Raises:
            Refusal: the campaign has no such cell, or none of its deployment on an accepted profile.
        """
        deployment = deployment_of(name)
        if deployment not in self.request.deployments:
            raise Refusal("deployment of the cell", f"one of {', '.join(self.deployments)}", name, self.file)
        self.require_accepted(deployment)
        profile = read_profile(self.profile_file(deployment))
        cells = freeze_deployment(self.request, deployment, profile, scope_of(prefix), str(self.file)).cells
        if (max_points := max_points_of(prefix)) is not None:
            cells = [bounded(cell, max_points) for cell in cells]
        for cell in cells:
            if cell.name == name:
                return cell
        raise Refusal("cell", f"one of {', '.join(cell.name for cell in cells)}", name, self.file)
