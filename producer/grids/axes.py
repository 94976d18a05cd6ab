"""The grid of ordinary models: axes that the campaign gives, or the engine's own kinds of step up to its limits."""

from collections.abc import Sequence
from typing import TypeVar

from schemas.points import DecodePoint, PointManifest, PrefillPoint
from schemas.profile import Profile
from schemas.request import Grid

T = TypeVar("T")

ORIGIN = "passgrid_axes_v1"
FIRST_NEW_TOKENS = 16
"""Shortest prefill of an axis of doublings, and shortest decode context: below, a step is all overhead."""


def doublings(first: int, limit: int) -> tuple[int, ...]:
    """`first`, its doublings below `limit`, and `limit`."""
    values = []
    while first < limit:
        values.append(first)
        first *= 2
    return (*values, limit)


def sampled(values: Sequence[T], limit: int) -> tuple[T, ...]:
    """At most `limit` of `values`, evenly, with both ends kept."""
    if len(values) <= limit:
        return tuple(values)
    last = len(values) - 1
    return tuple(values[round(index * last / (limit - 1))] for index in range(limit))


def token_axis(captures: tuple[int, ...], limit: int) -> tuple[int, ...]:
    """New tokens of a step: each captured graph size and one past it, then doublings to the limit."""
    inside = [size for size in captures if size <= limit]
    if not inside:
        return doublings(FIRST_NEW_TOKENS, limit)
    past = {size + 1 for size in inside if size < limit}
    return tuple(sorted({*inside, *past, *doublings(inside[-1], limit)}))


def batch_axis(captures: tuple[int, ...], limit: int) -> tuple[int, ...]:
    """Requests of a decode step: captured sizes and one past them, doublings, and the limit."""
    inside = {size for size in captures if size <= limit}
    past = {size + 1 for size in inside if size < limit}
    return tuple(sorted({*inside, *past, *doublings(1, limit)}))


def candidates(grid: Grid, profile: Profile) -> PointManifest:
    """Every combination of the axes, in the order new tokens (or context), batch, prefix."""
    hit, samples = profile.cache_hit_alignment_tokens, grid.samples
    captures = profile.cudagraph_capture_sizes
    prefill = []
    new_axis = grid.prefill.new_tokens or sampled(
        token_axis(captures, profile.max_num_tokens), samples.prefill_new_tokens
    )
    for new in new_axis:
        top = (profile.max_model_len - 1 - new) // hit
        prefixes = grid.prefill.prefix_blocks or sampled(
            (0, *(doublings(1, top) if top > 0 else ())), samples.prefill_kv_read_tokens
        )
        batches = grid.prefill.batch_sizes or doublings(1, profile.max_batch_size)
        with_prefix = grid.prefill.batch_sizes or batches[: samples.prefix_batch_sizes]
        for batch_size in batches:
            for blocks in prefixes:
                if blocks and batch_size not in with_prefix:
                    continue
                prefill.append(
                    PrefillPoint(
                        batch_size=batch_size,
                        total_prefill_tokens=batch_size * new,
                        total_kv_read_tokens=batch_size * blocks * hit,
                    )
                )
    contexts = grid.decode.contexts or sampled(
        doublings(FIRST_NEW_TOKENS, profile.max_model_len - 2), samples.decode_kv_read_tokens
    )
    batches = grid.decode.batch_sizes or sampled(
        batch_axis(captures, profile.max_batch_size), samples.decode_batch_sizes
    )
    decode = [
        DecodePoint(batch_size=batch_size, total_kv_read_tokens=batch_size * context)
        for context in contexts
        for batch_size in batches
    ]
    return PointManifest(prefill=tuple(prefill), decode=tuple(decode))


def smoke(manifest: PointManifest) -> PointManifest:
    """A few points that touch every path of a cell: no prefix, a prefix, the extremes."""
    prefill = manifest.prefill
    seeded = [point for point in prefill if point.total_kv_read_tokens]
    chosen = {*prefill[:1], *seeded[:1], *prefill[-1:]}
    ends = {*manifest.decode[:1], *manifest.decode[-1:]}
    return PointManifest(
        schema_version=manifest.schema_version,
        prefill=tuple(point for point in prefill if point in chosen),
        decode=tuple(point for point in manifest.decode if point in ends),
    )
