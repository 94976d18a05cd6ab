"""The verdict on a campaign's repeats."""

from typing import Literal

from schemas.canonical import Strict
from schemas.policy import ComparisonMode

Outcome = Literal["mismatch", "unstable", "unestablished", "incomplete", "passed"]

PRECEDENCE: tuple[Outcome, ...] = ("mismatch", "unstable", "unestablished", "incomplete", "passed")
"""The first outcome that is found is the whole's: of a point's samples, a cell's points, a campaign's cells. What no
further launch could mend stands first."""


class PointRepeatability(Strict):
    """One point. `benchmark_id` is its place in the source's list, from 1; times in milliseconds.

    `samples_ms` are the comparable repeats' values, by number of the repeat; `stdev_ms` is over n - 1, absent for
    fewer than two, and `cv` is its part of the mean. `source_relative_difference` is (mean - source) / source.
    """

    benchmark_id: int
    outcome: Outcome
    reasons: tuple[str, ...]
    source_ms: float
    samples_ms: dict[str, float]
    comparable_samples: int
    mean_ms: float | None
    stdev_ms: float | None
    cv: float | None
    source_relative_difference: float | None


class CellRepeatability(Strict):
    """One cell; `repeated_cell` is what was measured again: the cell itself, or one of fewer points."""

    name: str
    cell_digest: str
    repeated_cell: str | None
    outcome: Outcome
    reasons: tuple[str, ...]
    counts: dict[str, int]
    points: tuple[PointRepeatability, ...]


class Repeatability(Strict):
    """`plan-<digest>/repeatability.json`: do the values of a plan come out again?"""

    schema_version: Literal[1] = 1
    plan_sha256: str
    policy_sha256: str
    comparison_mode: ComparisonMode
    samples: int
    outcome: Outcome
    counts: dict[str, int]
    cells: tuple[CellRepeatability, ...]
