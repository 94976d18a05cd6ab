"""What a published value is said to be, and which of two values at one coordinate counts."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from cells import frozen_cell
from native_samples import cell_of, sample

from schemas.errors import Refusal
from schemas.merged import PublishedGroup

from publish import Policy, policy_of, published_groups, read_values, table_policy

SINGLE = Policy("dynamo_native_single_sample_v1", 0, 1)
MEDIAN_OF_3 = Policy("kvwarm_median_of_3", 0, 3)
OURS = policy_of(frozen_cell(), None, Path("x"))  # type: ignore[arg-type]  # of ours the cell says it all
FILE = Path("merged.json")


def groups_of(document: dict[str, Any]) -> list[PublishedGroup]:
    fields = ("run_id", "grid_digest", "iteration_groups")
    return read_values(
        json.dumps({key: document[key] for key in fields} | {"cell_digest": ""}).encode(), FILE
    ).iteration_groups


def test_ours_is_the_median_policy_with_its_repeats():
    assert OURS[:3] == ("vllm_native_fpm_prefix_seed_median_v1", 5, 10)


@pytest.mark.parametrize(
    ("name", "policies"),
    [
        ("d17_rows_v3_realseed_prefill", [SINGLE] * 4),
        ("d161_dense_decode_median", [MEDIAN_OF_3] * 3),
        ("d17_dense_decode_median_clamped", [MEDIAN_OF_3] * 3),
        ("d17_moe_swa_native_decode", [MEDIAN_OF_3] * 2),
    ],
)
def test_dynamos_values_are_single_samples_or_medians_of_three(name: str, policies: list[Policy]):
    cell = cell_of(sample(name))
    assert [policy_of(cell, group, FILE) for group in groups_of(sample(name))] == policies


def test_a_median_that_no_consumer_has_a_name_for_is_refused():
    document = copy.deepcopy(sample("d161_dense_decode_median"))
    document["iteration_groups"][0]["rank_results"][0]["fpms"][0]["kvwarm_giant_median_of"] = 5
    with pytest.raises(Refusal, match=r"benchmark_id=1 kvwarm_giant_median_of: expected 3 on every rank.*found \[5\]"):
        policy_of(cell_of(document), groups_of(document)[0], FILE)


@pytest.mark.parametrize(
    ("rows", "table"),
    [
        ({SINGLE}, "dynamo_native_single_sample_v1"),
        ({MEDIAN_OF_3}, "per_row_single_sample_or_median_of_3"),
        ({SINGLE, MEDIAN_OF_3}, "per_row_single_sample_or_median_of_3"),
        ({OURS}, "vllm_native_fpm_prefix_seed_median_v1"),
    ],
)
def test_a_table_has_the_policy_that_covers_its_rows(rows: set[Policy], table: str):
    assert table_policy(rows, FILE).name == table


def test_values_of_two_producers_are_no_table():
    with pytest.raises(Refusal, match="measurement: expected one protocol over all cells"):
        table_policy({OURS, SINGLE}, FILE)


def at_one_coordinate(name: str, *reasons: list[str]) -> list[PublishedGroup]:
    """Groups of the sample's first point, with ids from 1 and these `sample_reasons`."""
    first = sample(name)["iteration_groups"][0]
    groups = []
    for number, own in enumerate(reasons, start=1):
        group = copy.deepcopy(first)
        group["benchmark_id"] = group["point"]["benchmark_id"] = number
        group["point"]["sample_reasons"] = own
        groups.append(group)
    return groups_of(sample(name) | {"iteration_groups": groups})


@pytest.mark.parametrize(
    ("reasons", "kept"),
    [
        ([["explicit", "context_clamped"], ["explicit"]], [2]),
        ([["explicit"], ["context_clamped"], ["context_clamped"]], [1]),
        ([["context_clamped"], ["context_clamped"]], [1]),
    ],
)
def test_of_clamped_contexts_the_true_one_counts_or_the_first(reasons: list[list[str]], kept: list[int]):
    found = published_groups(at_one_coordinate("d161_dense_decode_median", *reasons), FILE)
    assert [group.benchmark_id for group in found] == kept


def test_the_first_of_clamped_points_is_by_id_whatever_their_order():
    groups = at_one_coordinate("d161_dense_decode_median", ["context_clamped"], ["context_clamped"])
    assert [group.benchmark_id for group in published_groups(groups[::-1], FILE)] == [1]


def test_of_prefills_without_a_cache_the_one_that_nothing_was_seeded_for_counts():
    groups = at_one_coordinate("d17_dense_agg", ["explicit", "prefill_real_seed"], ["explicit"])
    assert groups[0].point.total_kv_read_tokens == 0
    assert [group.benchmark_id for group in published_groups(groups, FILE)] == [2]


@pytest.mark.parametrize("name", ["d161_dense_decode_median", "d17_dense_agg"])
def test_any_other_two_values_at_one_coordinate_are_refused(name: str):
    with pytest.raises(Refusal, match=r"points \[1, 2\]: expected one point at each coordinate, found 2 at"):
        published_groups(at_one_coordinate(name, ["explicit"], ["explicit"]), FILE)


def test_points_at_coordinates_of_their_own_are_all_kept_in_order():
    groups = groups_of(sample("d17_rows_v3_realseed_prefill"))
    assert [group.benchmark_id for group in published_groups(groups, FILE)] == [1, 2, 3, 4]
