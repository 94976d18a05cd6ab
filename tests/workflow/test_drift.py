"""Drift of a point's samples: what a throttling device does to them is named, and nothing else is."""

import random
from pathlib import Path

import msgspec
import pytest

from schemas.merged import MergedArtifact
from schemas.native import read_struct

from drift import Drift, drift, drifting_points


def test_samples_that_rise_by_a_seventh_drift():
    """The report that asked for this: ten samples from 100 to 115 ms."""
    walls = [0.100 + 0.015 * index / 9 for index in range(10)]
    assert drift(walls) == Drift(0.100, 0.115, 45, 45)


@pytest.mark.parametrize(
    "walls",
    [
        [0.1] * 10,
        [0.1 * (1 + 0.0045 * index) for index in range(10)],  # all rise, by 4 % in all
        [0.115, *[0.1] * 9],  # one slow first sample is no drift
        [*[0.1] * 9, 0.2],
        [0.1, 0.12] * 5,
    ],
)
def test_what_does_not_follow_the_order_is_no_drift(walls):
    assert drift(walls) is None


def test_samples_that_fall_drift_too():
    found = drift([0.2 - 0.01 * index for index in range(9)])
    assert (found.agreeing, found.pairs) == (36, 36)


def test_noise_is_hardly_ever_taken_for_drift():
    """Of nine samples in random order one point in 1,170 looks like a drift: orders of nine with at most three
    inversions are 1 + 8 + 35 + 111 (Kendall's triangle), as many for falling, of 362,880."""
    chance = random.Random(7)
    found = sum(drift([chance.uniform(1, 2) for _ in range(9)]) is not None for _ in range(5000))
    assert found <= 5000 * 2 * (1 + 8 + 35 + 111) / 362_880 * 3


@pytest.mark.demo
def test_a_drifting_point_of_a_real_cell_is_named_with_its_numbers(demo: Path):
    (file,) = (demo / "cells").glob("decode-dense-*/merged.json")
    data = msgspec.json.decode(file.read_bytes())
    (result,) = data["iteration_groups"][2]["rank_results"]
    for index, raw in enumerate(result["fpms"][0]["benchmark_measurement"]["raw_fpms"]):
        raw["wall_time"] = 0.100 + 0.002 * index
    merged = msgspec.json.decode(msgspec.json.encode(data), type=MergedArtifact)
    benchmark_id = data["iteration_groups"][2]["benchmark_id"]
    line = f"benchmark_id={benchmark_id}: samples drift from 102.000 ms to 118.000 ms (36 of 36 pairs)"
    assert line in list(drifting_points(merged))
    assert line not in list(drifting_points(read_struct(MergedArtifact, file, "merged")))
