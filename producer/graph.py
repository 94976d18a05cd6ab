"""What the Snakefile asks at parse time: which files a campaign has, and which of them can be planned yet."""

import json
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from producer.planning import AcceptedProfile, PlannedCampaign, plan_campaign
from producer.resolving import profile_digest, read_campaign, resolve
from schemas.canonical import digest, parse, read_bytes, sha256, short
from schemas.errors import Refusal, refusing
from schemas.layout import RESULTS, SCOPE_PREFIX, Layout, campaign_file, pair_folder, rank_files, scope_of
from schemas.plan import Scope, deployment_of
from schemas.profile import Profile
from schemas.request import Execution


def read_profile(file: Path) -> AcceptedProfile:
    """A profile with the digest of its file."""
    data = read_bytes(file, "profile")
    try:
        return AcceptedProfile(parse(Profile, json.loads(data), file), sha256(data))
    except ValueError as error:
        raise Refusal("profile", "JSON", error, file) from None


class CampaignGraph:
    """The files of one campaign. Reads the campaign once; reads profiles when they are there."""

    def __init__(self, campaign: str, results: Path = RESULTS) -> None:
        self.name = campaign
        self.file = campaign_file(campaign)
        self.layout = Layout(campaign, results)
        self.campaign = read_campaign(self.file)
        self.request = resolve(self.campaign, self.file)
        self.probes = {
            name: profile_digest(self.request, deployment) for name, deployment in self.request.deployments.items()
        }
        self._planned: dict[tuple[str, tuple[tuple[str, str], ...]], PlannedCampaign] = {}

    @cached_property
    def request_file(self) -> str:
        return str(self.layout.request(digest(self.request)))

    @property
    def deployments(self) -> list[str]:
        return list(self.request.deployments)

    def profile_file(self, deployment: str) -> Path:
        """The declared profile, or the one that is imported from a probe."""
        if (declared := self.request.deployments[deployment].profile) is not None:
            return Path(declared)
        return self.layout.profile(deployment, self.probes[deployment])

    @property
    def profile_files(self) -> list[str]:
        return [str(self.profile_file(name)) for name in self.deployments]

    def probe_files(self, deployment: str) -> list[str]:
        """The probe records that a profile is imported from."""
        phases = self.request.deployments[deployment].phases
        return [str(self.layout.probe(deployment, self.probes[deployment], phase)) for phase in phases]

    @property
    def missing_profiles(self) -> list[dict[str, str]]:
        """Wildcards of the profiles that are not imported yet."""
        return [
            {"deployment": name, "probe": short(self.probes[name])}
            for name in self.deployments
            if not self.profile_file(name).exists()
        ]

    def is_accepted(self, deployment: str, profile_sha256: str) -> bool:
        acceptance = self.campaign.acceptance
        return acceptance == "auto" or acceptance.get(deployment) == profile_sha256

    @property
    def unaccepted(self) -> list[str]:
        """Markers of the imported profiles that no person has accepted; making one refuses and names the digest."""
        return [
            str(self.layout.profile(name, self.probes[name]).with_suffix(".accepted"))
            for name in self.deployments
            if not self.is_accepted(name, read_profile(self.profile_file(name)).sha256)
        ]

    def require_accepted(self) -> None:
        """Nothing is measured or finalized on a profile that nobody accepted, whatever target was asked for.

        Raises:
            Refusal: the deployment, and the digest that its acceptance would name.
        """
        for name in self.deployments:
            imported = read_profile(self.profile_file(name)).sha256
            if not self.is_accepted(name, imported):
                raise Refusal(
                    f"acceptance.{name}", f"the digest of its profile {imported}", "another or none", self.file
                )

    def planned(self, scope: Scope) -> PlannedCampaign:
        """The plan, computed anew only when a profile has changed."""
        profiles = {name: read_profile(self.profile_file(name)) for name in self.deployments}
        key = (scope, tuple((name, profile.sha256) for name, profile in profiles.items()))
        if key not in self._planned:
            self._planned[key] = plan_campaign(self.request, profiles, scope, str(self.file))
        return self._planned[key]

    def plan_folder(self, scope: Scope) -> Path:
        return self.layout.plan(scope, self.planned(scope).digest)

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
        request = self.request
        return str(pair_folder(plan_folder, request.system.name, request.backend, request.backend_version))

    def of_deployments(self, prefix: str) -> list[str]:
        """The point list and the accepted profile of every deployment, below a plan's folder."""
        return [f"{prefix}/{kind}/{name}.json" for kind in ("points", "profiles") for name in self.deployments]

    def of_cells(self, scope: str, *names: str) -> list[str]:
        """One or more files of every cell of a scope's plan; `scope` is the path's prefix, "" or "smoke/"."""
        which = scope_of(scope)
        cells = self.planned(which).plan.cells
        return [str(self.layout.cell(which, cell.name) / name) for cell in cells for name in names]

    def rank_files(self, scope: str, cell: str) -> list[str]:
        """The artifacts of a cell's data-parallel ranks."""
        ranks = self.request.deployments[deployment_of(cell)].topology.dp
        return [str(file) for file in rank_files(self.layout.cell(scope_of(scope), cell), ranks)]

    def profile_of_cell(self, cell: str) -> str:
        """The profile that a cell was planned with."""
        return str(self.profile_file(deployment_of(cell)))

    @property
    def probe_machine(self) -> int:
        """The `machine` resource of a probe: engines on one GPU never overlap; on the CPU a probe may."""
        return 0 if self.request.system.embedded else 1

    def execution(self, deployment: str) -> Execution:
        """Where the engines of a deployment run: its own block, or the campaign's."""
        return self.campaign.deployments[deployment].execution or self.campaign.execution

    def resource(self, field: str) -> Callable[[Any], Any]:
        """Function of a job's wildcards: a field of its deployment's execution block (None: not asked for)."""

        def value(wildcards: Any) -> Any:
            deployment = getattr(wildcards, "deployment", None) or deployment_of(wildcards.cell)
            return getattr(self.execution(deployment), field)

        return value

    def asked(self, **fields: str) -> dict[str, Callable[[Any], Any]]:
        """Snakemake's resource -> function of a job's wildcards, of the execution fields that some deployment sets.

        One that none sets is left off the rules: a rule's own value, also None, keeps `--default-resources` away.
        """
        blocks = [self.execution(name) for name in self.deployments]
        return {
            resource: self.resource(field)
            for resource, field in fields.items()
            if any(getattr(block, field) is not None for block in blocks)
        }


class ParsedCampaign(CampaignGraph):
    """The graph as the Snakefile holds it: a refusal ends the parse with its one line."""

    def __init__(self, campaign: str) -> None:
        with refusing():
            super().__init__(campaign)

    def planned(self, scope: Scope) -> PlannedCampaign:
        with refusing():
            return super().planned(scope)

    @property
    def unaccepted(self) -> list[str]:
        with refusing():
            return super().unaccepted
