"""The published table: what it holds, and that the real simulators load it."""

import json
import shutil
import subprocess
from pathlib import Path

import polars as pl
import pyarrow.parquet as pq
import pytest
from conftest import Workspace, load

from schemas.canonical import sha256

pytestmark = pytest.mark.demo


@pytest.fixture(scope="module")
def systems(demo: Path) -> Path:
    return demo / "current" / "systems"


@pytest.fixture(scope="module")
def parquet(systems: Path) -> Path:
    return next(systems.rglob("fpm_forward_perf.parquet"))


def test_the_simulator_gets_every_stored_latency_back_exactly(systems: Path, parquet: Path):
    done = load(systems)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == pq.read_metadata(parquet).num_rows
    assert {(row["workload_kind"], row["model_path"]) for row in answers} == {
        (phase, f"config/models/{model}")
        for phase in ("prefill", "decode")
        for model in ("qwen3-tiny", "gemma3-tiny", "qwen3-next-tiny")
    }
    different = [row for row in answers if row["stored_ms"] != row["loaded_ms"]]
    assert different == []


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"row_count": 1}, "row"),
        ({"parquet_sha256": "0" * 64}, "inconsistent"),
        ({"measurement_policy": "x"}, "policy"),
    ],
)
def test_the_simulator_refuses_a_pair_that_was_tampered_with(systems: Path, tmp_path: Path, change, complaint):
    shutil.copytree(systems, tmp_path / "systems")
    sidecar = next(tmp_path.rglob("*.metadata.json"))
    sidecar.write_text(json.dumps(json.loads(sidecar.read_text()) | change))
    done = load(tmp_path / "systems")
    assert done.returncode != 0
    assert complaint in done.stderr


def test_each_row_is_the_fifth_smallest_of_its_last_nine_samples(demo: Path, parquet: Path):
    expected = {}
    for folder in (demo / "cells").iterdir():
        cell = json.loads((folder / "cell.json").read_text())
        points = cell["points"][cell["identity"]["phase"]]
        for line in (folder / "repetitions.jsonl").read_text().splitlines()[1:]:
            record = json.loads(line)
            walls = [r["end_monotonic"] - r["start_monotonic"] for r in record["ranks"][0]["repetitions"]]
            point = points[record["benchmark_id"] - 1]
            key = (
                cell["model"],
                cell["identity"]["phase"],
                point["batch_size"],
                point.get("total_prefill_tokens", 0),
                point["total_kv_read_tokens"],
            )
            expected[key] = sorted(walls[1:])[4] * 1000
    columns = ("model_path", "workload_kind", "batch_size", "total_prefill_tokens", "total_kv_read_tokens")
    rows = pl.read_parquet(parquet).to_dicts()
    assert {tuple(row[name] for name in columns): row["latency_ms"] for row in rows} == expected


def test_regimes_and_policy_of_the_rows(parquet: Path):
    table = pl.read_parquet(parquet)
    assert table.group_by("workload_kind").agg(pl.col("kv_seed_regime").unique()).sort("workload_kind").rows() == [
        ("decode", ["real_kv"]),
        ("prefill", ["n/a"]),
    ]
    policies = table.select("measurement_policy", "warmup_repeats", "measurement_repeats").unique().rows()
    assert policies == [("vllm_native_fpm_prefix_seed_median_v1", 5, 10)]
    assert table.schema["enable_wideep"] == pl.Boolean
    assert table["latency_ms"].min() > 0


def test_the_sidecar_binds_the_table(parquet: Path):
    sidecar = json.loads(parquet.with_name("fpm_forward_perf.metadata.json").read_text())
    assert sidecar["schema_version"] == 7
    assert sidecar["parquet_sha256"] == sha256(parquet.read_bytes())
    assert sidecar["row_count"] == pl.read_parquet(parquet).height
    assert len(sidecar["runtime_run_ids"]) == 6


def test_the_final_folder_holds_copies_by_digest(demo: Path):
    final = demo / "current" / "final"
    finalization = json.loads((final / "finalization.json").read_text())
    assert {"plan.json", "request.json"} < finalization["files_sha256"].keys()
    for name, digest in finalization["files_sha256"].items():
        assert sha256((final / name).read_bytes()) == digest


def test_a_merged_file_that_changed_after_its_verdict_is_not_published(finished: Workspace):
    folder = finished.cell("decode-dense")
    merged = json.loads((folder / "merged.json").read_text())
    for group in merged["iteration_groups"]:
        group["wall_time"] /= 2
    (folder / "merged.json").write_text(json.dumps(merged))
    done = publish(finished)
    assert done.returncode == 2
    assert f"refused: {folder.name} merged_sha256: expected " in done.stderr


def publish(workspace: Workspace) -> subprocess.CompletedProcess[str]:
    current = workspace.root / "results/cpu-demo/current"
    script = workspace.root / "workflow/scripts/publish.py"
    command = ["python", str(script), "--plan", f"{current}/plan.json", "--readiness", f"{current}/readiness.json"]
    return subprocess.run(command, cwd=workspace.root, capture_output=True, text=True, check=False)


def test_a_plan_that_is_not_ready_is_not_published(finished: Workspace):
    """A verdict that fails blocks the table with its own words."""
    folder = finished.cell("decode-dense")
    evidence = json.loads((folder / "evidence.json").read_text()) | {"state": "failed", "failures": ["too good"]}
    (folder / "evidence.json").write_text(json.dumps(evidence))
    readiness = finished.root / "results/cpu-demo/current/readiness.json"
    plan = readiness.with_name("plan.json")
    scripts = finished.root / "workflow" / "scripts"
    for script, arguments in (
        ("assess_readiness.py", ["--plan", plan, "--output", readiness]),
        ("publish.py", ["--plan", plan, "--readiness", readiness]),
    ):
        command = ["python", str(scripts / script), *map(str, arguments)]
        done = subprocess.run(command, cwd=finished.root, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"refused: readiness: expected ready, found blocked: {folder.name}: too good" in done.stderr


def test_the_simulator_loads_single_samples_beside_medians_of_three(systems: Path, parquet: Path, tmp_path: Path):
    """The policies of an imported table, on the demo's rows."""
    shutil.copytree(systems, tmp_path / "systems")
    table = pl.read_parquet(parquet)
    is_decode = pl.col("workload_kind") == "decode"
    single, median = "dynamo_native_single_sample_v1", "kvwarm_median_of_3"
    table.with_columns(
        measurement_policy=pl.when(is_decode).then(pl.lit(median)).otherwise(pl.lit(single)),
        measurement_repeats=pl.when(is_decode).then(3).otherwise(1).cast(pl.Int64),
        warmup_repeats=pl.lit(0, pl.Int64),
        state_protocol=pl.lit(None, pl.String),
        timing_boundary=pl.lit(None, pl.String),
    ).write_parquet(copy := next(tmp_path.rglob("*.parquet")), compression="zstd")
    sidecar = next(tmp_path.rglob("*.metadata.json"))
    change = {
        "measurement_policy": "per_row_single_sample_or_median_of_3",
        "warmup_repeats": 0,
        "measurement_repeats": 1,
    }
    digest = {"parquet_sha256": sha256(copy.read_bytes())}
    sidecar.write_text(json.dumps(json.loads(sidecar.read_text()) | change | digest))
    done = load(tmp_path / "systems")
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row for row in answers if row["stored_ms"] != row["loaded_ms"]] == []
    assert len(answers) == table.height
