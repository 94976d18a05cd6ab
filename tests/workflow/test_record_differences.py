"""What counts as another geometry of a cache, and what only follows from the number of its blocks."""

import json
from typing import Any

import pytest
from conftest import ROOT

from schemas.canonical import parse
from schemas.observation import WorkerRecord

from record_differences import differences, worker_differences


def recorded(name: str) -> dict[str, Any]:
    record = json.loads((ROOT / "tests" / "fixtures" / "probes" / f"{name}.json").read_text())
    worker: dict[str, Any] = record["workers"][0]
    return worker


def found(name: str, **change: int) -> list[str]:
    """Differences of a real worker after a change of its first allocation."""
    other = recorded(name)
    other["cache"]["tensor_allocations"][0].update(change)
    workers = (parse(WorkerRecord, worker, "record") for worker in (recorded(name), other))
    return [difference.field for difference in worker_differences(*workers)]


def test_the_stride_between_layers_counts_where_there_are_several():
    # 1,024 blocks of 65,536 bytes lie between two layers of the dense model; each state of the hybrid lies alone.
    assert found("dense", layer_stride=1024 * 65_544) == [
        "cache.tensor_allocations[0].layer_stride.bytes_of_each_block",
        *(f"cache.layer_tensors.model.layers.{layer}.self_attn.attn[0].offset_in_page" for layer in (1, 2, 3)),
    ]
    assert found("hybrid", layer_stride=1) == []


@pytest.mark.parametrize(
    ("expected", "other", "fields"),
    [
        ({"a": 1}, {"a": 1.0}, ["a"]),
        ({"a": 1}, {"a": True}, ["a"]),
        ({"a": None}, {}, ["a"]),
        ({"a": "absent"}, {}, ["a"]),
        ({"a": [1, 2]}, {"a": [1]}, ["number of a"]),
        ({"a": [{"b": 1}, {"b": 2}]}, {"a": [{"b": 1}, {"b": 3}]}, ["a[1].b"]),
        ({"a": (1, 2)}, {"a": [1, 2]}, []),
    ],
)
def test_a_difference_is_named_where_it_lies(expected: Any, other: Any, fields: list[str]):
    assert [difference.field for difference in differences(expected, other)] == fields
