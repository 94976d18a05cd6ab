"""Assess readiness: is every cell measured, verified, and the plan's own, on the runtime that was accepted?

With --plan: one plan, whose verdict is written to --output. Without: the campaign over both scopes, for people; exit
code 0 when it is ready to be measured in full, else 1. Measures nothing, claims nothing, and repairs nothing.
"""

import argparse
import contextlib
import sys
from pathlib import Path

from schemas.canonical import canonical_bytes, read_model, write_model
from schemas.errors import run
from schemas.evidence import CampaignReadiness
from schemas.plan import Plan

from campaign_argument import graph_of
from campaign_readiness import asked_of, assess_campaign
from plan_readiness import assess


def print_campaign(found: CampaignReadiness) -> None:
    """What a person reads: whose word counts for each phase of each deployment, and what is in the way."""
    ready = "ready for full collection" if found.ready_for_full_collection else "not ready for full collection"
    if found.ready_for_full_collection and all(one.scope == "formal" for one in found.selected_cells):
        ready = "collected in full"
    print(f"{found.campaign}: {found.status}, {ready}")
    for one in found.selected_cells:
        points = sum(one.cell.formal_regime_counts.values())
        eligible = f"{one.cell.direct_eligible_points} of {points} points eligible, {one.cell.coverage}"
        print(f"{one.cell.status:10}  {one.scope:6}  {one.cell.name}  {eligible}")
    for name, runtime in found.runtime_compatibility.items():
        blocks = f"{runtime.observed_free_blocks} free blocks, {runtime.accepted_free_blocks} accepted"
        unknown = f"; not in the artifact: {', '.join(runtime.unestablished)}" if runtime.unestablished else ""
        print(f"runtime of {name}: {runtime.status} ({blocks}{unknown})")
    for blocker in found.blockers:
        print(f"  {blocker}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--campaign", type=Path, help="campaign file; with --plan the plan is compared with it")
    parser.add_argument("--plan", type=Path)
    parser.add_argument("--output", type=Path, help="with --plan: the verdict")
    parser.add_argument("--json", action="store_true", help="without --plan: one JSON object instead of lines")
    arguments = parser.parse_args()
    if (arguments.plan is None) != (arguments.output is None) or (arguments.plan or arguments.campaign) is None:
        parser.error("expected --plan with --output, or --campaign")
    if arguments.plan is None:
        found = assess_campaign(graph_of(arguments))
        with contextlib.suppress(BrokenPipeError):
            if arguments.json:
                print(canonical_bytes(found).decode())
            else:
                print_campaign(found)
        sys.exit(0 if found.ready_for_full_collection else 1)
    asked = None
    if arguments.campaign is not None:
        asked = asked_of(graph_of(arguments), read_model(Plan, arguments.plan, "plan").scope)
    readiness = assess(arguments.plan, asked)
    write_model(arguments.output, readiness)
    print(f"{readiness.scope} plan {readiness.plan_sha256[:16]}: {readiness.status}")
    for blocker in readiness.blockers:
        print(f"  {blocker}")


if __name__ == "__main__":
    run(main)
