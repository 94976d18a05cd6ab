"""Assess a campaign's repeats: do the values of its plan come out again? Only comparable evidence counts. Read-only.

Each repeat's cell is compared with the source's, point by point (compare_cells.py). A bounded repeat is of another
cell, since it comes to a point after fewer others: its launches are compared with the first of them, and the source's
value stays unestablished.
"""

import argparse
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from producer.contracts import DYNAMO
from producer.planning import bounded
from schemas.canonical import digest, read_bytes, read_model, sha256, short, write_model
from schemas.errors import Refusal, run
from schemas.evidence import CellEvidence
from schemas.layout import cells_folder, repeat_prefix
from schemas.merged import MergedArtifact
from schemas.native import read_struct
from schemas.plan import CellEntry, FrozenCell, Plan
from schemas.policy import RepeatabilityPolicy, read_policy
from schemas.repeatability import PRECEDENCE, CellRepeatability, Outcome, PointRepeatability, Repeatability

from compare_cells import CellRun, ComparedPoint, Result, compare, paired_ids

SHOWN_POINTS = 5
"""Points of a cell that are named in the lines for people; all are in the file."""


class Unusable(NamedTuple):
    """Why a run is no evidence."""

    outcome: Outcome
    reason: str


class Sample(NamedTuple):
    """One point of one repeat; `milliseconds` only where it was measured."""

    repeat: int
    result: Result | Outcome
    reasons: tuple[str, ...]
    milliseconds: float | None = None


class Spread(NamedTuple):
    """Mean, sample standard deviation (over n - 1) and its part of the mean; of one value the mean alone."""

    mean: float
    stdev: float | None
    cv: float | None


def spread(values: list[float]) -> Spread | None:
    """The spread of positive values; None for none."""
    if not values:
        return None
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Spread(mean, None, None)
    stdev = statistics.stdev(values)
    return Spread(mean, stdev, stdev / mean)


def worst(outcomes: Iterable[Outcome]) -> Outcome:
    """The first by precedence; nothing is incomplete."""
    found = set(outcomes) or {"incomplete"}
    return next(outcome for outcome in PRECEDENCE if outcome in found)


def judge_point(
    policy: RepeatabilityPolicy,
    benchmark_id: int,
    source_ms: float,
    samples: list[Sample],
    source: ComparedPoint | None = None,
) -> PointRepeatability:
    """One point from its samples, one a repeat. `source` is what a sample of another cell is to the source, absent
    when the samples are compared with the source themselves.

    How far values lie apart is judged when every sample is there and comparable: of a part nobody knows.
    """
    reasons = [f"repeat {sample.repeat} {reason}" for sample in samples for reason in sample.reasons]
    outcomes: set[Outcome] = {"passed"}
    values: dict[str, float] = {}
    for sample in samples:
        if sample.result == "comparable":
            assert sample.milliseconds is not None
            values[str(sample.repeat)] = sample.milliseconds
        else:
            outcomes.add(sample.result)
    limit = policy.max_source_relative_difference
    if source is not None and source.result != "comparable" and (limit is not None or source.result == "mismatch"):
        outcomes.add(source.result)
        reasons += [f"source: {reason}" for reason in source.reasons]

    found = spread(list(values.values()))
    difference = None if found is None else (found.mean - source_ms) / source_ms
    if len(values) == policy.samples and found is not None and found.cv is not None:
        if found.cv > policy.max_cv:
            outcomes.add("unstable")
            reasons.append(f"cv {found.cv:.4f} of {len(values)} samples, above {policy.max_cv}")
        if source is None and limit is not None and difference is not None and abs(difference) > limit:
            outcomes.add("unstable")
            away = f"mean {found.mean:.4f} ms, source {source_ms:.4f} ms"
            reasons.append(f"source relative difference {difference:+.4f} ({away}), beyond {limit}")
    return PointRepeatability(
        benchmark_id=benchmark_id,
        outcome=worst(outcomes),
        reasons=tuple(reasons),
        source_ms=source_ms,
        samples_ms=values,
        comparable_samples=len(values),
        mean_ms=None if found is None else found.mean,
        stdev_ms=None if found is None else found.stdev,
        cv=None if found is None else found.cv,
        source_relative_difference=difference,
    )


def read_run(folder: Path, cell_digest: str) -> CellRun | Unusable:
    """A cell's run, if its own evidence stands."""
    files = [folder / name for name in ("cell.json", "merged.json", "evidence.json")]
    if absent := [file.name for file in files if not file.exists()]:
        return Unusable("incomplete", f"{', '.join(absent)} missing")
    cell = read_model(FrozenCell, files[0], "frozen cell")
    merged = read_struct(MergedArtifact, files[1], "merged artifact")
    evidence = read_model(CellEvidence, files[2], "evidence")
    if evidence.failures:
        return Unusable("mismatch", f"evidence: failed: {evidence.failures[0]}")
    for field, expected, found in (
        ("cell digest", cell_digest, cell.digest),
        ("cell digest of the evidence", cell_digest, evidence.cell_digest),
        ("cell digest of the merged artifact", cell_digest, merged.cell_digest),
        ("merged_sha256", sha256(read_bytes(files[1], "merged artifact")), evidence.merged_sha256),
    ):
        if expected != found:
            return Unusable("mismatch", f"{field}: expected {short(expected)}, found {short(found)}")
    return CellRun(cell, merged)


def milliseconds(cell_run: CellRun) -> dict[int, float]:
    """The retained value of each point: the slowest rank's."""
    return {group.benchmark_id: group.wall_time * 1000 for group in cell_run.merged.iteration_groups}


class Repeats:
    """The repeats of one cell, read one after the other: only the source and the reference are kept."""

    def __init__(self, source: CellRun, asked: FrozenCell) -> None:
        self.source, self.asked = source, asked
        self.reference = source if asked.digest == source.cell.digest else None
        self.against_source: list[ComparedPoint] = []
        self._run_ids = {source.merged.run_id: "the source"}

    def samples(self, repeat: int, folder: Path) -> list[Sample]:
        """A repeat's sample of each point that is asked for."""
        found = read_run(folder, self.asked.digest)
        if isinstance(found, CellRun) and found.merged.run_id in self._run_ids:
            launch = self._run_ids[found.merged.run_id]
            found = Unusable("mismatch", f"run id: {found.merged.run_id} is the launch of {launch}")
        if isinstance(found, Unusable):
            return [Sample(repeat, found.outcome, (found.reason,)) for _ in self.asked.points.points()]
        self._run_ids[found.merged.run_id] = f"repeat {repeat}"
        values = milliseconds(found)
        if self.reference is None:
            self.reference = found
            self.against_source = compare(self.source, found)
            return [Sample(repeat, "comparable", (), values[number]) for number in sorted(values)]
        return [
            Sample(repeat, point.result, point.reasons, values.get(number))
            for number, point in enumerate(compare(self.reference, found), 1)
        ]


def judge_cell(entry: CellEntry, root: Path, policy: RepeatabilityPolicy) -> CellRepeatability:
    """One cell of the plan and its repeats, below `results/<campaign>/`."""
    source = read_run(root / "cells" / entry.name, entry.digest)
    if isinstance(source, CellRun) and source.cell.identity.contract == DYNAMO.name:
        source = Unusable("unestablished", "imported: who measured it can measure it again")
    if isinstance(source, Unusable):
        return CellRepeatability(
            name=entry.name,
            cell_digest=entry.digest,
            repeated_cell=None,
            outcome=source.outcome,
            reasons=(f"source {source.reason}",),
            counts={},
            points=(),
        )
    asked = source.cell if policy.max_points is None else bounded(source.cell, policy.max_points)
    repeats = Repeats(source, asked)
    numbers = range(1, policy.samples + 1)
    by_repeat = [
        repeats.samples(number, root / repeat_prefix(number, policy.max_points) / "cells" / asked.name)
        for number in numbers
    ]
    source_ms = milliseconds(source)
    points = []
    for index, (source_id, samples) in enumerate(
        zip(paired_ids(source.cell, asked), zip(*by_repeat, strict=True), strict=True)
    ):
        assert source_id is not None, "a bounded cell has a part of the source's points"
        against = repeats.against_source[index] if repeats.against_source else None
        points.append(judge_point(policy, source_id, source_ms[source_id], list(samples), against))
    return CellRepeatability(
        name=entry.name,
        cell_digest=entry.digest,
        repeated_cell=asked.name,
        outcome=worst(point.outcome for point in points),
        reasons=(),
        counts=counts(points),
        points=tuple(points),
    )


def counts(points: Iterable[PointRepeatability]) -> dict[str, int]:
    """How many points have which outcome."""
    return dict(Counter(point.outcome for point in points))


def assess(plan_file: Path, policy_file: Path) -> Repeatability:
    """The verdict on the repeats that lie beside a plan; what is missing is incomplete."""
    plan, policy = read_model(Plan, plan_file, "plan"), read_policy(policy_file)
    if plan.scope != "formal":
        raise Refusal("scope", "formal: what is published is what is repeated", plan.scope, plan_file)
    root = cells_folder(plan_file).parent
    cells = tuple(judge_cell(entry, root, policy.repeatability) for entry in plan.cells)
    return Repeatability(
        plan_sha256=sha256(read_bytes(plan_file, "plan")),
        policy_sha256=digest(policy),
        comparison_mode=policy.repeatability.comparison_mode,
        samples=policy.repeatability.samples,
        outcome=worst(cell.outcome for cell in cells),
        counts=counts(point for cell in cells for point in cell.points),
        cells=cells,
    )


def verdict_lines(verdict: Repeatability) -> Iterator[str]:
    """What a person reads: the campaign, its cells, and of each cell the first points that did not pass."""
    campaign = f"repeatability of plan {short(verdict.plan_sha256)}: {verdict.outcome}"
    yield f"{campaign} ({verdict.comparison_mode}, {verdict.samples} samples)"
    for cell in verdict.cells:
        counted = [f"{cell.counts[outcome]} {outcome}" for outcome in PRECEDENCE if outcome in cell.counts]
        told = ", ".join(counted) or "; ".join(cell.reasons)
        yield f"  {cell.name}: {cell.outcome} ({told})"
        failed = [point for point in cell.points if point.outcome != "passed"]
        for point in failed[:SHOWN_POINTS]:
            yield f"    benchmark_id={point.benchmark_id}: {point.outcome}: {point.reasons[0]}"
        if len(failed) > SHOWN_POINTS:
            yield f"    and {len(failed) - SHOWN_POINTS} more points"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", type=Path, required=True, help="plan.json; the repeats lie beside its folder")
    parser.add_argument("--policy", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    verdict = assess(arguments.plan, arguments.policy)
    write_model(arguments.output, verdict)
    print(*verdict_lines(verdict), sep="\n")


if __name__ == "__main__":
    run(main)
