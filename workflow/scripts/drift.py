"""Points whose samples drift: a device that throttles makes the order of samples part of the result."""

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

from msgspec import UNSET

from schemas.merged import MergedArtifact

AGREEING_PAIRS = 0.9
"""Part of all pairs of samples that must rise (or fall) together. Nine samples in random order do so, one way or the
other, in one point of 1,170 (33 of 36 pairs)."""

RELATIVE_CHANGE = 0.05
"""From the first to the last sample, against the middle one. Less does not matter to who reads the table."""


class Drift(NamedTuple):
    """`first` and `last` are the samples' times in the order of measuring; `agreeing` of `pairs` move as they do."""

    first: float
    last: float
    agreeing: int
    pairs: int


def drift(walls: Sequence[float]) -> Drift | None:
    """The drift of samples in the order of measuring, or None where there is none worth a word."""
    pairs = list(combinations(walls, 2))
    rising, falling = sum(a < b for a, b in pairs), sum(a > b for a, b in pairs)
    first, last, middle = walls[0], walls[-1], sorted(walls)[len(walls) // 2]
    agreeing = rising if last > first else falling
    if agreeing < AGREEING_PAIRS * len(pairs) or abs(last - first) < RELATIVE_CHANGE * middle:
        return None
    return Drift(first, last, agreeing, len(pairs))


def drifting_points(merged: MergedArtifact) -> Iterator[str]:
    """A line for each drifting point of a cell. The first sample is left out, as it is of the published value."""
    for group in merged.iteration_groups:
        for result in group.rank_results:
            measurement = result.fpms[0].benchmark_measurement
            if measurement is UNSET or len(measurement.raw_fpms) < 3:
                continue
            found = drift([raw.wall_time for raw in measurement.raw_fpms[1:]])
            if found is not None:
                rank = f" rank {result.dp_rank}" if len(group.rank_results) > 1 else ""
                yield (
                    f"benchmark_id={group.benchmark_id}{rank}: samples drift from {found.first * 1000:.3f} ms to "
                    f"{found.last * 1000:.3f} ms ({found.agreeing} of {found.pairs} pairs)"
                )
