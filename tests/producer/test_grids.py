"""Grids: the frozen GLM-5.3-Flash lists digest for digest, and the axes of ordinary models."""

import pytest

from producer import grids
from producer.admission import admit
from producer.grids import axes, glm53flash
from producer.grids.axes import batch_axis, doublings, sampled, token_axis
from profiles import glm, profile
from schemas.canonical import digest
from schemas.request import DecodeGrid, Grid, PrefillGrid, SampleLimits


def glm_list(checkpoint: bool, **change):
    planned = admit(glm(checkpoint, **change), grids.candidates(glm53flash.ORIGIN, Grid(), glm(checkpoint, **change)))
    return planned


@pytest.mark.parametrize(
    ("checkpoint", "prefill", "dropped", "estimated", "sha256"),
    [
        (True, 496, {"token_budget": 16}, 2240, "2c81f2f524251c18a5a0c33607544695042c48f8151f2b9c3f067d983fa4cbc6"),
        (
            False,
            456,
            {"token_budget": 16, "align": 40},
            2112,
            "299abe8eb499f9117ae0dd68603988f671edbb3aa2094255d5c27b2f6685e9de",
        ),
    ],
    ids=["FlashKDA", "Triton"],
)
def test_the_frozen_list_is_the_originals(checkpoint, prefill, dropped, estimated, sha256):
    planned = glm_list(checkpoint)
    assert (len(planned.manifest.prefill), len(planned.manifest.decode)) == (prefill, 81)
    assert planned.dropped == dropped
    assert digest(planned.manifest) == sha256
    assert planned.estimated_blocks == estimated
    # The state block that a prefix hit keeps resident counts in both: 32 x (61 + 1 + 4 x 2).
    assert planned.peak_blocks == 2240


def test_the_smoke_list_is_the_originals():
    smoke = grids.smoke(glm53flash.ORIGIN, glm_list(True).manifest, glm(True))
    assert digest(smoke) == "35060cd4787dc7cb14fb00480359fa5c63a907bd514692e0397f839315c018fd"
    assert [(p.batch_size, p.total_prefill_tokens, p.total_kv_read_tokens) for p in smoke.prefill] == [
        (1, 64, 0),
        (1, 64, 2176),
        (1, 4352, 2176),
    ]


def test_without_the_checkpoint_the_smoke_has_four_points_of_its_list():
    planned = glm_list(False)
    smoke = grids.smoke(glm53flash.ORIGIN, planned.manifest, glm(False))
    assert len(smoke.points()) == 4
    assert set(smoke.points()) < set(planned.manifest.points())


def test_one_block_fewer_than_the_largest_point_needs_drops_it():
    assert "capacity" not in glm_list(True, free_blocks=2240).dropped
    assert glm_list(True, free_blocks=2239).dropped["capacity"] > 0


def test_the_points_that_need_the_checkpoint_are_the_last_forty():
    """The lengths at which a reviewer of the original found chunks that run in two steps near the end of a cell."""
    kept, without = glm_list(True).manifest.prefill, set(glm_list(False).manifest.prefill)
    only = [index for index, point in enumerate(kept) if point not in without]
    assert only == list(range(456, 496))
    assert {kept[index].total_prefill_tokens // kept[index].batch_size for index in only} == {4096, 4352, 6528, 8192}


@pytest.mark.parametrize(
    ("max_model_len", "context"), [(1_048_576, 131_072), (131_079, 131_072), (131_078, 131_071), (8192, 8185)]
)
def test_the_measured_context(max_model_len, context):
    assert glm53flash.measured_context(max_model_len) == context


@pytest.mark.parametrize(
    ("change", "lengths"),
    [
        ({"token_budget": 1000, "block": 256}, [4, 8, 16, 32, 64, 128, 256, 512, 768]),
        ({"token_budget": 64, "block": 2176}, [4, 8, 16, 32, 64]),
    ],
)
def test_the_grid_is_general_in_block_and_budget(change, lengths):
    found = glm53flash.candidates(**{"max_model_len": 4096, "max_batch_size": 4} | change)
    assert sorted({p.total_prefill_tokens // p.batch_size for p in found.prefill}) == lengths
    assert max(p.total_prefill_tokens for p in found.prefill) <= change["token_budget"]
    assert max(p.batch_size for p in found.points()) == 4


def test_doublings_end_at_the_limit():
    assert doublings(16, 100) == (16, 32, 64, 100)
    assert doublings(16, 16) == (16,)


def test_a_sampled_axis_keeps_both_ends():
    assert sampled(range(100), 4) == (0, 33, 66, 99)
    assert sampled((1, 2), 4) == (1, 2)


def test_captured_sizes_are_measured_with_one_past_each():
    assert token_axis((1, 2, 8), 20) == (1, 2, 3, 8, 9, 16, 20)
    assert batch_axis((1, 2, 8), 6) == (1, 2, 3, 4, 6)
    assert token_axis((), 40) == (16, 32, 40)


def test_captured_sizes_of_a_profile_reach_the_grid():
    found = axes.candidates(Grid(), profile(cudagraph_capture_sizes=(1, 2, 4)))
    # 1, 2, 4 and one past each, then doublings of 4 to the budget of 1,024.
    expected = [1, 2, 3, 4, 5, 8, 16, 32, 64, 128, 256, 512, 1024]
    assert sorted({p.total_prefill_tokens for p in found.prefill if p.batch_size == 1}) == expected


def test_sample_limits_cut_the_axes_that_the_campaign_does_not_give():
    samples = SampleLimits(
        prefill_new_tokens=2,
        prefill_kv_read_tokens=2,
        prefix_batch_sizes=1,
        decode_kv_read_tokens=2,
        decode_batch_sizes=2,
    )
    found = axes.candidates(Grid(samples=samples), profile())
    assert {p.total_prefill_tokens // p.batch_size for p in found.prefill} == {16, 1024}
    assert {p.batch_size for p in found.prefill if p.total_kv_read_tokens} == {1}
    assert {p.batch_size for p in found.decode} == {1, 8}
    assert {p.total_kv_read_tokens // p.batch_size for p in found.decode} == {16, 2046}


def test_axes_of_the_campaign_are_taken_as_they_are():
    grid = Grid(
        prefill=PrefillGrid(new_tokens=(7, 9), batch_sizes=(1, 3), prefix_blocks=(0, 2)),
        decode=DecodeGrid(contexts=(5, 6), batch_sizes=(2,)),
    )
    found = axes.candidates(grid, profile())
    assert [(p.total_prefill_tokens, p.batch_size, p.total_kv_read_tokens) for p in found.prefill] == [
        (7, 1, 0),
        (7, 1, 256),
        (21, 3, 0),
        (21, 3, 768),
        (9, 1, 0),
        (9, 1, 256),
        (27, 3, 0),
        (27, 3, 768),
    ]
    assert [(p.batch_size, p.total_kv_read_tokens) for p in found.decode] == [(2, 10), (2, 12)]


def test_smoke_is_a_subset_that_touches_every_path():
    manifest = admit(profile(), axes.candidates(Grid(), profile())).manifest
    smoke = axes.smoke(manifest)
    assert set(smoke.prefill) < set(manifest.prefill)
    assert {p.total_kv_read_tokens > 0 for p in smoke.prefill} == {True, False}
    assert smoke.decode == (manifest.decode[0], manifest.decode[-1])
