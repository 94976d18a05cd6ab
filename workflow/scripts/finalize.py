"""Finalize a published plan: derive everything again, compare, and only then copy it into a folder called final."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from schemas.canonical import canonical_bytes, digest, read_bytes, read_model, sha256, write_atomic, write_model
from schemas.errors import Refusal, run
from schemas.evidence import CellEvidence, Finalization
from schemas.layout import cells_folder, pair_folder
from schemas.plan import FrozenCell, Plan

from campaign_argument import add_campaign, graph_of
from plan_readiness import assess
from publish import PARQUET, SIDECAR, build
from verify_cell import read_cell, verify


def check_cell(planned: FrozenCell, folder: Path, accepted: Sequence[Path]) -> CellEvidence:
    """The verdict on a cell of the plan, derived anew; `accepted` are the files that its launches are bound to.

    Raises:
        Refusal: the folder holds another cell, or the recorded verdict is not what its files give, or has failed.
    """
    frozen = read_model(FrozenCell, folder / "cell.json", "frozen cell")
    # The model's path may have moved since; everything else is the plan's.
    if frozen.model_copy(update={"model": planned.model}) != planned:
        raise Refusal(f"{folder.name} cell.json", "the plan's cell", "another", folder / "cell.json")
    recorded = read_model(CellEvidence, folder / "evidence.json", "evidence")
    derived = verify(read_cell(folder, accepted))
    if derived != recorded or derived.state == "failed":
        found = derived.failures[0] if derived.failures else "another verdict"
        raise Refusal(f"{folder.name} evidence", "the recorded verdict", found, folder / "evidence.json")
    return derived


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_campaign(parser)
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    graph = graph_of(arguments)
    plan = read_model(Plan, arguments.plan, "plan")
    graph.require_accepted()

    planned = graph.planned("formal")
    if planned.plan != plan:
        raise Refusal("plan", f"what {arguments.campaign} gives: {planned.digest}", digest(plan), arguments.plan)
    for name, manifest in planned.manifests.items():
        file = arguments.plan.parent / "points" / f"{name}.json"
        if sha256(read_bytes(file, "point list")) != digest(manifest):
            raise Refusal("point list", digest(manifest), sha256(read_bytes(file, "point list")), file)
    gaps: list[str] = []
    for entry in plan.cells:
        accepted = [Path(file) for file in graph.accepted_files(entry.name)]
        gaps.extend(check_cell(planned.cells[entry.name], cells_folder(arguments.plan) / entry.name, accepted).gaps)
    readiness = assess(arguments.plan)
    if readiness.status != "ready":
        raise Refusal("readiness", "ready", readiness.blockers[0], arguments.plan)

    publication = build(arguments.plan)
    pair = pair_folder(arguments.plan.parent, plan.system, plan.backend, plan.backend_version)
    systems = arguments.plan.parent / "systems"
    contents = {
        pair / PARQUET: publication.parquet,
        pair / SIDECAR: canonical_bytes(publication.sidecar),
        systems / f"{plan.system}.yaml": publication.system,
    }
    for file, data in contents.items():
        if read_bytes(file, "published file") != data:
            raise Refusal("published file", f"sha256 {sha256(data)} of its cells", sha256(file.read_bytes()), file)

    final = arguments.output.parent
    copies = {Path("systems") / file.relative_to(systems): data for file, data in contents.items()}
    copies[Path("request.json")] = canonical_bytes(graph.request)
    copies[Path("plan.json")] = read_bytes(arguments.plan, "plan")
    for name in graph.deployments:
        copies[Path("profiles") / f"{name}.json"] = read_bytes(graph.profile_file(name), "profile")
    for relative, data in copies.items():
        write_atomic(final / relative, data)
    write_model(
        arguments.output,
        Finalization(
            plan_sha256=planned.digest,
            requires_review=bool(gaps),
            rows=publication.rows,
            minimum_free_blocks={name: planned_.free_blocks for name, planned_ in plan.deployments.items()},
            files_sha256={str(relative): sha256(data) for relative, data in sorted(copies.items())},
        ),
    )
    print(f"final: {publication.rows} rows in {final}")


if __name__ == "__main__":
    run(main)
