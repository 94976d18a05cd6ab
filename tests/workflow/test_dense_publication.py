"""Rows of the dense policy in the published pair: the sidecar names their cells, and the consumers agree."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import CONSUMER, ROOT, load
from pydantic import ValidationError

from schemas.canonical import canonical_bytes, sha256
from schemas.table import LEGACY_IDENTITY, PARTITION, SeedClassification, Sidecar

from publish import PARQUET, SIDECAR, parquet_bytes, seed_classification, table_of

DENSE = "skip:dense_model_content_insensitive"
ROW: dict[str, Any] = {
    "model_path": "config/models/qwen3-tiny",
    "system": "cpu-2core",
    "backend": "vllm",
    "backend_version": "0.32.0",
    "weight_quantization": "bfloat16",
    "gemm_quant_mode": "bfloat16",
    "moe_quant_mode": "bfloat16",
    "fmha_quant_mode": "bfloat16",
    "comm_quant_mode": "half",
    "kv_cache_dtype": "bfloat16",
    **dict.fromkeys(("tp", "pp", "dp", "moe_tp", "moe_ep", "cp"), 1),
    "moe_backend": "auto",
    "attention_backend": "auto",
    "enable_wideep": False,
    "enable_eplb": False,
    **LEGACY_IDENTITY,
    "partition_policy": PARTITION,
    "runtime_backend_version": "0.32.0",
    "fmha_resolution": "auto",
    "parallel_strategy": "single",
    "global_warmup_iterations": 5,
    "warmup_repeats": 0,
    "measurement_repeats": 1,
    "measurement_policy": "dynamo_native_single_sample_v1",
    "source_plan_sha256": "a" * 64,
    "collector_attempt_id": "b" * 32,
    "runtime_run_id": "b" * 32,
    "runtime_grid_digest": "c" * 64,
}


def decode(cell: str, read: int, regime: str) -> dict[str, Any]:
    """A decode row of one request that reads `read` tokens."""
    point = {"workload_kind": "decode", "batch_size": 1, "total_prefill_tokens": 0, "total_kv_read_tokens": read}
    return ROW | point | {"cell_id": cell, "latency_ms": 10.0 + read / 1024, "kv_seed_regime": regime}


def prefill(cell: str, new: int) -> dict[str, Any]:
    point = {"workload_kind": "prefill", "batch_size": 1, "total_prefill_tokens": new, "total_kv_read_tokens": 0}
    return ROW | point | {"cell_id": cell, "latency_ms": 20.0 + new / 1024, "kv_seed_regime": "n/a"}


def published(root: Path, rows: list[dict[str, Any]], classification: SeedClassification | None) -> Path:
    """A systems root with the pair of `rows`, of Dynamo's own measurement policy; the pair's folder."""
    parquet = parquet_bytes(table_of(rows))
    sidecar = Sidecar(
        measurement_policy="dynamo_native_single_sample_v1",
        warmup_repeats=0,
        measurement_repeats=1,
        system="cpu-2core",
        backend="vllm",
        backend_version="0.32.0",
        row_count=len(rows),
        parquet_sha256=sha256(parquet),
        source_plan_sha256=("a" * 64,),
        collector_attempt_ids=("b" * 32,),
        runtime_run_ids=("b" * 32,),
        runtime_grid_digests=("c" * 64,),
        model_paths=("config/models/qwen3-tiny",),
        aic_revision="by-hand",
        kv_seed_classification=classification,
    )
    pair = root / "data" / "cpu-2core" / "vllm" / "0.32.0"
    pair.mkdir(parents=True)
    (pair / PARQUET).write_bytes(parquet)
    (pair / SIDECAR).write_bytes(canonical_bytes(sidecar))
    system = yaml.safe_load((ROOT / "config" / "systems" / "cpu-2core.yaml").read_text())
    facts = {"data_dir": "data/cpu-2core"} | {key: system[key] for key in ("gpu", "node", "misc")}
    facts["misc"]["nccl_mem"] = {int(gpus): size for gpus, size in facts["misc"]["nccl_mem"].items()}
    (root / "cpu-2core.yaml").write_text(yaml.safe_dump(facts))
    return pair


def judged(pair: Path) -> subprocess.CompletedProcess[str]:
    """What the consumers' own validator says of the classification."""
    assert CONSUMER.exists(), "the consumer's environment is missing: make consumer"
    command = [str(CONSUMER), str(ROOT / "tests" / "consumer_classification.py"), str(pair)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


ROWS = [
    *(prefill("fpm-1", new) for new in (16, 64)),
    *(decode("fpm-3", read, DENSE) for read in (128, 256)),
    *(decode("fpm-2", read, DENSE) for read in (512, 1024)),
]
"""A prefill cell and two decode cells over synthetic KV."""


def test_the_sidecar_names_the_dense_cells_in_order():
    assert seed_classification(table_of(ROWS)) == SeedClassification(
        policy="dense_full_attention_v1", cells=("fpm-2", "fpm-3")
    )


def test_a_table_without_dense_rows_has_no_classification(tmp_path: Path):
    rows = [decode("fpm-1", 128, "real_kv"), decode("fpm-1", 256, "fake_fallback")]
    assert seed_classification(table_of(rows)) is None
    pair = published(tmp_path, rows, seed_classification(table_of(rows)))
    assert "kv_seed_classification" not in json.loads((pair / SIDECAR).read_text())


def test_a_classification_of_no_cell_is_none():
    with pytest.raises(ValidationError, match="at least 1 item"):
        SeedClassification(cells=())


def test_the_simulator_gets_every_dense_latency_back_exactly(tmp_path: Path):
    published(tmp_path, ROWS, seed_classification(table_of(ROWS)))
    done = load(tmp_path)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [answer["stored_ms"] for answer in answers] == [row["latency_ms"] for row in ROWS]
    assert [answer["loaded_ms"] for answer in answers] == [row["latency_ms"] for row in ROWS]


def test_the_simulator_finds_no_measurement_in_rows_that_fell_back(tmp_path: Path):
    """So the label matters: the same rows under the other one answer nothing."""
    rows = [row | {"kv_seed_regime": "fake_fallback"} if row["workload_kind"] == "decode" else row for row in ROWS]
    published(tmp_path, rows, None)
    done = load(tmp_path)
    assert done.returncode != 0
    assert "no genuine measurements" in done.stderr


def test_the_consumers_validator_takes_the_same_cells_for_dense(tmp_path: Path):
    done = judged(published(tmp_path, ROWS, seed_classification(table_of(ROWS))))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["fpm-2", "fpm-3"]


@pytest.mark.parametrize(
    ("rows", "classification"),
    [
        (ROWS, None),
        (ROWS, SeedClassification(cells=("fpm-2",))),
        (ROWS, SeedClassification(cells=("fpm-1", "fpm-2", "fpm-3"))),
        ([decode("fpm-1", 128, "real_kv")], SeedClassification(cells=("fpm-1",))),
    ],
)
def test_the_consumers_validator_refuses_any_other_set(tmp_path: Path, rows, classification):
    done = judged(published(tmp_path, rows, classification))
    assert done.returncode != 0
    assert "kv_seed_classification" in done.stderr or "seed" in done.stderr, done.stderr
