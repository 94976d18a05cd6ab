"""The plan: a pure function of the request and the accepted profiles."""

from typing import NamedTuple

from producer import grids
from producer.admission import Admitted, admit, align_rule_of, drop_rule
from producer.contracts import CONTRACTS, DYNAMO, GLM53FLASH
from producer.grids.axes import sampled
from producer.partition import request_shapes
from producer.resolving import launch_of, profile_digest
from producer.session import DECODE_MAX_TOKENS, expected_chunks
from producer.simulation import simulate
from producer.tokens import GENERATOR
from schemas.canonical import digest, parse
from schemas.errors import Refusal
from schemas.plan import CellEntry, CellIdentity, DeploymentPlan, FrozenCell, Plan, Scope
from schemas.points import PHASES, DecodePoint, PointManifest
from schemas.profile import Profile
from schemas.request import Request, ResolvedDeployment

EXPLICIT_ORIGIN = "frozen_explicit_manifest"

UNPLANNED_WHEN_OFF = {
    "enable_prefix_caching": "prefixes are seeded and then found",
    "enable_chunked_prefill": "a seed longer than a step is run in several",
}
"""Setting of a profile -> why no launch is planned without it."""


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


def check_explicit(name: str, points: PointManifest, profile: Profile, file: str) -> None:
    """A user's list is measured whole or not at all: a point that cannot run as planned is refused by its place.

    An imbalanced point is no mistake: the table's coordinates do not describe it, so it is dropped and counted.
    """
    limits = {
        "max_num_scheduled_tokens": profile.max_num_tokens,
        "max_num_running_reqs": profile.max_batch_size,
        "max_model_len": profile.max_model_len,
        "available_kv_blocks": profile.free_blocks,
    }
    for phase in PHASES:
        for index, point in enumerate(points.of(phase).points()):
            rule = drop_rule(profile, point)
            if rule not in (None, "imbalanced"):
                raise Refusal(
                    f"deployments.{name}.points: {phase}[{index}]: explicit benchmark point is infeasible",
                    f"a point that runs as planned within {limits}",
                    f"{point.model_dump(exclude_none=True)}, refused by the rule {rule}",
                    file,
                )


def check_checkpoints(request: Request, profiles: dict[str, AcceptedProfile], file: str) -> None:
    """The GLM-5.3-Flash deployments of a campaign share one checkpoint setting and one alignment."""
    rules = {
        name: align_rule_of(profiles[name].profile)
        for name, deployment in request.deployments.items()
        if deployment.contract == GLM53FLASH.name
    }
    alignments = {name: None if rule is None else rule.checkpoint_alignment for name, rule in rules.items()}
    if len({alignment is None for alignment in alignments.values()}) > 1:
        what = "GLM-5.3-Flash collection requires the same prefill checkpoint setting across the accepted deployments"
        raise Refusal(what, "one setting", alignments, file)
    if len(set(alignments.values())) > 1:
        what = "GLM-5.3-Flash collection requires one prefill checkpoint alignment across the accepted deployments"
        raise Refusal(what, "one alignment", alignments, file)


def check_profile(name: str, deployment: ResolvedDeployment, profile: Profile, file: str) -> None:
    """The profile is of this deployment, and its launch can be planned.

    Raises:
        Refusal: another model or other limits, prefix caching or chunked prefill switched off by the engine, a float16
            KV cache, a recurrent block that no step can hold.
    """
    limits = deployment.limits
    facts = {
        "model_config_sha256": (deployment.config.sha256, profile.model_config_sha256),
        "model_revision": (deployment.model_revision, profile.model_revision),
        "max_num_tokens": (limits.max_num_tokens, profile.max_num_tokens),
        "max_batch_size": (limits.max_batch_size, profile.max_batch_size),
        "max_model_len": (limits.max_model_len, profile.max_model_len),
        "mamba_cache_mode": (deployment.engine.mamba_cache_mode or "none", profile.mamba_cache_mode),
    }
    for field, (expected, found) in facts.items():
        if expected != found:
            raise Refusal(f"profile of {name} {field}", expected, found, deployment.profile or file)
    # An engine may switch both off by itself, as for MLA on the CPU (0.32.0, platforms/cpu.py:516).
    for field, why in UNPLANNED_WHEN_OFF.items():
        if getattr(profile, field) is False:
            raise Refusal(f"profile of {name} {field}", f"True: {why}", False, deployment.profile or file)
    if deployment.precision.kv_cache == "half":
        raise Refusal(f"deployments.{name}.precision.kv_cache", "bfloat16 or fp8: half is not planned", "'half'", file)
    rule = align_rule_of(profile)
    if rule is not None and rule.block_size > profile.max_num_tokens:
        raise Refusal(
            f"deployments.{name}.limits.max_num_tokens",
            f"at least the recurrent block of {rule.block_size} tokens",
            profile.max_num_tokens,
            file,
        )


def check_steps(name: str, manifest: PointManifest, profile: Profile) -> None:
    """Every kept point, run through the pure simulation, takes exactly the steps that the producer will demand."""
    for point in manifest.points():
        shapes = request_shapes(point, profile.cache_hit_alignment_tokens)
        generated = DECODE_MAX_TOKENS if isinstance(point, DecodePoint) else 1
        chunks = [expected_chunks(point, shape) for shape in shapes]
        demanded = [dict(enumerate(step)) for step in zip(*chunks, strict=True)]
        steps = simulate(profile, shapes, generated)
        if steps != demanded:
            raise AssertionError(f"{name}: {point} was admitted but runs as {steps}")


def plan_points(name: str, deployment: ResolvedDeployment, profile: Profile, file: str) -> tuple[str, Admitted]:
    """Origin and admitted points of one deployment, from its own list or its contract's grid."""
    if deployment.points is not None:
        check_explicit(name, deployment.points, profile, file)
        origin, candidates = EXPLICIT_ORIGIN, deployment.points
    else:
        origin = CONTRACTS[deployment.contract].grid_origin
        candidates = grids.candidates(origin, deployment.grid, _with_captures(profile, deployment))
    # A role that has one phase measures, counts and freezes that phase alone.
    candidates = candidates.model_copy(update={phase: () for phase in PHASES if phase not in deployment.phases})
    planned = admit(profile, candidates)
    for phase in deployment.phases:
        if not planned.manifest.of(phase).points():
            raise Refusal(
                f"deployments.{name}.grid.{phase}",
                f"a point that fits {profile.free_blocks} free blocks and the limits",
                f"none (dropped {planned.dropped})",
                file,
            )
    check_steps(name, planned.manifest, profile)
    return origin, planned


def _with_captures(profile: Profile, deployment: ResolvedDeployment) -> Profile:
    """The profile with the capture sizes that the campaign fixes, which the engine then has."""
    graph = deployment.engine.graph
    fixed = None if graph is None else graph.capture_sizes
    return profile if fixed is None else profile.model_copy(update={"cudagraph_capture_sizes": fixed})


def freeze_cells(
    request: Request, name: str, deployment: ResolvedDeployment, profile: Profile, manifest: PointManifest
) -> list[FrozenCell]:
    """One cell per phase of the deployment's role that has points."""
    contract = CONTRACTS[deployment.contract]
    cells = []
    for phase in deployment.phases:
        points = manifest.of(phase)
        if not points.points():
            continue
        fields = launch_of(request, deployment) | {
            "phase": phase,
            "probe_digest": profile_digest(request, deployment),
            "contract": contract.name,
            "producer_protocol": contract.protocol,
            "measurement": contract.measurement.model_dump(),
            "token_generator": GENERATOR,
            "token_seed": contract.token_seed,
            "points_sha256": digest(points),
        }
        if deployment.execution_identity is not None:
            fields["execution_identity"] = deployment.execution_identity.model_dump()
        if deployment.warmup_iterations is not None:
            fields["warmup_iterations"] = deployment.warmup_iterations
        cells.append(
            FrozenCell(
                deployment=name,
                model=deployment.model,
                vocab_size=deployment.config.vocab_size,
                block_size=profile.block_size,
                hash_block_size=profile.hash_block_size,
                cache_hit_alignment_tokens=profile.cache_hit_alignment_tokens,
                free_blocks=profile.free_blocks,
                device_name=profile.device_name,
                identity=parse(CellIdentity, fields, name),
                points=points,
            )
        )
    return cells


def bounded(cell: FrozenCell, max_points: int) -> FrozenCell:
    """The cell with at most `max_points` (2 or more) of its points, spread over its list with both ends.

    It is another cell, since it comes to a point after fewer others; the cell itself when it has no more points.
    """
    points = PointManifest(
        schema_version=cell.points.schema_version,
        prefill=sampled(cell.points.prefill, max_points),
        decode=sampled(cell.points.decode, max_points),
    )
    identity = cell.identity.model_copy(update={"points_sha256": digest(points)})
    return cell.model_copy(update={"identity": identity, "points": points})


class FrozenDeployment(NamedTuple):
    """What a plan holds of one deployment."""

    plan: DeploymentPlan
    manifest: PointManifest
    cells: list[FrozenCell]


def freeze_deployment(
    request: Request, name: str, accepted: AcceptedProfile, scope: Scope, file: str
) -> FrozenDeployment:
    """Freeze points and cells of one deployment: no other one has a say in them.

    Raises:
        Refusal: a profile of another launch, a phase without a point that could run, an explicit point that cannot.
    """
    deployment = request.deployments[name]
    check_profile(name, deployment, accepted.profile, file)
    origin, planned = plan_points(name, deployment, accepted.profile, file)
    manifest = planned.manifest
    if scope == "smoke" and deployment.contract != DYNAMO.name:  # what is imported costs nothing to check whole
        manifest = grids.smoke(origin, manifest, accepted.profile)
    plan = DeploymentPlan(
        model=deployment.model,
        probe_digest=profile_digest(request, deployment),
        profile_sha256=accepted.sha256,
        points_sha256=digest(manifest),
        origin=origin,
        prefill_points=len(manifest.prefill),
        decode_points=len(manifest.decode),
        dropped=planned.dropped,
        contract=deployment.contract,
        peak_blocks=planned.peak_blocks,
        estimated_blocks=planned.estimated_blocks,
        free_blocks=accepted.profile.free_blocks,
    )
    return FrozenDeployment(plan, manifest, freeze_cells(request, name, deployment, accepted.profile, manifest))


def entry_of(cell: FrozenCell) -> CellEntry:
    """A frozen cell as its plan lists it."""
    return CellEntry(
        name=cell.name,
        deployment=cell.deployment,
        phase=cell.identity.phase,
        digest=cell.digest,
        points_sha256=cell.identity.points_sha256,
        points=len(cell.points.points()),
    )


def plan_campaign(request: Request, profiles: dict[str, AcceptedProfile], scope: Scope, file: str) -> PlannedCampaign:
    """Freeze points and cells of every deployment of `request`.

    Raises:
        Refusal: of a deployment, or of deployments that do not go together.
    """
    check_checkpoints(request, profiles, file)
    frozen = {
        name: freeze_deployment(request, name, profiles[name], scope, file) for name in sorted(request.deployments)
    }
    cells = [cell for deployment in frozen.values() for cell in deployment.cells]
    plan = Plan(
        scope=scope,
        system=request.system.name,
        system_sha256=digest(request.system),
        backend=request.backend,
        backend_version=request.backend_version,
        runtime_backend_version=request.runtime_backend_version,
        deployments={name: deployment.plan for name, deployment in frozen.items()},
        cells=tuple(map(entry_of, cells)),
    )
    manifests = {name: deployment.manifest for name, deployment in frozen.items()}
    return PlannedCampaign(plan, manifests, {cell.name: cell for cell in cells})
