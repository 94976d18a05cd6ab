"""Which cells of a campaign need collection, and why; who measures now; how many GPU hours are left.

Reads the disk and, where there is one, the Slurm queue; starts nothing and writes nothing. `--json` prints one object:
campaign, scope, plan (null before the profiles are accepted), probes (deployments without a profile), accept (profiles
that wait for a person), counts (cells by state), cells (see cell_status.py), gpu_hours_left (null while unknown).
"""

import argparse
import contextlib
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import msgspec

from producer.parsed import ParsedCampaign
from producer.recollection import MeasuredCells
from schemas.canonical import short
from schemas.errors import run
from schemas.layout import SCOPE_PREFIX, scope_of
from schemas.summary import DeploymentSummary

from campaign_argument import add_campaign, campaign_name
from cell_status import CellFolders, CellStatus, State, receipt_times

SQUEUE = ("squeue", "--me", "--noheader", "--format=%i|%T|%Z|%k")
SQUEUE_SECONDS = 5.0
"""A dead controller keeps squeue waiting for much longer."""

QUEUED = ("PENDING", "CONFIGURING")
COMMENT = "rule_collect_cell_wildcards_"
"""How the Slurm executor plugin's comment of a cell's job begins; the wildcards follow (2.8.0, __init__.py:1103), scope
and cell with `_` between them and for each `/` (utils.py:66)."""


class CampaignStatus(msgspec.Struct, frozen=True):
    campaign: str
    scope: str
    plan: str | None
    probes: list[str]
    accept: list[str]
    counts: dict[State, int]
    gpu_hours_left: float | None
    cells: list[CellStatus]


def slurm_jobs(folder: Path, prefix: str) -> tuple[dict[str, str], dict[str, str]]:
    """Job id -> state of this user's Slurm jobs, and cell -> id of those in `folder` that wait for a cell below a
    path's prefix; empty without Slurm."""
    if shutil.which(SQUEUE[0]) is None:
        return {}, {}
    try:
        asked = subprocess.run(SQUEUE, capture_output=True, text=True, timeout=SQUEUE_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        print("Slurm does not answer: jobs are judged by their files alone", file=sys.stderr)
        return {}, {}
    jobs, queued = {}, {}
    known = f"{COMMENT}{prefix.replace('/', '_')}_"
    for line in asked.stdout.splitlines():
        job, state, where, comment = line.split("|", 3)
        jobs[job] = state
        if state in QUEUED and Path(where) == folder and comment.startswith(known):
            queued[comment.removeprefix(known)] = job
    return jobs, queued


def gpu_hours_left(statuses: list[CellStatus], deployments: dict[str, DeploymentSummary], folder: Path) -> float | None:
    """What is left at the rates of the receipts so far: of a cell's deployment and phase, of its phase, or of all."""
    rates: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    for done in statuses:
        if not done.collect and (times := receipt_times(folder / done.name)) is not None:
            rate = (times.engine_start_seconds, times.measuring_seconds / done.points)
            for kind in ((done.phase, done.deployment), (done.phase,), ()):
                rates.setdefault(kind, []).append(rate)
    hours = 0.0
    for left in statuses:
        if not left.collect or deployments[left.deployment].artifacts is not None:
            continue
        known = rates.get((left.phase, left.deployment)) or rates.get((left.phase,)) or rates.get(())
        if not known:
            return None
        start, point = (sum(column) / len(known) for column in zip(*known, strict=True))
        hours += deployments[left.deployment].gpus * (start + point * (left.points - left.points_done)) / 3600
    return hours


def campaign_status(campaign: ParsedCampaign, scope: str) -> CampaignStatus:
    prefix = SCOPE_PREFIX.get(scope, f"{scope}/")  # type: ignore[call-overload]
    plan_scope = scope_of(prefix)
    probes = campaign.missing_profiles
    accept = [] if probes else campaign.unaccepted
    if probes or accept:
        return CampaignStatus(campaign.name, scope, None, probes, accept, {}, None, [])
    plan, deployments = campaign.plan_summary(plan_scope), campaign.summary.deployments
    folder, logs = campaign.layout.cells(prefix), campaign.layout.root / "logs" / prefix
    look = CellFolders(MeasuredCells(folder), logs, *slurm_jobs(Path.cwd(), prefix))
    statuses = [look.status(cell, deployments[cell.deployment]) for cell in campaign.cells_below(prefix)]
    counts = dict(sorted(Counter(status.state for status in statuses).items()))
    hours = gpu_hours_left(statuses, deployments, folder)
    return CampaignStatus(campaign.name, scope, short(plan.digest), [], [], counts, hours, statuses)


def lines_of(status: CellStatus) -> list[str]:
    """What a person reads of a cell that is not finished."""
    parts = [f"{status.state:11} {status.name}  {status.points_done}/{status.points} points"]
    if status.job_id is not None:
        parts.append(f"job {status.job_id}")
    if status.host is not None:
        parts.append(f"on {status.host}")
    if status.current_point:
        parts.append(f"at point {status.current_point}")
    if status.seconds_left is not None:
        parts.append(f"{status.seconds_left:.0f} s left")
    if status.why:
        parts.append(status.why)
    return ["  ".join(parts), *(f"            | {line}" for line in status.last_lines)]


def print_status(found: CampaignStatus) -> None:
    print(f"{found.campaign}, {found.scope}: plan {found.plan or 'not known yet'}")
    for name in found.probes:
        print(f"probe       {name}  its cells are known when its profile is imported")
    for file in found.accept:
        print(f"accept      {file}  a person has to accept this profile")
    for status in found.cells:
        if status.state != "judged":
            print(*lines_of(status), sep="\n")
    if found.cells:
        counted = ", ".join(f"{count} {state}" for state, count in found.counts.items())
        hours = found.gpu_hours_left
        left = "unknown until a first cell is measured" if hours is None else f"{hours:.2f}"
        collect = sum(status.collect for status in found.cells)
        print(f"{len(found.cells)} cells: {counted}; {collect} to collect; GPU hours left: {left}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_campaign(parser)
    parser.add_argument("--scope", default="formal", help="formal, smoke, or a repeat: repeat1, repeat1-points12")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    arguments = parser.parse_args()
    found = campaign_status(ParsedCampaign(campaign_name(arguments)), arguments.scope)
    with contextlib.suppress(BrokenPipeError):
        if arguments.json:
            print(msgspec.json.encode(found).decode())
        else:
            print_status(found)


if __name__ == "__main__":
    run(main)
