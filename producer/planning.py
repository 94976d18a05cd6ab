"""The plan: a pure function of the request and the accepted profiles."""

from typing import NamedTuple

from producer.contracts import GENERIC
from producer.grid import ORIGIN, PlannedPoints, plan_points, smoke_points
from producer.resolving import launch_of, probe_digest
from schemas.canonical import digest, parse
from schemas.errors import Refusal
from schemas.plan import CellEntry, CellIdentity, DeploymentPlan, FrozenCell, Plan, Scope
from schemas.points import PointManifest
from schemas.profile import Profile
from schemas.request import Request, ResolvedDeployment


class AcceptedProfile(NamedTuple):
    """A profile and the digest of its file."""

    profile: Profile
    sha256: str


class PlannedCampaign(NamedTuple):
    """A plan with what hangs on it: one manifest per deployment, one frozen cell per entry (by cell name)."""

    plan: Plan
    manifests: dict[str, PointManifest]
    cells: dict[str, FrozenCell]

    @property
    def digest(self) -> str:
        return digest(self.plan)


def freeze_cells(
    request: Request, name: str, deployment: ResolvedDeployment, profile: Profile, manifest: PointManifest
) -> list[FrozenCell]:
    """One cell per phase of the deployment's role that has points."""
    cells = []
    for phase in deployment.phases:
        points = manifest.of(phase)
        if not points.points():
            continue
        identity = parse(
            CellIdentity,
            launch_of(request, deployment)
            | {
                "phase": phase,
                "probe_digest": probe_digest(request, deployment),
                "contract": GENERIC.name,
                "producer_protocol": GENERIC.protocol,
                "measurement": GENERIC.measurement.model_dump(),
                "points_sha256": digest(points),
            },
            name,
        )
        cells.append(
            FrozenCell(
                deployment=name,
                model=deployment.model,
                vocab_size=deployment.config.vocab_size,
                block_size=profile.block_size,
                hash_block_size=profile.hash_block_size,
                cache_hit_alignment_tokens=profile.cache_hit_alignment_tokens,
                identity=identity,
                points=points,
            )
        )
    return cells


def plan_campaign(request: Request, profiles: dict[str, AcceptedProfile], scope: Scope, file: str) -> PlannedCampaign:
    """Freeze points and cells of every deployment of `request`.

    Raises:
        Refusal: a phase of a deployment's role has no point that the engine could run.
    """
    deployments, manifests, cells, entries = {}, {}, {}, []
    for name, deployment in sorted(request.deployments.items()):
        accepted = profiles[name]
        planned: PlannedPoints = plan_points(deployment.grid, accepted.profile)
        manifest = planned.manifest
        for phase in deployment.phases:
            if not manifest.of(phase).points():
                raise Refusal(
                    f"deployments.{name}.grid.{phase}",
                    f"a point that fits {accepted.profile.free_blocks} free blocks and the limits",
                    f"none (dropped {planned.dropped})",
                    file,
                )
        if scope == "smoke":
            manifest = smoke_points(manifest)
        manifests[name] = manifest
        deployments[name] = DeploymentPlan(
            model=deployment.model,
            probe_digest=probe_digest(request, deployment),
            profile_sha256=accepted.sha256,
            points_sha256=digest(manifest),
            origin=ORIGIN,
            prefill_points=len(manifest.prefill),
            decode_points=len(manifest.decode),
            dropped=planned.dropped,
            peak_blocks=planned.peak_blocks,
            free_blocks=accepted.profile.free_blocks,
        )
        for cell in freeze_cells(request, name, deployment, accepted.profile, manifest):
            cells[cell.name] = cell
            entries.append(
                CellEntry(
                    name=cell.name,
                    deployment=name,
                    phase=cell.identity.phase,
                    digest=cell.digest,
                    points_sha256=cell.identity.points_sha256,
                    points=len(cell.points.points()),
                )
            )
    plan = Plan(
        scope=scope,
        system=request.system.name,
        system_sha256=digest(request.system),
        backend=request.backend,
        backend_version=request.backend_version,
        runtime_backend_version=request.runtime_backend_version,
        deployments=deployments,
        cells=tuple(entries),
    )
    return PlannedCampaign(plan, manifests, cells)
