"""Whether a plan is ready: every phase of every deployment's role, each cell, and the campaign that it was made of."""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from producer.graph import read_profile
from schemas.canonical import read_bytes, read_model, sha256, short
from schemas.errors import Refusal
from schemas.evidence import CellReadiness, Readiness, ReadinessState
from schemas.layout import cells_folder
from schemas.plan import Plan, cell_name
from schemas.points import PHASES, Phase
from schemas.profile import Profile

from cell_readiness import UNREADABLE, assess_cell
from runtime_compatibility import by_deployment

ABSENT = "absent"


class Asked(NamedTuple):
    """What a campaign asks for now: its plan, and the phases of each deployment's role."""

    plan: Plan
    phases: Mapping[str, tuple[Phase, ...]]


def points_of(plan: Plan, deployment: str, phase: Phase) -> int:
    planned = plan.deployments[deployment]
    return planned.prefill_points if phase == "prefill" else planned.decode_points


def check_cells(plan: Plan, phases: Mapping[str, tuple[Phase, ...]]) -> Iterator[str]:
    """Every phase of every role has one cell, with as many points as the plan says, and there are no others.

    `phases` are those of the roles; of a deployment that is not among them, those that the plan has points of.
    """
    entries = {(entry.deployment, entry.phase): entry for entry in plan.cells}
    count = Counter((entry.deployment, entry.phase) for entry in plan.cells)
    for entry in plan.cells:
        if entry.name != (name := cell_name(entry.phase, entry.deployment, entry.digest)):
            yield f"plan cells name: expected {name}, found {entry.name}"
        if entry.deployment not in plan.deployments:
            yield f"plan cells deployment: expected one of {', '.join(plan.deployments)}, found {entry.deployment}"
    for deployment in plan.deployments:
        planned = tuple(phase for phase in PHASES if points_of(plan, deployment, phase))
        role = phases.get(deployment, planned)
        for phase in PHASES:
            wanted, found = int(phase in role), count[deployment, phase]
            if wanted != found:
                yield f"plan cells of {deployment}, phase {phase}: expected {wanted}, found {found}"
            elif wanted and entries[deployment, phase].points != points_of(plan, deployment, phase):
                expected, points = points_of(plan, deployment, phase), entries[deployment, phase].points
                yield f"plan points of {deployment}, phase {phase}: expected {expected}, found {points}"


def _leaves(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{place}.{key}" if place else key)
    else:
        yield place, value


def _by_field(plan: Plan) -> dict[str, Any]:
    """The values of a plan by their place; cells by what they are of."""
    cells = {f"{entry.phase} of {entry.deployment}": entry.model_dump() for entry in plan.cells}
    return dict(_leaves(plan.model_dump() | {"cells": cells}))


def check_asked(plan: Plan, asked: Plan) -> Iterator[str]:
    """The plan is what the campaign gives now, field by field."""
    expected, found = _by_field(asked), _by_field(plan)
    for field in sorted(expected.keys() | found.keys()):
        if expected.get(field, ABSENT) != found.get(field, ABSENT):
            wanted = f"{expected.get(field, ABSENT)} of the campaign as it is now"
            yield f"plan {field}: expected {wanted}, found {found.get(field, ABSENT)}"


def read_profiles(plan: Plan, files: Mapping[str, Path]) -> tuple[dict[str, Profile], list[str]]:
    """The accepted profile of each deployment that can be read and is the plan's; a line for each other one."""
    profiles, blockers = {}, []
    for name, deployment in plan.deployments.items():
        try:
            accepted = read_profile(files[name])
        except UNREADABLE as error:
            words = str(error) if isinstance(error, Refusal) else f"{type(error).__name__}: {error}"
            blockers.append(f"accepted profile of {name} cannot be read: {words}")
            continue
        if accepted.sha256 == deployment.profile_sha256:
            profiles[name] = accepted.profile
        else:
            expected = f"expected {deployment.profile_sha256} of the plan, found {accepted.sha256}"
            blockers.append(f"sha256 of the accepted profile of {name}: {expected}")
    return profiles, blockers


def status_of(blocked: bool, cells: tuple[CellReadiness, ...]) -> ReadinessState:
    """The worst of it."""
    states = {cell.status for cell in cells}
    if blocked or "blocked" in states:
        return "blocked"
    return "incomplete" if "incomplete" in states else "ready"


def assess_plan(
    plan: Plan, plan_sha256: str, cells: Path, profiles: Mapping[str, Path], blockers: list[str]
) -> Readiness:
    """The cells of a plan in the folder `cells`, on its accepted profiles; `blockers` are what is known against it."""
    accepted, unaccepted = read_profiles(plan, profiles)
    found = tuple(assess_cell(entry, cells / entry.name, accepted.get(entry.deployment)) for entry in plan.cells)
    blockers = blockers + unaccepted
    return Readiness(
        scope=plan.scope,
        plan_sha256=plan_sha256,
        status=status_of(bool(blockers), found),
        blockers=(*blockers, *(blocker for cell in found for blocker in cell.blockers)),
        plan_blockers=tuple(blockers),
        cells=found,
        runtime_compatibility=by_deployment(found),
    )


def assess(plan_file: Path, asked: Asked | None = None) -> Readiness:
    """The readiness of a plan; `asked` is what its campaign gives now, where that is known.

    Raises:
        Refusal: the plan itself cannot be read.
    """
    plan, plan_sha256 = read_model(Plan, plan_file, "plan"), sha256(read_bytes(plan_file, "plan"))
    blockers = list(check_cells(plan, {} if asked is None else asked.phases))
    folder = plan_file.resolve().parent.name
    if folder.startswith("plan-") and folder != f"plan-{short(plan_sha256)}":
        blockers.append(f"digest of plan.json: expected {folder.removeprefix('plan-')}, found {short(plan_sha256)}")
    if asked is not None:
        blockers += check_asked(plan, asked.plan)
    profiles = {name: plan_file.parent / "profiles" / f"{name}.json" for name in plan.deployments}
    return assess_plan(plan, plan_sha256, cells_folder(plan_file), profiles, blockers)
