"""Dynamo's artifacts as cells of a campaign: told apart by content, refused for what they are not, imported whole."""

import copy
import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from native_samples import FIXTURES, ONE_PHASE, TWO_RANKS, cell_of, one_phase, sample, two_ranks

from schemas.canonical import sha256
from schemas.errors import Refusal
from schemas.layout import rank_file

from import_native import import_cell, recognise
from merge_ranks import merge_files
from rank_artifact import main as write_rank_artifact


@pytest.fixture
def artifacts(tmp_path: Path) -> Path:
    folder = tmp_path / "artifacts"
    folder.mkdir()
    return folder


def put(folder: Path, name: str, document: dict[str, Any]) -> Path:
    (folder / name).write_text(json.dumps(document))
    return folder / name


@pytest.mark.parametrize(
    ("file", "what"),
    [
        ("d17_dense_agg.json", "a rank artifact of mode agg (complete)"),
        ("d161_dense_decode_median.json", "a rank artifact of mode decode (complete)"),
        ("d17_partial_timeout.json.gz", "a rank artifact of mode agg (partial, timeout)"),
        (
            "d17_failed_infeasible.json",
            "a rank artifact of mode prefill (failed, prefill[1]: explicit benchmark point is ",
        ),
        ("d161_dense_agg_merged.json", "the launcher's merged file"),
        ("d17_full_moe_agg_merged.json", "the launcher's merged file"),
        ("d17_full_moe_agg_merged_worker_probe.json", "the launcher's worker probe"),
        ("manifest_pts_rows.json", "a point manifest"),
    ],
)
def test_a_file_is_what_it_holds(file: str, what: str, artifacts: Path):
    shutil.copy(FIXTURES / file, artifacts / "misleading_dp7.json")
    assert recognise(artifacts / "misleading_dp7.json").what.startswith(what)


def test_files_that_are_no_artifacts(artifacts: Path):
    (artifacts / "benchmark.json").write_text("{")
    put(artifacts, "benchmark.json.tmp", sample("d161_dense_decode_median"))
    put(artifacts, "other.json", {"a": 1})
    whole = gzip.compress(json.dumps(sample("d161_dense_decode_median")).encode())
    (artifacts / "torn.json.gz").write_bytes(whole[:-100])
    (artifacts / "bad.json.gz").write_bytes(whole[:10] + b"x" * 50)
    found = {file.name: recognise(file).what for file in artifacts.iterdir()}
    assert found["benchmark.json"].startswith("no artifact: ")
    assert found["torn.json.gz"].startswith("no artifact: Compressed file ended")
    assert found["bad.json.gz"].startswith("no artifact: ")
    assert found["benchmark.json.tmp"].startswith("a temporary file")
    assert found["other.json"] == "JSON that is no artifact"


@pytest.mark.parametrize("name", ONE_PHASE)
def test_an_artifact_becomes_a_cell(name: str, artifacts: Path, tmp_path: Path):
    source = put(artifacts, "whatever.json", sample(name))
    cell = cell_of(sample(name))
    receipt = import_cell(cell, artifacts, tmp_path / cell.name)
    folder = tmp_path / cell.name
    assert receipt.sources == ["whatever.json"]
    assert receipt.run_id == sample(name)["run_id"]
    assert receipt.producer.startswith("dynamo 1.6.1, " if name.startswith("d161") else "dynamo 1.7.0.dev20261026, ")
    assert receipt.files == {"benchmark.json": sha256(source.read_bytes())}
    assert (folder / "imported" / "benchmark.json").read_bytes() == source.read_bytes()
    merged = merge_files(cell, folder / "receipt.json", [folder / "benchmark.json"])
    walls = {row["point"]["benchmark_id"]: row["fpms"][0]["wall_time"] for row in sample(name)["results"]}
    assert {group.benchmark_id: group.wall_time for group in merged.iteration_groups} == walls


@pytest.mark.parametrize(
    "document", [one_phase("d161_moe_realkv_agg", "decode"), sample("d17_moe_swa_native_decode")], ids=["1.6.1", "1.7"]
)
def test_the_ranks_of_one_run_are_put_in_order(document: dict[str, Any], artifacts: Path, tmp_path: Path):
    documents = two_ranks(document)
    put(artifacts, "a.json", documents[1])
    put(artifacts, "b.json", documents[0])
    (artifacts / "compressed.json.gz").write_bytes(gzip.compress(b"{}"))
    cell = cell_of(documents[0], **TWO_RANKS)
    receipt = import_cell(cell, artifacts, tmp_path / cell.name)
    assert receipt.sources == ["b.json", "a.json"]
    assert receipt.beside == {"compressed.json.gz": "JSON that is no artifact"}
    files = [tmp_path / cell.name / rank_file(rank) for rank in (0, 1)]
    merged = merge_files(cell, tmp_path / cell.name / "receipt.json", files)
    assert [row.point.dp_rank for row in merged.results] == [0, 1] * len(documents[0]["results"])
    slower = [1.1 * row["fpms"][0]["wall_time"] for row in document["results"]]
    assert [group.wall_time for group in merged.iteration_groups] == slower
    assert merged.coverage.completed_points == 2 * len(slower)


def test_a_lost_rank_file_comes_back_as_it_was_imported(artifacts: Path, tmp_path: Path, monkeypatch):
    for document in two_ranks(sample("d17_moe_swa_native_decode")):
        put(artifacts, f"{document['dp']['rank']}.json", document)
    cell = cell_of(document, **TWO_RANKS)
    import_cell(cell, artifacts, tmp_path / cell.name)
    lost = tmp_path / cell.name / "benchmark_dp1.json"
    before = lost.read_bytes()
    lost.unlink()
    arguments = ["--cell", str(lost.with_name("cell.json")), "--rank", "1", "--output", str(lost)]
    monkeypatch.setattr("sys.argv", ["rank_artifact", *arguments])
    write_rank_artifact()
    assert lost.read_bytes() == before


NAME = "d17_dense_decode_median_clamped"


def refusal_of(documents: list[dict[str, Any]], artifacts: Path, tmp_path: Path, **identity: Any) -> str:
    for number, document in enumerate(documents):
        put(artifacts, f"{number}.json", document)
    cell = cell_of(sample(NAME), **identity)
    with pytest.raises(Refusal) as refusal:
        import_cell(cell, artifacts, tmp_path / cell.name)
    assert not (tmp_path / cell.name).exists(), "a refused import leaves nothing"
    return str(refusal.value)


def changed(change) -> dict[str, Any]:
    document = copy.deepcopy(sample(NAME))
    change(document)
    return document


@pytest.mark.parametrize(
    ("documents", "line"),
    [
        ([], "found an empty folder"),
        ([sample("d17_dense_agg")], "found 0.json: a rank artifact of mode agg (complete)"),
        ([sample("d17_partial_timeout")], "found 0.json: a rank artifact of mode agg (partial, timeout)"),
        ([sample("d17_rows_v3_realseed_prefill")], "found 0.json: a rank artifact of mode prefill (complete)"),
        ([sample(NAME), changed(lambda d: d.update(run_id="f" * 32))], "one run of mode decode, found 0.json of run "),
        ([sample(NAME), sample(NAME)], "artifacts: dp.rank: expected [0], found [0, 0]"),
        ([changed(lambda d: d["dp"].update(rank="0"))], "artifacts: dp.rank: expected [0], found ['0']"),
        ([changed(lambda d: d["dp"].update(rank=False))], "artifacts: dp.rank: expected [0], found [False]"),
        (two_ranks(sample(NAME)), "artifacts: dp.rank: expected [0], found [0, 1]"),
        ([changed(lambda d: d.update(valid=False))], "valid: expected True, found False"),
        ([changed(lambda d: d["limits"].update(block_size=True))], "Expected `int`, got `bool`"),
        ([changed(lambda d: d["limits"].update(block_size=2**53 + 1))], "Expected `int` <= 9007199254740992"),
        ([changed(lambda d: d.update(surprise=1))], "unknown field `surprise`"),
    ],
)
def test_what_is_no_run_of_the_cell_is_refused(documents, line: str, artifacts: Path, tmp_path: Path):
    assert line in refusal_of(documents, artifacts, tmp_path)


def test_other_points_than_the_cells_are_named(artifacts: Path, tmp_path: Path):
    put(artifacts, "0.json", sample("d17_moe_swa_native_decode"))
    cell = cell_of(sample(NAME), runtime_backend_version="0.32.0")
    with pytest.raises(Refusal, match=r"number of points: expected 3, found 2"):
        import_cell(cell, artifacts, tmp_path / cell.name)


def test_an_import_is_never_overwritten(artifacts: Path, tmp_path: Path):
    put(artifacts, "0.json", sample(NAME))
    cell = cell_of(sample(NAME))
    first = import_cell(cell, artifacts, tmp_path / cell.name)
    assert import_cell(cell, artifacts, tmp_path / cell.name) == first
    put(artifacts, "0.json", changed(lambda d: d["timing"].update(completed_at="2026-11-30T11:58:51.100376Z")))
    with pytest.raises(Refusal, match="expected the artifact imported before"):
        import_cell(cell, artifacts, tmp_path / cell.name)
