"""Point grids of ordinary models: axes, and the rules that drop a point which could not run as planned."""

from collections import Counter
from typing import NamedTuple

from producer.align import AlignRule, runs_in_one_step
from producer.capacity import blocks_of_request
from schemas.points import DecodePoint, PointManifest, PrefillPoint
from schemas.profile import Profile
from schemas.request import Grid

ORIGIN = "passgrid_axes_v1"


class PlannedPoints(NamedTuple):
    """A manifest, how many candidates each rule dropped, and the most blocks that a kept point holds."""

    manifest: PointManifest
    dropped: dict[str, int]
    peak_blocks: int


def doublings(first: int, limit: int) -> tuple[int, ...]:
    """`first`, its doublings below `limit`, and `limit`."""
    values = []
    while first < limit:
        values.append(first)
        first *= 2
    return (*values, limit)


def align_rule_of(profile: Profile) -> AlignRule | None:
    """The align rule of a profile's launch, or None when no group caches state at block boundaries."""
    recurrent = [group for group in profile.groups if group.spec_type == "MambaSpec"]
    if not recurrent or profile.mamba_cache_mode != "align":
        return None
    checkpointed = all(group.prefill_checkpoint_blocks for group in recurrent)
    alignment = (recurrent[0].prefill_checkpoint_alignment or 1) if checkpointed else None
    return AlignRule(profile.block_size, profile.hash_block_size, alignment)


def decode_prefix(context: int, hit_alignment: int) -> int:
    """Tokens of a (context - 1)-token prompt that a seeded prefix can hold: the engine always computes one."""
    return (context - 2) // hit_alignment * hit_alignment


def plan_points(grid: Grid, profile: Profile) -> PlannedPoints:
    """Every point of the axes that one scheduler step holds, in the order new tokens (or context), batch, prefix."""
    dropped: Counter[str] = Counter()
    rule = align_rule_of(profile)
    hit = profile.cache_hit_alignment_tokens
    peak = 0

    def fits(batch_size: int, prefix: int, total: int) -> bool:
        nonlocal peak
        blocks = batch_size * blocks_of_request(profile.groups, prefix, total)
        if blocks > profile.free_blocks:
            dropped["capacity"] += 1
            return False
        peak = max(peak, blocks)
        return True

    prefill = []
    batches = grid.prefill.batch_sizes or doublings(1, profile.max_batch_size)
    top = max(1, (profile.max_model_len - 2) // hit)
    prefixes = grid.prefill.prefix_blocks or (0, *doublings(1, top))
    for new in grid.prefill.new_tokens or doublings(16, profile.max_num_tokens):
        for batch_size in batches:
            for blocks in prefixes:
                prefix = blocks * hit
                if batch_size * new > profile.max_num_tokens:
                    dropped["token_budget"] += 1
                elif prefix + new + 1 > profile.max_model_len:
                    dropped["context"] += 1
                elif not runs_in_one_step(rule, prefix, prefix + new, profile.max_num_tokens):
                    dropped["align"] += 1
                elif fits(batch_size, prefix, prefix + new):
                    prefill.append(
                        PrefillPoint(
                            batch_size=batch_size,
                            total_prefill_tokens=batch_size * new,
                            total_kv_read_tokens=batch_size * prefix,
                        )
                    )

    decode = []
    batches = grid.decode.batch_sizes or doublings(1, profile.max_batch_size)
    for context in grid.decode.contexts or doublings(16, profile.max_model_len - 2):
        prefix = decode_prefix(context, hit)
        for batch_size in batches:
            if batch_size * (context - 1 - prefix) > profile.max_num_tokens:
                dropped["token_budget"] += 1
            elif not runs_in_one_step(rule, prefix, context - 1, profile.max_num_tokens):
                dropped["align"] += 1
            elif fits(batch_size, prefix, context + 1):
                decode.append(DecodePoint(batch_size=batch_size, total_kv_read_tokens=batch_size * context))
    return PlannedPoints(
        PointManifest(prefill=tuple(prefill), decode=tuple(decode)), dict(sorted(dropped.items())), peak
    )


def smoke_points(manifest: PointManifest) -> PointManifest:
    """A few points of a manifest that touch every path of a cell: no prefix, a prefix, the extremes."""
    prefill = manifest.prefill
    seeded = [point for point in prefill if point.total_kv_read_tokens]
    chosen = {*prefill[:1], *seeded[:1], *prefill[-1:]}
    ends = {*manifest.decode[:1], *manifest.decode[-1:]}
    return PointManifest(
        prefill=tuple(point for point in prefill if point in chosen),
        decode=tuple(point for point in manifest.decode if point in ends),
    )
