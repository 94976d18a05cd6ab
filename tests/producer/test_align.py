"""The align rule against written-out runs of vLLM 0.33.0's scheduler, and against the installed engine's own code."""

import random
from types import SimpleNamespace

import pytest

from producer.align import AlignRule, chunk_end, runs_in_one_step

BLOCK, BUDGET = 2176, 8192
CHECKPOINTED, PLAIN = AlignRule(BLOCK, BLOCK, 16), AlignRule(BLOCK, BLOCK)


def steps(rule: AlignRule, start: int, prompt_end: int, budget: int = BUDGET) -> list[tuple[int, int]]:
    found = []
    while start < prompt_end:
        end = chunk_end(rule, start, min(prompt_end, start + budget), prompt_end, budget)
        assert end > start
        found.append((start, end))
        start = end
    return found


@pytest.mark.parametrize(
    ("rule", "start", "new", "expected"),
    [
        (CHECKPOINTED, 2176, 4352, [(2176, 6528)]),
        (PLAIN, 2176, 4352, [(2176, 4352), (4352, 6528)]),
        (CHECKPOINTED, 0, 8192, [(0, 8192)]),
        (PLAIN, 0, 8192, [(0, 6528), (6528, 8192)]),
        (CHECKPOINTED, 2176, 2176, [(2176, 4352)]),
        (PLAIN, 2176, 2176, [(2176, 4352)]),
        (CHECKPOINTED, 2176, 2180, [(2176, 4356)]),
        (PLAIN, 2176, 2180, [(2176, 4352), (4352, 4356)]),
    ],
)
def test_chunks_that_the_engine_ran(rule, start, new, expected):
    assert steps(rule, start, start + new) == expected


def test_a_seed_of_whole_blocks_loses_its_last_block():
    # vLLM 0.32.0 on the CPU: 1,300 new after 1,024, block 256, ran as 1,280 + 20.
    assert steps(AlignRule(256, 256), 1024, 2324, 2048) == [(1024, 2304), (2304, 2324)]


def test_the_checkpoint_alignment_bites_where_the_block_is_no_multiple_of_it():
    rule = AlignRule(2180, 2180, 16)
    assert not runs_in_one_step(rule, 2180, 2180 + 4360, 8192)
    assert runs_in_one_step(AlignRule(2180, 2180, 20), 2180, 2180 + 4360, 8192)


def test_without_recurrent_groups_only_the_budget_counts():
    assert runs_in_one_step(None, 100, 100 + 8192, 8192)
    assert not runs_in_one_step(None, 100, 100 + 8193, 8192)


@pytest.mark.parametrize("checkpoint", [None, 16, 64])
def test_it_is_the_installed_engines_rule(checkpoint):
    scheduler = pytest.importorskip("vllm.v1.core.sched.scheduler").Scheduler
    choose = random.Random(7)
    for _ in range(20_000):
        block = choose.choice((16, 128, 256, 2176, 2180))
        budget = choose.choice((64, 2048, 8192))
        prompt_end = choose.randrange(2, 6 * block)
        start = choose.choice((choose.randrange(prompt_end), choose.randrange(prompt_end) // block * block))
        wanted = choose.randrange(1, min(budget, prompt_end - start) + 1)
        engine = SimpleNamespace(
            cache_config=SimpleNamespace(block_size=block),
            scheduler_config=SimpleNamespace(long_prefill_token_threshold=0),
            block_size=block,
            hash_block_size=block,
            max_num_scheduled_tokens=budget,
            mamba_partial_cache_hit=False,
            use_eagle_block_drop=False,
            mamba_shared_prefix_checkpoint=False,
            mamba_has_prefill_checkpoint_blocks=checkpoint is not None,
            mamba_prefill_checkpoint_alignment=checkpoint,
        )
        request = SimpleNamespace(
            num_computed_tokens=start,
            num_prompt_tokens=prompt_end,
            num_tokens=prompt_end,
            shared_prefix_boundary=0,
        )
        ran = scheduler._mamba_block_aligned_split(engine, request, wanted)
        rule = AlignRule(block, block, checkpoint)
        assert chunk_end(rule, start, start + wanted, prompt_end, budget) == start + ran
