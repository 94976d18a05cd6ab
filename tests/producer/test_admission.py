"""Admission: each rule, exact capacity, and the pure simulation of every admitted point."""

import pytest

from producer import grids
from producer.admission import admit, align_rule_of, drop_rule
from producer.grids import axes, glm53flash
from producer.partition import RequestShape, balanced, request_shapes
from producer.planning import check_steps
from producer.simulation import simulate
from profiles import glm, group, profile
from schemas.errors import Refusal
from schemas.points import DecodePoint, Partition, PointManifest, PrefillPoint
from schemas.request import DecodeGrid, Grid, PrefillGrid

STATE = group("MambaSpec", 128)
FULL = group("FullAttentionSpec", 128)


def prefill(batch: int, new: int, prefix: int, **more) -> PrefillPoint:
    return PrefillPoint(batch_size=batch, total_prefill_tokens=batch * new, total_kv_read_tokens=batch * prefix, **more)


def decode(batch: int, context: int) -> DecodePoint:
    return DecodePoint(batch_size=batch, total_kv_read_tokens=batch * context)


@pytest.mark.parametrize(
    ("point", "on", "rule"),
    [
        (prefill(1, 128, 1792), profile(), None),
        (prefill(1, 128, 1920), profile(), "context"),
        (prefill(1, 127, 1920), profile(), None),
        (prefill(9, 16, 0), profile(), "batch"),
        (prefill(4, 512, 0), profile(), "token_budget"),
        (prefill(2, 64, 100), profile(), "split"),
        (prefill(1, 64, 128), profile(cache_hit_alignment_tokens=256), "split"),
        (prefill(1, 64, 256), profile(cache_hit_alignment_tokens=256), None),
        (prefill(1, 64, 128), profile(enable_prefix_caching=False), "prefix"),
        (prefill(1, 128, 128), profile(STATE), None),
        (prefill(1, 129, 128), profile(STATE), "align"),
        (prefill(2, 512, 0), profile(free_blocks=8), None),
        (prefill(2, 512, 0), profile(free_blocks=7), "capacity"),
        (decode(1, 2046), profile(), None),
        (decode(1, 2047), profile(), "context"),
        (decode(8, 129), profile(), None),
        # Eight tails of 128 tokens fill the budget of 1,024; prompts of 257 leave a tail of one.
        (decode(8, 129), profile(max_num_tokens=1023), "token_budget"),
        (decode(8, 258), profile(max_num_tokens=16), None),
        # 8 requests of 9 blocks run, and 7 prefixes of 7 blocks must survive beside them.
        (decode(8, 1024), profile(free_blocks=8 * 9 + 7 * 7), None),
        (decode(8, 1024), profile(free_blocks=8 * 9 + 7 * 7 - 1), "seeding"),
        (decode(8, 1024), profile(free_blocks=8 * 9), "seeding"),
        (decode(8, 1024), profile(free_blocks=8 * 9 - 1), "capacity"),
    ],
)
def test_which_rule_drops_a_point(point, on, rule):
    assert drop_rule(on, point) == rule


def test_an_imbalanced_point_is_dropped_and_identical_rows_are_not():
    partition = Partition(axis="new", high_count=1, fraction=0.5)
    assert drop_rule(profile(), prefill(2, 64, 0, partition=partition)) == "imbalanced"
    assert drop_rule(profile(), prefill(2, 64, 0, rows=((70, 0), (58, 0)))) == "imbalanced"
    assert drop_rule(profile(), prefill(2, 64, 0, rows=((64, 0), (64, 0)))) is None


def test_counts_of_each_rule_and_the_largest_demand():
    grid = Grid(
        prefill=PrefillGrid(new_tokens=(128, 512), batch_sizes=(1, 4), prefix_blocks=(0, 15)),
        decode=DecodeGrid(contexts=(130, 1024), batch_sizes=(1, 8)),
    )
    planned = admit(profile(free_blocks=40), axes.candidates(grid, profile(free_blocks=40)))
    found = [(p.batch_size, p.total_prefill_tokens, p.total_kv_read_tokens) for p in planned.manifest.prefill]
    assert found == [(1, 128, 0), (4, 512, 0), (1, 512, 0)]
    assert [(p.batch_size, p.total_kv_read_tokens) for p in planned.manifest.decode] == [(1, 130), (8, 1040), (1, 1024)]
    # Context: 1 and 4 x 128, 1 x 512, each after 1,920. Budget: 4 x 512 twice. Capacity: 8 x ceil(1025 / 128).
    assert planned.dropped == {"token_budget": 2, "context": 3, "capacity": 1}
    assert planned.peak_blocks == 16


@pytest.mark.parametrize(
    ("groups", "alignment"),
    [
        ((STATE,), None),
        ((group("MambaSpec", 128, prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=16),), 16),
        # A checkpoint in only some recurrent groups is no checkpoint rule.
        ((group("MambaSpec", 128, prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=16), STATE), None),
    ],
)
def test_the_checkpoint_counts_only_when_every_recurrent_group_holds_one(groups, alignment):
    rule = align_rule_of(profile(*groups))
    assert rule is not None
    assert rule.checkpoint_alignment == alignment


@pytest.mark.parametrize(
    ("total", "count", "unit", "expected"),
    [
        (130, 4, 1, [33, 33, 32, 32]),
        (8, 4, 1, [2, 2, 2, 2]),
        (128 * 5, 3, 128, [256, 256, 128]),
    ],
)
def test_totals_are_split_with_the_longer_requests_first(total, count, unit, expected):
    assert balanced(total, count, unit, 1) == expected


@pytest.mark.parametrize(("total", "count", "unit"), [(100, 2, 128), (128, 2, 128)])
def test_totals_that_cannot_be_split(total, count, unit):
    with pytest.raises(ValueError, match=f"{total} tokens over {count} requests"):
        balanced(total, count, unit, 1)


def test_a_partition_splits_its_axis_alone():
    point = PrefillPoint(
        batch_size=4,
        total_prefill_tokens=400,
        total_kv_read_tokens=0,
        partition=Partition(axis="new", high_count=1, fraction=0.5),
    )
    # Mean 100: one request of 150, the other 250 tokens balanced over three.
    assert [shape.prompt for shape in request_shapes(point, 128)] == [150, 84, 83, 83]


def test_requests_of_a_decode_point_with_a_remainder():
    point = DecodePoint(batch_size=3, total_kv_read_tokens=3 * 200 + 2)
    assert request_shapes(point, 128) == (RequestShape(128, 200), RequestShape(128, 200), RequestShape(128, 199))


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"schema_version": 1, "prefill": [{"partition": {"axis": "new", "high_count": 1, "fraction": 0.5}}]},
         "partition requires schema_version >= 2"),
        ({"schema_version": 2, "prefill": [{"rows": [[64, 0], [64, 0]]}]}, "rows requires schema_version >= 3"),
        ({"prefill": [{"rows": [[64, 0], [63, 0]]}]}, "2 rows that sum to the totals"),
        ({"prefill": [{"total_prefill_tokens": 1}]}, "total_prefill_tokens of at least batch_size 2"),
        ({"prefill": [{"total_kv_read_tokens": 1}]}, "total_kv_read_tokens 0 or at least batch_size 2"),
        ({"prefill": [{"partition": {"axis": "kv", "high_count": 1, "fraction": 0.5}}]}, "for a partition over kv"),
        ({"prefill": [{"partition": {"axis": "new", "high_count": 2, "fraction": 0.5}}]}, "high_count below batch"),
        ({"prefill": [{"batch_size": True}]}, "expected a valid integer, found True"),
        ({"prefill": [{"batch_size": 2.0}]}, "expected a valid integer, found 2.0"),
        ({"prefill": [{"surprise": 1}]}, "expected no such key"),
        ({"schema_version": 4, "prefill": []}, "1, 2 or 3"),
    ],
)  # fmt: skip
def test_a_manifest_that_breaks_its_version_is_refused(fields, line):
    from schemas.canonical import parse

    base = {"batch_size": 2, "total_prefill_tokens": 128, "total_kv_read_tokens": 0}
    rows = [base | point for point in fields["prefill"]]
    with pytest.raises(Refusal) as refusal:
        parse(PointManifest, {"schema_version": 3, "decode": []} | fields | {"prefill": rows}, "points.json")
    assert line in str(refusal.value)


@pytest.mark.parametrize(
    "on",
    [
        profile(),
        profile(STATE, FULL),
        profile(group("MambaSpec", 128, prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=32), FULL),
        profile(group("SlidingWindowSpec", 128, sliding_window=300), FULL, free_blocks=60),
        profile(max_num_tokens=200),
        profile(free_blocks=16),
    ],
)
def test_every_admitted_point_runs_in_its_own_steps(on):
    planned = admit(on, axes.candidates(Grid(), on))
    assert planned.manifest.points()
    check_steps("d", planned.manifest, on)


@pytest.mark.parametrize("checkpoint", [True, False])
def test_every_admitted_glm_point_runs_in_its_own_steps(checkpoint):
    on = glm(checkpoint)
    check_steps("d", admit(on, grids.candidates(glm53flash.ORIGIN, Grid(), on)).manifest, on)


def test_the_simulation_splits_what_the_align_rule_splits():
    hybrid = profile(STATE, FULL)
    assert simulate(hybrid, (RequestShape(128, 128 + 300),), 1) == [{0: (128, 256)}, {0: (384, 44)}]


def test_requests_over_the_budget_fall_out_of_lockstep():
    steps = simulate(profile(max_num_tokens=150), (RequestShape(0, 100), RequestShape(0, 100)), 2)
    assert steps == [{0: (0, 100), 1: (0, 50)}, {0: (100, 1), 1: (50, 50)}, {1: (100, 1)}]


def test_capacity_about_one_longest_request_leaves_the_context_axis():
    """Dynamo#2654: 64 blocks of 128, context 8,192: batch 1 over the whole axis, larger batches dropped and counted."""
    tight = profile(free_blocks=64, max_model_len=8192, max_num_tokens=8192)
    planned = admit(tight, axes.candidates(Grid(), tight))
    ones = [p.total_kv_read_tokens for p in planned.manifest.decode if p.batch_size == 1]
    assert ones == [16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8190]
    assert planned.dropped["capacity"] > 0
    assert all(p.total_kv_read_tokens + 2 * p.batch_size <= 8192 for p in planned.manifest.decode)


def test_a_batch_never_exceeds_what_one_step_of_one_rank_holds():
    """Dynamo#10125: coordinates are per rank, and the per-rank limit counts once."""
    planned = admit(profile(max_batch_size=8), axes.candidates(Grid(), profile(max_batch_size=8)))
    assert max(point.batch_size for point in planned.manifest.points()) == 8


def test_a_ring_group_is_one_block_whatever_the_context():
    """Dynamo#14614: a tail group counted as tokens / block needs 65 blocks and has 1."""
    ring = profile(group("CircularBufferSpec", 4), FULL, free_blocks=17)
    assert drop_rule(ring, prefill(1, 256, 1664)) is None
