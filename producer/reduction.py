"""Which value of a point's samples is kept."""

from collections.abc import Sequence


def adjacent_upper_median(walls: Sequence[float]) -> tuple[float, list[int]]:
    """The upper median of all samples but the first, and the indices that took part.

    Of ten samples: the fifth smallest of samples 1 to 9. Dynamo's merge accepts no other median of several
    samples (native artifact, reductions).

    Raises:
        ValueError: fewer than two samples.
    """
    if len(walls) < 2:
        raise ValueError("adjacent_upper_median needs at least two samples")
    indices = list(range(1, len(walls)))
    ordered = sorted(walls[index] for index in indices)
    return ordered[len(ordered) // 2], indices
