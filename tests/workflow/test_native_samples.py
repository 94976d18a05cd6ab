"""Dynamo's own artifacts: each is read as what it is, and merged as Dynamo's launcher merged it."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from native_samples import WHOLE, sample

from schemas.errors import Refusal
from schemas.layout import rank_file

from merge_ranks import Ranks, findings, merge


def ranks_of(folder: Path, *documents: dict[str, Any]) -> Ranks:
    """The documents as the files of their ranks."""
    files = [folder / rank_file(document["dp"]["rank"]) for document in documents]
    for file, document in zip(files, documents, strict=True):
        file.write_text(json.dumps(document))
    return Ranks.read(files)


@pytest.mark.parametrize("name", WHOLE)
def test_nothing_stands_against_a_whole_artifact(name: str, tmp_path: Path):
    assert [str(refusal) for refusal in findings(ranks_of(tmp_path, sample(name)))] == []


@pytest.mark.parametrize("name", ["d161_dense_agg", "d17_full_moe_agg"])
def test_the_merged_file_is_the_launchers(name: str, tmp_path: Path):
    merged = json.loads(msgspec.json.encode(merge(ranks_of(tmp_path, sample(name)), "")))
    del merged["cell_digest"], merged["source_sha256"]
    assert merged == sample(f"{name}_merged")


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        (
            "d17_failed_infeasible",
            ["status: expected complete, found failed (prefill[1]: explicit benchmark point is infeasible: point="],
        ),
        ("d17_partial_timeout", ["status: expected complete, found partial (timeout, 21 of 198 points)"]),
    ],
)
def test_an_artifact_that_is_not_whole_says_why(name: str, lines: list[str], tmp_path: Path):
    found = [str(refusal) for refusal in findings(ranks_of(tmp_path, sample(name)))]
    assert found[0].startswith(lines[0])
    assert all("found" in line for line in found)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("d161_dense_agg_merged", "artifact_type"),
        ("d17_full_moe_agg_merged_worker_probe", "schema"),
    ],
)
def test_a_file_of_another_kind_is_no_ranks(name: str, line: str, tmp_path: Path):
    (tmp_path / "benchmark.json").write_text(json.dumps(sample(name)))
    with pytest.raises(Refusal, match="rank artifact: expected a RankArtifact, found"):
        Ranks.read([tmp_path / "benchmark.json"])
