"""Whether a campaign is ready to be measured in full: smoke is read first, a formal attempt supersedes its cell."""

from producer.graph import CampaignGraph
from schemas.canonical import digest, file_digest
from schemas.errors import Refusal
from schemas.evidence import CampaignReadiness, Readiness, ReadinessState, SelectedCell
from schemas.layout import SCOPE_PREFIX
from schemas.plan import Scope

from cell_readiness import begun
from plan_readiness import Asked, assess, assess_plan, status_of
from runtime_compatibility import by_deployment

SCOPES: tuple[Scope, ...] = ("smoke", "formal")


def asked_of(graph: CampaignGraph, scope: Scope) -> Asked:
    phases = {name: deployment.phases for name, deployment in graph.summary.deployments.items()}
    return Asked(graph.planned(scope).plan, phases)


def assess_scope(graph: CampaignGraph, scope: Scope) -> Readiness:
    """The plan of one scope; before it is written, its cells against what it would be."""
    file, planned = graph.plan_folder(scope) / "plan.json", graph.planned(scope)
    blockers = []
    if file.exists():
        try:
            return assess(file, asked_of(graph, scope))
        except Refusal as refusal:
            blockers = [f"plan cannot be read: {refusal}"]
    profiles = {name: graph.profile_file(name) for name in graph.deployments}
    return assess_plan(planned.plan, planned.digest, graph.layout.cells(SCOPE_PREFIX[scope]), profiles, blockers)


def select(graph: CampaignGraph, found: dict[Scope, Readiness]) -> list[SelectedCell]:
    """Of each phase of each deployment the formal cell where somebody began it, else the smoke cell."""
    selected: dict[tuple[str, str], SelectedCell] = {}
    for scope in SCOPES:
        cells = {cell.name: cell for cell in found[scope].cells}
        for entry in graph.planned(scope).plan.cells:
            counts = scope == "smoke" or begun(graph.layout.cells(SCOPE_PREFIX[scope]) / entry.name)
            if counts and entry.name in cells:
                selected[entry.deployment, entry.phase] = SelectedCell(
                    deployment=entry.deployment, phase=entry.phase, scope=scope, cell=cells[entry.name]
                )
    return list(selected.values())


def unplanned(graph: CampaignGraph, status: ReadinessState, blockers: list[str]) -> CampaignReadiness:
    return CampaignReadiness(
        campaign=graph.name,
        request_sha256=digest(graph.request),
        status=status,
        ready_for_full_collection=False,
        blockers=tuple(blockers),
    )


def assess_campaign(graph: CampaignGraph) -> CampaignReadiness:
    """One verdict over both scopes.

    Raises:
        Refusal: a profile that cannot be planned with.
    """
    if graph.missing_profiles:
        missing = [f"profile of {name}: not imported, so no cell is known" for name in graph.missing_profiles]
        return unplanned(graph, "incomplete", missing)
    profiles = {name: file_digest(graph.profile_file(name)) for name in graph.deployments}
    unaccepted = [name for name, imported in profiles.items() if not graph.is_accepted(name, imported)]
    if unaccepted:
        lines = [
            f"acceptance.{name}: expected {profiles[name]} of the profile, found another or none" for name in unaccepted
        ]
        return unplanned(graph, "blocked", lines)

    found = {scope: assess_scope(graph, scope) for scope in SCOPES}
    selected = select(graph, found)
    blockers = []
    for scope in SCOPES:
        counting = [cell for cell in selected if cell.scope == scope]
        if counting:
            blockers += [f"{scope} {line}" for line in found[scope].plan_blockers]
    known = {(cell.deployment, cell.phase) for cell in selected}
    for name, deployment in graph.summary.deployments.items():
        blockers += [f"{phase} of {name}: no cell" for phase in deployment.phases if (name, phase) not in known]
    cells = tuple(cell.cell for cell in selected)
    status = status_of(bool(blockers), cells)
    return CampaignReadiness(
        campaign=graph.name,
        request_sha256=digest(graph.request),
        status=status,
        ready_for_full_collection=status == "ready",
        blockers=(*blockers, *(f"{one.scope} {line}" for one in selected for line in one.cell.blockers)),
        plans={scope: readiness.plan_sha256 for scope, readiness in found.items()},
        selected_cells=tuple(selected),
        runtime_compatibility=by_deployment(cells),
    )
