"""Generational seeding: points in an order that extends each slot's cached prefix instead of rebuilding it."""

from producer.partition import request_shapes
from schemas.points import Point


def longest_prefix(point: Point, hit_alignment: int) -> int:
    """Tokens of the longest seeded prefix among the requests of `point`."""
    return max(shape.prefix for shape in request_shapes(point, hit_alignment))


def execution_order(points: tuple[Point, ...], hit_alignment: int) -> list[int]:
    """Indices into `points` in the order of measuring: by prefix, then as frozen.

    Each level of a slot's prefix then extends the one before it, so every distinct prefix token is computed once
    as long as the pool holds the prefixes.
    """
    return sorted(range(len(points)), key=lambda index: (longest_prefix(points[index], hit_alignment), index))


def distinct_prefix_tokens(points: tuple[Point, ...], hit_alignment: int) -> int:
    """Prefix tokens that must be computed at least once: each slot's longest prefix."""
    longest: dict[int, int] = {}
    for point in points:
        for slot, shape in enumerate(request_shapes(point, hit_alignment)):
            longest[slot] = max(longest.get(slot, 0), shape.prefix)
    return sum(longest.values())
