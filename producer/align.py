"""The align rule: where vLLM stops a prefill chunk when recurrent state is cached at block boundaries.

vLLM 0.33.0, v1/core/sched/scheduler.py `_mamba_block_aligned_split` and v1/kv_cache_interface.py:1169-1210;
0.32.0 has the same rule. It is stated for launches without EAGLE block drop, hash lookahead, partial hash hits,
and with one block for scheduler and recurrent groups; the producer refuses the others.
"""

from typing import NamedTuple


class AlignRule(NamedTuple):
    """Block of the recurrent groups and hash block, in tokens; `checkpoint_alignment` is None without a
    prefill checkpoint block in every recurrent group."""

    block_size: int
    hash_block_size: int
    checkpoint_alignment: int | None = None


def chunk_end(rule: AlignRule, start: int, end: int, prompt_end: int, budget: int) -> int:
    """Where a chunk that wants tokens [start, end) of a prompt of `prompt_end` tokens really ends.

    `budget` is the largest chunk of a step, in tokens. A chunk without a shared-prefix junction: the producer
    seeds whole levels, so attention groups never hold a longer prefix than the recurrent groups. A chunk that ends
    where it starts runs nothing in this step.
    """
    block = rule.block_size
    if start >= prompt_end:
        return end
    last = (prompt_end - 1) // block * block
    if (
        rule.checkpoint_alignment is not None
        and end >= prompt_end
        and start % rule.hash_block_size == 0
        and end > start + block
        and (last - start) % rule.checkpoint_alignment == 0
    ):
        last = 0
    if end < prompt_end:
        aligned = end // block * block
        if aligned > start or block <= budget:
            end = aligned
    stops = [last]
    if start % block:
        stops.append((start // block + 1) * block)
    return max(start, min((stop for stop in stops if start < stop < end), default=end))


def runs_in_one_step(rule: AlignRule | None, start: int, prompt_end: int, budget: int) -> bool:
    """Whether a prompt with `start` cached tokens computes the rest in one step of at most `budget` tokens."""
    if prompt_end - start > budget:
        return False
    return rule is None or chunk_end(rule, start, prompt_end, prompt_end, budget) == prompt_end
