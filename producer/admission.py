"""Admission: may this point run on this deployment, in one step, exactly as planned? One rule, every caller."""

from collections import Counter
from typing import NamedTuple

from producer.align import AlignRule, runs_in_one_step
from producer.capacity import blocks_of_requests, blocks_to_seed, estimated_blocks_of_request, retained_blocks
from producer.partition import RequestShape, request_shapes
from schemas.points import DecodePoint, Point, PointManifest, PrefillPoint
from schemas.profile import Profile

DROP_RULES = ("imbalanced", "batch", "split", "token_budget", "context", "prefix", "align", "capacity", "seeding")
"""Why a point is dropped, in the order in which the rules are asked; the first that applies is counted.

`seeding` alone is cautious: the pool may be too small for the prefixes of all slots to survive each other's seeding.
"""


class Admitted(NamedTuple):
    """What is kept of a candidate list, what each rule dropped, and the most blocks that a kept point needs.

    `estimated_blocks` is the original planner's figure, which leaves out the state block that a prefix hit keeps
    resident; `peak_blocks` is what the engine holds.
    """

    manifest: PointManifest
    dropped: dict[str, int]
    peak_blocks: int
    estimated_blocks: int


def align_rule_of(profile: Profile) -> AlignRule | None:
    """The align rule of a profile's launch, or None when no group caches state at block boundaries.

    The checkpoint counts only when every recurrent group holds one (vLLM 0.33.0, v1/core/sched/scheduler.py:445-449).
    """
    recurrent = [group for group in profile.groups if group.spec_type == "MambaSpec"]
    if not recurrent or profile.mamba_cache_mode != "align":
        return None
    checkpointed = all(group.prefill_checkpoint_blocks for group in recurrent)
    alignment = (recurrent[0].prefill_checkpoint_alignment or 1) if checkpointed else None
    return AlignRule(profile.block_size, profile.hash_block_size, alignment)


def final_tokens(point: Point, shape: RequestShape) -> int:
    """Tokens of one request that have a slot in the cache when the measured step ends."""
    return shape.prompt + 2 if isinstance(point, DecodePoint) else shape.prompt


def blocks_of_point(profile: Profile, point: Point, shapes: tuple[RequestShape, ...]) -> int:
    """Blocks of the pool that the requests of a point hold together at their peak."""
    more = (1, 2) if isinstance(point, DecodePoint) else ()
    requests = [[shape.prefix, shape.prompt, *(shape.prompt + step for step in more)] for shape in shapes]
    return blocks_of_requests(profile.groups, requests)


def drop_rule(profile: Profile, point: Point) -> str | None:
    """The rule of `DROP_RULES` that forbids `point`, or None when it runs as planned."""
    if not point.is_balanced:
        return "imbalanced"
    if point.batch_size > profile.max_batch_size:
        return "batch"
    hit = profile.cache_hit_alignment_tokens
    try:
        shapes = request_shapes(point, hit)
    except ValueError:
        return "split"
    if any(shape.prompt < 1 for shape in shapes):  # a decode step after nothing: a context of one token has no prompt
        return "split"
    if sum(shape.new_tokens for shape in shapes) > profile.max_num_tokens:
        return "token_budget"
    # One token is always generated after the step; a decode repetition generates two before it ends.
    if any(final_tokens(point, shape) + 1 > profile.max_model_len for shape in shapes):
        return "context"
    if any(shape.prefix % hit or (shape.prefix and not profile.enable_prefix_caching) for shape in shapes):
        return "prefix"
    rule = align_rule_of(profile)
    if not all(runs_in_one_step(rule, shape.prefix, shape.prompt, profile.max_num_tokens) for shape in shapes):
        return "align"
    blocks = blocks_of_point(profile, point, shapes)
    if blocks > profile.free_blocks:
        return "capacity"
    # A prefix that no request holds can be evicted: beside what runs, the other slots' prefixes must find room.
    prefixes = [shape.prefix for shape in shapes]
    retained = [retained_blocks(profile.groups, prefix) for prefix in prefixes]
    to_seed = blocks_to_seed(profile.groups, prefixes, profile.max_num_tokens)
    if max(to_seed, blocks + sum(retained) - max(retained)) > profile.free_blocks:
        return "seeding"
    return None


def admit(profile: Profile, candidates: PointManifest) -> Admitted:
    """The points of `candidates` that run as planned, in their order."""
    dropped: Counter[str] = Counter()
    kept: list[Point] = []
    peak = estimated = 0
    for point in candidates.points():
        rule = drop_rule(profile, point)
        if rule is not None:
            dropped[rule] += 1
            continue
        kept.append(point)
        shapes = request_shapes(point, profile.cache_hit_alignment_tokens)
        peak = max(peak, blocks_of_point(profile, point, shapes))
        estimate = sum(
            estimated_blocks_of_request(profile.groups, final_tokens(point, shape), profile.block_size)
            for shape in shapes
        )
        estimated = max(estimated, estimate)
    manifest = PointManifest(
        schema_version=candidates.schema_version,
        prefill=tuple(point for point in kept if isinstance(point, PrefillPoint)),
        decode=tuple(point for point in kept if isinstance(point, DecodePoint)),
    )
    return Admitted(manifest, {rule: dropped[rule] for rule in DROP_RULES if dropped[rule]}, peak, estimated)
