"""Token stream, reduction, seeding order, grid."""

import hashlib
import random
import struct

import pytest

from producer.grid import decode_prefix, doublings, plan_points, smoke_points
from producer.reduction import adjacent_upper_median
from producer.seeding import distinct_prefix_tokens, execution_order
from producer.tokens import TokenStream, ids_sha256
from schemas.points import DecodePoint, PrefillPoint
from schemas.profile import Profile, ProfileGroup
from schemas.request import DecodeGrid, Grid, PrefillGrid


def test_the_kept_value_is_the_fifth_smallest_of_measurements_2_to_10():
    walls = [0.1, 9.0, 1.0, 8.0, 2.0, 7.0, 3.0, 6.0, 4.0, 5.0]
    assert adjacent_upper_median(walls) == (5.0, [1, 2, 3, 4, 5, 6, 7, 8, 9])


def test_an_even_number_of_samples_takes_the_upper_one():
    assert adjacent_upper_median([0.0, 1.0, 2.0, 3.0, 4.0])[0] == 3.0


def test_tokens_can_be_derived_from_their_specification_by_hand():
    stream = TokenStream("53", vocab_size=1000)
    source = random.Random("passgrid_tokens_v1:53:dp0:prefix:slot2")
    by_hand = [3 + int(source.random() * 997) for _ in range(7)]
    assert list(stream.prefix(2, 7)) == by_hand
    assert list(stream.prefix(2, 4)) == by_hand[:4]


def test_a_prompt_digest_is_over_little_endian_uint32():
    ids = TokenStream("53", 1000).unique("x", 5)
    assert ids_sha256(ids) == hashlib.sha256(struct.pack("<5I", *ids)).hexdigest()


def test_repetitions_share_their_prefix_and_nothing_else():
    stream = TokenStream("53", 100_000)
    first, second = stream.prompt("k", 0, 1, 64, 128), stream.prompt("k", 1, 1, 64, 128)
    assert first[:64] == second[:64]
    assert sum(a == b for a, b in zip(first[64:], second[64:], strict=True)) < 3


def test_points_run_by_prefix_and_keep_their_frozen_order_inside():
    points = tuple(
        PrefillPoint(batch_size=b, total_prefill_tokens=b * 8, total_kv_read_tokens=b * p)
        for b, p in ((1, 256), (2, 0), (4, 128), (1, 0), (2, 256))
    )
    assert execution_order(points, 128) == [1, 3, 2, 0, 4]
    # Slots 0 and 1 reach 256, slots 2 and 3 reach 128.
    assert distinct_prefix_tokens(points, 128) == 2 * 256 + 2 * 128


@pytest.mark.parametrize(("context", "expected"), [(2, 0), (129, 0), (130, 128), (257, 128), (258, 256)])
def test_a_decode_prefix_leaves_one_prompt_token_to_compute(context, expected):
    assert decode_prefix(context, 128) == expected


def test_doublings_end_at_the_limit():
    assert doublings(16, 100) == (16, 32, 64, 100)
    assert doublings(16, 16) == (16,)


def profile(free_blocks: int, **change) -> Profile:
    group = ProfileGroup(
        name="g",
        kind="attention",
        spec_type="FullAttentionSpec",
        num_layers=1,
        block_size_tokens=128,
        page_size_bytes=1,
    )
    fields = {
        "architecture": "A",
        "model_config_sha256": "0",
        "model_revision": "r",
        "runtime_backend_version": "0.32.0",
        "probe_digest": "0",
        "probe_records_sha256": {},
        "groups": (group,),
        "free_blocks": free_blocks,
        "kv_cache_bytes": free_blocks,
        "block_size": 128,
        "hash_block_size": 128,
        "cache_hit_alignment_tokens": 128,
        "enable_prefix_caching": True,
        "mamba_cache_mode": "none",
        "max_num_tokens": 1024,
        "max_batch_size": 8,
        "max_model_len": 2048,
        "weights_bytes": 1,
        "device_name": "cpu",
    }
    return Profile(**fields | change)


def test_each_rule_drops_what_it_should():
    grid = Grid(
        prefill=PrefillGrid(new_tokens=(128, 512), batch_sizes=(1, 4), prefix_blocks=(0, 15)),
        decode=DecodeGrid(contexts=(130, 1024), batch_sizes=(1, 8)),
    )
    planned = plan_points(grid, profile(40))
    found = [(p.batch_size, p.new_tokens, p.prefix_tokens) for p in planned.manifest.prefill]
    # 1 x 128 after 1920: 16 blocks, one token short of the context. 4 x 512 is over the budget of 1024.
    assert found == [(1, 128, 0), (4, 128, 0), (1, 512, 0)]
    assert [(p.batch_size, p.context) for p in planned.manifest.decode] == [(1, 130), (8, 130), (1, 1024)]
    # Context: (1 and 4) x 128 after 1920, 1 x 512 after 1920. Capacity: 8 requests of ceil(1025 / 128) = 9 blocks.
    assert planned.dropped == {"capacity": 1, "context": 3, "token_budget": 2}
    assert planned.peak_blocks == 16


def test_a_recurrent_launch_drops_what_would_run_in_two_steps():
    state = ProfileGroup(
        name="s", kind="state", spec_type="MambaSpec", num_layers=1, block_size_tokens=128, page_size_bytes=1,
        blocks_per_request=1,
    )  # fmt: skip
    hybrid = profile(40, groups=(state,), mamba_cache_mode="align")
    grid = Grid(prefill=PrefillGrid(new_tokens=(128, 129), batch_sizes=(1,), prefix_blocks=(0, 1)))
    planned = plan_points(grid, hybrid)
    assert [p.new_tokens for p in planned.manifest.prefill] == [128, 128]
    assert planned.dropped["align"] == 2


def test_smoke_is_a_subset_that_touches_every_path():
    grid = Grid(prefill=PrefillGrid(batch_sizes=(1, 2), new_tokens=(16, 32, 64)))
    manifest = plan_points(grid, profile(1000)).manifest
    smoke = smoke_points(manifest)
    assert set(smoke.prefill) < set(manifest.prefill)
    assert {p.total_kv_read_tokens > 0 for p in smoke.prefill} == {True, False}
    assert smoke.decode == (manifest.decode[0], manifest.decode[-1])


def test_context_of_a_decode_point():
    assert DecodePoint(batch_size=4, total_kv_read_tokens=4 * 513).context == 513
