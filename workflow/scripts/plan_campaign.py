"""Write a campaign's plan and the frozen point list of each deployment."""

import argparse
from pathlib import Path

from producer.graph import CampaignGraph
from schemas.canonical import read_bytes, short, write_atomic, write_model
from schemas.errors import Refusal, run
from schemas.layout import SCOPE_PREFIX
from schemas.plan import Scope

from campaign_argument import add_campaign, graph_of


def write_plan(graph: CampaignGraph, scope: Scope, folder: Path) -> None:
    planned = graph.planned(scope)
    for name, manifest in planned.manifests.items():
        write_model(folder / "points" / f"{name}.json", manifest)
    for name in planned.manifests:
        # The accepted profile as it was: what a later acceptance is compared with.
        write_atomic(folder / "profiles" / f"{name}.json", read_bytes(graph.profile_file(name), "profile"))
    write_model(folder / "plan.json", planned.plan)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_campaign(parser)
    parser.add_argument("--plan", required=True, help="first digits of the plan's digest")
    parser.add_argument("--scope", choices=SCOPE_PREFIX, default="formal")
    parser.add_argument("--output", type=Path, required=True, help="plan.json; lists and profiles go beside it")
    arguments = parser.parse_args()
    graph: CampaignGraph = graph_of(arguments)
    scope: Scope = arguments.scope
    found = short(graph.planned(scope).digest)
    if found != arguments.plan:
        raise Refusal("plan", arguments.plan, found, arguments.campaign)
    write_plan(graph, scope, arguments.output.parent)


if __name__ == "__main__":
    run(main)
