"""Generational seeding: points in an order that extends each slot's cached prefix instead of rebuilding it."""

from producer.grid import decode_prefix
from schemas.points import DecodePoint, Point, PrefillPoint


def prefix_of(point: Point, hit_alignment: int) -> int:
    """Tokens of one request that a seeded prefix holds when `point` is measured."""
    if isinstance(point, PrefillPoint):
        return point.prefix_tokens
    return decode_prefix(point.context, hit_alignment)


def execution_order(points: tuple[Point, ...], hit_alignment: int) -> list[int]:
    """Indices into `points` in the order of measuring: by prefix, then as frozen.

    Each level of a slot's prefix then extends the one before it, so every distinct prefix token is computed once
    as long as the pool holds the prefixes.
    """
    return sorted(range(len(points)), key=lambda index: (prefix_of(points[index], hit_alignment), index))


def prompt_length(point: Point) -> int:
    """Prompt tokens of one request of a repetition: a decode prompt leaves the last context token to be generated."""
    if isinstance(point, DecodePoint):
        return point.context - 1
    return point.prefix_tokens + point.new_tokens


def distinct_prefix_tokens(points: tuple[Point, ...], hit_alignment: int) -> int:
    """Prefix tokens that must be computed at least once: each slot's longest prefix."""
    longest: dict[int, int] = {}
    for point in points:
        for slot in range(point.batch_size):
            longest[slot] = max(longest.get(slot, 0), prefix_of(point, hit_alignment))
    return sum(longest.values())
