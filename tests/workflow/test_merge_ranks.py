"""Ranks of one cell that disagree are not merged; what they may differ in does not matter."""

import json
import shutil
from pathlib import Path

import pytest
from conftest import cell_folder

from schemas.canonical import read_model, sha256
from schemas.errors import Refusal
from schemas.plan import FrozenCell

from merge_ranks import merge_files

pytestmark = pytest.mark.demo


@pytest.fixture
def cell(parallel: Path, tmp_path: Path) -> Path:
    source = cell_folder(parallel, "decode-data")
    return Path(shutil.copytree(source, tmp_path / source.name))


def merged_with(cell: Path, change, file: str = "benchmark_dp1.json"):
    """The merged cell after a change in one rank's file, renewed in the receipt as a forger would."""
    data = json.loads((cell / file).read_text())
    change(data)
    (cell / file).write_text(json.dumps(data))
    receipt = json.loads((cell / "receipt.json").read_text())
    receipt["files"][file] = sha256((cell / file).read_bytes())
    (cell / "receipt.json").write_text(json.dumps(receipt))
    frozen = read_model(FrozenCell, cell / "cell.json", "cell")
    return merge_files(frozen, cell / "receipt.json", [cell / "benchmark.json", cell / "benchmark_dp1.json"])


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda d: d.update(grid_digest="0" * 64), ", found 0000"),
        (lambda d: d.update(run_id="0" * 32), ", found 0000"),
        (lambda d: d["dp"].update(rank=0), "dp ranks: expected [0, 1], found [0, 0]"),
        (lambda d: d["dp"].update(size=1), "dp.size: expected 2, found 1"),
        (lambda d: d["iteration_groups"].reverse(), "iteration_groups: expected the value of"),
        (lambda d: d["results"][0].update(kv_seed_regime=None), "expected one regime over all ranks"),
        (
            lambda d: d["results"][0].update(kv_seed_regime="fake_fallback"),
            "expected stamps ['kvwarm_fake_fallback'], found ['kvwarm_real_kv']",
        ),
        (
            lambda d: d["engine"]["scheduler"].update(max_num_seqs=9),
            "engine provenance mismatch: engine.scheduler: expected",
        ),
        (
            lambda d: d["engine"]["serving_config"].update(mamba_prefill_checkpoint={"blocks": 1, "alignment": 16}),
            "engine provenance mismatch: engine.serving_config: expected",
        ),
    ],
)
def test_ranks_that_disagree_are_refused(cell: Path, change, line: str):
    with pytest.raises(Refusal) as refusal:
        merged_with(cell, change)
    assert line in str(refusal.value)


def test_a_missing_rank_is_named(cell: Path):
    frozen = read_model(FrozenCell, cell / "cell.json", "cell")
    with pytest.raises(Refusal, match=r"dp ranks: expected \[0, 1\], found \[0\]"):
        merge_files(frozen, cell / "receipt.json", [cell / "benchmark.json"])


def test_a_ranks_own_number_of_blocks_may_differ(cell: Path):
    """Replicas size their caches independently (vllm#46106)."""
    before = merged_with(cell, lambda data: None)
    after = merged_with(cell, lambda data: data["limits"].update(num_gpu_blocks=data["limits"]["num_gpu_blocks"] - 100))
    assert before.iteration_groups == after.iteration_groups
    assert before.limits == after.limits


def test_the_slowest_rank_counts_whichever_it_is(cell: Path):
    merged = merged_with(cell, lambda data: None)
    files = [json.loads((cell / name).read_text()) for name in ("benchmark.json", "benchmark_dp1.json")]
    for group in merged.iteration_groups:
        walls = [
            row["fpms"][0]["wall_time"]
            for data in files
            for row in data["results"]
            if row["point"]["benchmark_id"] == group.benchmark_id
        ]
        assert len(walls) == 2
        assert group.wall_time == max(walls)
