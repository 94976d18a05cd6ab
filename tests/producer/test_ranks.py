"""Two workers below one scheduler, and two data-parallel engines in step: the real engine, on the CPU."""

import json
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest
from conftest import ROOT, cell_folder, load

from schemas.canonical import read_model, sha256, short
from schemas.merged import MergedArtifact
from schemas.native import CellReceipt, RankArtifact, read_struct
from schemas.plan import Plan

pytestmark = [pytest.mark.engine, pytest.mark.demo]


def artifacts(parallel: Path, prefix: str) -> list[RankArtifact]:
    cell = cell_folder(parallel, prefix)
    return [read_struct(RankArtifact, cell / name, "rank") for name in ("benchmark.json", "benchmark_dp1.json")]


def test_tensor_parallel_workers_hold_a_part_each(parallel: Path):
    plan = read_model(Plan, parallel / "current" / "plan.json", "plan")
    probe = f"tensor-{short(plan.deployments['tensor'].probe_digest)}"
    record = json.loads((parallel / "probe" / probe / "prefill.json").read_text())
    assert [worker["tp_rank"] for worker in record["workers"]] == [0, 1]
    assert len(record["schedulers"]) == 1
    # Two KV heads over two workers: one each. 4 layers x K and V x 128 tokens x 64 x 2 bytes, of 64 MiB a worker.
    page = 4 * 2 * 128 * 64 * 2
    assert [worker["cache"]["num_blocks"] for worker in record["workers"]] == [(64 << 20) // page] * 2
    (artifact,) = [read_struct(RankArtifact, cell_folder(parallel, "decode-tensor") / "benchmark.json", "rank")]
    assert artifact.engine["threads"]["torch_num_threads"] == [1, 1]
    assert artifact.engine["parallel"]["tensor_parallel_size"] == 2
    assert not (cell_folder(parallel, "decode-tensor") / "benchmark_dp1.json").exists()


@pytest.mark.parametrize("prefix", ["prefill-data", "decode-data"])
def test_each_rank_has_an_artifact_and_the_slowest_ones_time_counts(parallel: Path, prefix: str):
    first, second = artifacts(parallel, prefix)
    assert (first.dp.rank, second.dp.rank, first.dp.size, second.dp.size) == (0, 1, 2, 2)
    assert first.iteration_groups == second.iteration_groups
    assert (first.run_id, first.grid_digest) == (second.run_id, second.grid_digest)
    assert first.synchronization["enabled"]
    for group in first.iteration_groups:
        walls = [result.fpms[0].wall_time for result in group.rank_results]
        assert group.wall_time == max(walls)
        assert len(set(walls)) == 2
    # Each engine measured by itself, with tokens of its own.
    prompts = [
        {row.fpms[0].benchmark_measurement.prompts.sha256 for row in artifact.results} for artifact in (first, second)
    ]
    assert not prompts[0] & prompts[1]
    assert [a.engine["parallel"]["data_parallel_rank"] for a in (first, second)] == [0, 1]
    merged = read_struct(MergedArtifact, cell_folder(parallel, prefix) / "merged.json", "merged")
    assert merged.dp == {"ranks": [0, 1], "source_ranks": [0, 1], "managed_size": 2, "global_size": 2}
    assert len(merged.results) == 2 * len(first.results)


def test_data_parallel_ranks_ran_the_same_forwards(parallel: Path):
    """Same points, same repetitions, in the same order: what each sample was, forward by forward."""
    for prefix in ("prefill-data", "decode-data"):
        first, second = artifacts(parallel, prefix)
        indices = [
            [
                raw.benchmark_sample.forward_index
                for row in artifact.results
                for raw in row.fpms[0].benchmark_measurement.raw_fpms
            ]
            for artifact in (first, second)
        ]
        assert indices[0] == indices[1]


def test_the_receipt_names_the_file_of_every_rank(parallel: Path):
    cell = cell_folder(parallel, "decode-data")
    receipt = read_struct(CellReceipt, cell / "receipt.json", "receipt")
    assert set(receipt.files) == {"repetitions.jsonl", "benchmark.json", "benchmark_dp1.json"}
    assert {name: sha256((cell / name).read_bytes()) for name in receipt.files} == receipt.files


def test_a_lost_rank_artifact_is_made_again_from_the_journal(parallel: Path):
    lost = cell_folder(parallel, "decode-data") / "benchmark_dp1.json"
    before = lost.read_bytes()
    lost.unlink()
    script = ROOT / "workflow" / "scripts" / "rank_artifact.py"
    arguments = ["--cell", str(lost.parent / "cell.json"), "--rank", "1", "--output", str(lost)]
    subprocess.run([sys.executable, str(script), *arguments], cwd=ROOT, check=True)
    assert lost.read_bytes() == before


def test_the_simulator_loads_both_strategies(parallel: Path):
    plan = (parallel / "current").resolve()
    done = load(plan / "systems")
    assert done.returncode == 0, done.stderr
    entries = read_model(Plan, plan / "plan.json", "plan").cells
    assert sorted(entry.points for entry in entries) == [4, 4, 12, 12]


def test_coordinates_are_those_of_one_rank(parallel: Path):
    """Four requests are the limit of a rank, and no row has eight (dynamo#10125)."""
    plan = (parallel / "current").resolve()
    table = pl.read_parquet(next((plan / "systems").rglob("*.parquet")))
    assert table.filter(pl.col("dp") == 2)["batch_size"].max() == 4
    assert sorted(table["dp"].unique().to_list()) == [1, 2]
    for phase, tokens in (("prefill", "total_prefill_tokens"), ("decode", "total_kv_read_tokens")):
        rows = table.filter((pl.col("dp") == 2) & (pl.col("workload_kind") == phase))
        assert rows[tokens].max() == {"prefill": 2 * 256, "decode": 4 * 1024}[phase]
