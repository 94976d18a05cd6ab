"""How the totals of a point are split over its requests (native artifact, 1.1), and what each request then is."""

from typing import NamedTuple

from schemas.points import DecodePoint, Partition, Point, PrefillPoint


class RequestShape(NamedTuple):
    """One request of a repetition, in tokens: the prefix it finds cached, and its prompt.

    A decode prompt leaves the last token of the context to be generated: the second decode step reads prompt + 1.
    """

    prefix: int
    prompt: int

    @property
    def new_tokens(self) -> int:
        return self.prompt - self.prefix


def balanced(total: int, count: int, unit: int, min_units: int) -> list[int]:
    """`total` over `count` items in whole units, at least `min_units` each; the first items are the longer ones.

    Raises:
        ValueError: the total is no multiple of the unit, or too small.
    """
    units, rest = divmod(total, unit)
    if rest or units < count * min_units:
        raise ValueError(f"{total} tokens over {count} requests of at least {min_units} units of {unit}")
    each, longer = divmod(units - count * min_units, count)
    return [(min_units + each + (1 if index < longer else 0)) * unit for index in range(count)]


def imbalanced(total: int, count: int, unit: int, min_units: int, partition: Partition) -> list[int]:
    """`total` with the first `high_count` requests `fraction` above the mean, the rest balanced.

    Raises:
        ValueError: the other requests would fall below their minimum.
    """
    units, rest = divmod(total, unit)
    if rest:
        raise ValueError(f"{total} tokens in units of {unit}")
    high = max(round(units / count * (1 + partition.fraction)), min_units)
    low_count = count - partition.high_count
    return [high * unit] * partition.high_count + balanced(
        (units - high * partition.high_count) * unit, low_count, unit, min_units
    )


def request_shapes(point: Point, hit_alignment: int) -> tuple[RequestShape, ...]:
    """The requests of a point, one a slot. Cached tokens come in units of `hit_alignment`, where hits land.

    Raises:
        ValueError: the totals cannot be split so.
    """
    if isinstance(point, DecodePoint):
        contexts = balanced(point.total_kv_read_tokens, point.batch_size, 1, 1)
        return tuple(RequestShape(decode_prefix(context, hit_alignment), context - 1) for context in contexts)
    return tuple(RequestShape(kv, kv + new) for new, kv in _rows(point, hit_alignment))


def _rows(point: PrefillPoint, hit_alignment: int) -> list[tuple[int, int]]:
    if point.rows is not None:
        return list(point.rows)
    count, partition = point.batch_size, point.partition
    if partition is not None and partition.axis in ("new", "both"):
        new = imbalanced(point.total_prefill_tokens, count, 1, 1, partition)
    else:
        new = balanced(point.total_prefill_tokens, count, 1, 1)
    if not point.total_kv_read_tokens:
        kv = [0] * count
    elif partition is not None and partition.axis in ("kv", "both"):
        kv = imbalanced(point.total_kv_read_tokens, count, hit_alignment, 1, partition)
    else:
        kv = balanced(point.total_kv_read_tokens, count, hit_alignment, 1)
    return list(zip(new, kv, strict=True))


def decode_prefix(context: int, hit_alignment: int) -> int:
    """Tokens of a (context - 1)-token prompt that a seeded prefix can hold: the engine always computes one."""
    return max(0, context - 2) // hit_alignment * hit_alignment
