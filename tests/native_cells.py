"""A campaign of cells that Dynamo 1.7 measured, of any size: for figures of what reads and judges them.

Made from two real artifacts (tests/fixtures/native): one rank is the dense model's, several are a mixture of experts
with one data-parallel rank each. Every point is a decode point with ten raw samples, retained as the upper median of
the last nine. Digests of prompts, points and grid, forward indices, intervals and sums are what Dynamo would write.

    python tests/native_cells.py FOLDER --cells 1 --points 577 --ranks 4
"""

import argparse
import copy
import random
import sys
from array import array
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from conftest import ROOT
from native_samples import cell_of, sample

from producer.planning import entry_of
from schemas.canonical import digest, parse, read_yaml, sha256, write_atomic, write_model
from schemas.imported import IMPORTED, ImportReceipt
from schemas.layout import rank_files, system_file
from schemas.native import read_struct, write_struct
from schemas.plan import DeploymentPlan, FrozenCell, Plan
from schemas.system import System

sys.path.insert(0, str(ROOT / "workflow" / "scripts"))
from import_native import import_cell

SAMPLES = 10
BATCHES = (8, 4, 2, 1)
SHORTEST = 16
"""Tokens of the shortest context; those of one batch size are a token apart."""
STEP_SECONDS = 0.004
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 1024,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-05,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
EXPERTS = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


class Kind(NamedTuple):
    """What a cell is made from: the sample, and what its rows say of their cache."""

    sample: str
    config: dict[str, Any]
    regime: str
    stamps: tuple[str, ...]
    change: dict[str, Any]
    """Fields of the frozen cell's identity."""


def kind_of(ranks: int) -> Kind:
    if ranks == 1:
        return Kind(
            "d17_dense_decode_median_clamped", CONFIG, "skip:dense_model_content_insensitive", (), {"topology": {}}
        )
    topology = {"dp": ranks, "moe_ep": ranks}
    change = {"topology": topology, "parallel_strategy": "dep"}
    return Kind("d17_moe_swa_native_decode", CONFIG | EXPERTS, "real_kv", ("kvwarm_real_kv",), change)


def coordinates(points: int) -> list[tuple[int, int]]:
    """(batch size, tokens of each context), in Dynamo's order: the largest batch and the longest context first."""
    pairs = [(BATCHES[index % len(BATCHES)], SHORTEST + index // len(BATCHES)) for index in range(points)]
    return sorted(pairs, reverse=True)


def point(benchmark_id: int, batch: int, context: int, reasons: list[str]) -> dict[str, Any]:
    return {
        "point_type": "decode",
        "benchmark_id": benchmark_id,
        "total_prefill_tokens": 0,
        "total_kv_read_tokens": batch * context,
        "batch_size": batch,
        "expected_cudagraph_mode": "NONE",
        "expected_capture_size": None,
        "padding_tokens": None,
        "sample_reasons": reasons,
        "partition": None,
        "rows": None,
    }


def point_key(of: dict[str, Any]) -> str:
    fields = ("point_type", "batch_size", "total_prefill_tokens", "total_kv_read_tokens", "partition", "rows")
    return digest({field: of[field] for field in fields})


def scheduled(batch: int, context: int) -> dict[str, Any]:
    return {
        "num_prefill_requests": 0,
        "sum_prefill_tokens": 0,
        "var_prefill_length": 0.0,
        "sum_prefill_kv_tokens": 0,
        "num_decode_requests": batch,
        "sum_decode_kv_tokens": batch * context,
        "var_decode_kv_tokens": 0.0,
    }


QUEUED = {
    "num_prefill_requests": 0,
    "sum_prefill_tokens": 0,
    "var_prefill_length": 0.0,
    "num_decode_requests": 0,
    "sum_decode_kv_tokens": 0,
    "var_decode_kv_tokens": 0.0,
}


def prompts(kind: Kind, rank: int, batch: int, context: int) -> dict[str, Any]:
    """Of a fake prefix the ids are Dynamo's seeded ones; those of a real one come from its dataset, here any others."""
    real = kind.regime == "real_kv"
    admitted = context - 1
    lengths = digest([admitted] * batch)
    requests = []
    for slot in range(batch):
        tokens = admitted if real else admitted + 1
        stream = random.Random(f"content-v1:0:dp{rank}:decode:{lengths}:slot{slot}")
        ids = array("I", stream.choices(range(1, CONFIG["vocab_size"]), k=tokens))
        requests.append({"slot": slot, "num_tokens": tokens, "sha256": sha256(ids.tobytes())})
    return {"status": "recorded", "requests": requests, "sha256": digest(requests)}


def warmups(records: list[dict[str, Any]], replicas: list[dict[str, Any]], contexts: list[int]) -> list[dict[str, Any]]:
    """The global warm-up, and the discarded replica of each batch size before all points."""
    first, shape = records[0], records[1]
    ledger = [first]
    start = first["forward_index_end"]
    for replica, context in zip(replicas, contexts, strict=True):
        batch = replica["batch_size"]
        ledger.append(
            shape
            | {
                "requested_shape": replica,
                "forward_index_start": start,
                "forward_index_end": start + SAMPLES,
                "observed_forward_count": SAMPLES,
                "first_scheduled_requests": scheduled(batch, context - 1),
                "last_scheduled_requests": scheduled(batch, context + SAMPLES - 2),
            }
        )
        start += SAMPLES
    return ledger


def retained(
    kind: Kind, rank: int, of: dict[str, Any], grid_digest: str, ledger: list[dict[str, Any]], clock: float
) -> tuple[dict[str, Any], float]:
    """The forward-pass metric of one point on one rank, and the clock after it."""
    benchmark_id, batch = of["benchmark_id"], of["batch_size"]
    context = of["total_kv_read_tokens"] // batch
    noise = random.Random(f"{rank}:{benchmark_id}")
    forward = ledger[-1]["forward_index_end"] + (benchmark_id - 1) * SAMPLES
    common = {"version": 1, "worker_id": "", "dp_rank": rank, "counter_id": benchmark_id}
    raw = []
    for index in range(SAMPLES):
        end = clock + STEP_SECONDS * noise.uniform(0.9, 1.1)
        sample_fields = {
            "sample_index": index,
            "forward_index": forward + index,
            "timing": {
                "basis": "inter_output" if index else "schedule_to_output",
                "start_monotonic": clock,
                "end_monotonic": end,
            },
            "cudagraph": {
                "status": "observed",
                "runtime_mode": "NONE",
                "num_unpadded_tokens": batch,
                "num_padded_tokens": batch,
                "num_paddings": 0,
            },
        }
        counts = {"scheduled_requests": scheduled(batch, context - 1 + index), "queued_requests": QUEUED}
        raw.append(common | {"wall_time": end - clock} | counts | {"benchmark_sample": sample_fields})
        clock = end
    walls = sorted(each["wall_time"] for each in raw[1:])
    fpm = common | {
        "wall_time": walls[len(walls) // 2],
        "scheduled_requests": scheduled(batch, context),
        "queued_requests": QUEUED,
        "kvwarm_giant_median_of": SAMPLES - 1,
        "kvwarm_steady_sample": True,
        "benchmark_measurement": {
            "schema_version": 1,
            "point_key": point_key(of),
            "dp_rank": rank,
            "prompts": prompts(kind, rank, batch, context),
            "preparation": {
                "grid_digest": grid_digest,
                "completed_points_before": benchmark_id - 1,
                "kv_seed_regime": kind.regime,
                "warmup_records_before": len(ledger),
            },
            "expected_internal_samples": SAMPLES,
            "raw_fpms": raw,
            "estimate": {"method": "adjacent_upper_median", "raw_sample_indices": list(range(1, SAMPLES))},
        },
    }
    return fpm, clock


def documents(points: int, ranks: int, model: str) -> Iterator[dict[str, Any]]:
    """The artifact of each rank, as plain values; every one holds all ranks' groups."""
    kind = kind_of(ranks)
    template = copy.deepcopy(sample(kind.sample))
    pairs = coordinates(points)
    reasons = ["explicit", "cudagraph_disabled", "geometric_axis"]
    longest: dict[int, int] = {}
    for batch, context in pairs:
        longest.setdefault(batch, context)
    replicas = [
        point(points + number, batch, context, ["eager_warmup"])
        for number, (batch, context) in enumerate(longest.items(), 1)
    ]
    declared = [point(number, *pair, reasons) for number, pair in enumerate(pairs, 1)]
    grid_digest = digest([*replicas, *declared])
    stamped = [each | {"sample_reasons": [*reasons, *kind.stamps]} for each in declared]
    ledger = warmups(template["warmup_evidence"]["records"], replicas, list(longest.values()))

    fpms: list[list[dict[str, Any]]] = []
    elapsed = []
    for rank in range(ranks):
        clock = start = 1000.0 + rank
        own = []
        for each in stamped:
            fpm, clock = retained(kind, rank, each, grid_digest, ledger, clock)
            own.append(fpm)
        fpms.append(own)
        elapsed.append(clock - start + 1.0)
    groups = [
        {
            "benchmark_id": each["benchmark_id"],
            "point": each,
            "expected_dp_ranks": list(range(ranks)),
            "complete": True,
            "wall_time": max(own[index]["wall_time"] for own in fpms),
            "rank_results": [{"dp_rank": rank, "fpms": [own[index]]} for rank, own in enumerate(fpms)],
        }
        for index, each in enumerate(stamped)
    ]
    executed = [*replicas, *declared]
    kvwarm = template["kvwarm"] | {"giant_kv_threshold": 0, "giant_kv_repeats": SAMPLES - 1}
    kvwarm["points_real_kv" if kind.stamps else "points_gate_skipped"] = len(executed)
    if kind.stamps:
        kvwarm["stages"] = [
            {
                "batch": each["batch_size"],
                "benchmark_id": each["benchmark_id"],
                "total_kv_read_tokens": each["total_kv_read_tokens"],
                "depth": each["total_kv_read_tokens"] // each["batch_size"] - 1,
                "build_seconds": 0.01,
            }
            for each in executed
        ]
    protocol = copy.deepcopy(template["measurement_protocol"])
    protocol["preparation"] |= {"giant_kv_threshold": 0, "giant_kv_repeats": SAMPLES - 1}
    engine = template["engine"]
    engine["model"]["model"] = model
    began = datetime.fromisoformat(template["timing"]["started_at"])
    for rank, (seconds, file) in enumerate(zip(elapsed, rank_files(Path("results"), ranks), strict=True)):
        parallel = engine["parallel"] | {"data_parallel_size": ranks, "data_parallel_rank": rank}
        ended = began + timedelta(seconds=seconds)
        yield template | {
            "kvwarm": kvwarm,
            "grid_digest": grid_digest,
            "timing": {
                "started_at": template["timing"]["started_at"],
                "completed_at": ended.isoformat(timespec="microseconds").replace("+00:00", "Z"),
                "benchmark_elapsed_seconds": seconds,
                "measured_iteration_seconds": sum(group["wall_time"] for group in groups),
            },
            "dp": {"rank": rank, "size": ranks},
            "synchronization": {
                "enabled": ranks > 1,
                "coordinator_rank": 0,
                "port": 20380 + ranks if ranks > 1 else None,
            },
            "coverage": {"expected_points": points, "completed_points": points, "skipped_points": 0},
            "config": template["config"] | {"output_path": str(file)},
            "measurement_protocol": protocol,
            "warmup_evidence": {"status": "recorded", "records": ledger},
            "engine": engine | {"parallel": parallel},
            "results": [
                {"point": each, "kv_seed_regime": kind.regime, "fpms": [fpm]}
                for each, fpm in zip(stamped, fpms[rank], strict=True)
            ],
            "iteration_groups": groups,
        }


def write_artifacts(folder: Path, points: int, ranks: int, model: Path) -> FrozenCell:
    """The rank artifacts of a cell as Dynamo leaves them, and the cell that asks for them.

    577 points are 23 MB, and 228 MB of four ranks, since each file holds all ranks' groups.
    """
    for file, document in zip(rank_files(folder, ranks), documents(points, ranks, str(model)), strict=True):
        write_atomic(file, msgspec.json.format(msgspec.json.encode(document), indent=2))
    kind = kind_of(ranks)
    return cell_of(document, **kind.change | {"model_config_sha256": digest(kind.config)})


def cell_number(cell: FrozenCell, number: int) -> FrozenCell:
    """The same cell of another deployment and revision: another digest."""
    identity = cell.identity.model_copy(update={"model_revision": f"r{number}"})
    return cell.model_copy(update={"deployment": f"m{number}", "identity": identity})


def link_cell(source: Path, folder: Path, cell: FrozenCell) -> None:
    """The imported files of one cell as those of another: the same bytes, once on the disk."""
    for file in (*source.glob("benchmark*.json"), *source.glob(f"{IMPORTED}/*")):
        linked = folder / file.relative_to(source)
        linked.parent.mkdir(parents=True, exist_ok=True)
        linked.hardlink_to(file)
    receipt = read_struct(ImportReceipt, source / "receipt.json", "receipt")
    write_struct(folder / "receipt.json", msgspec.structs.replace(receipt, cell_digest=cell.digest))
    write_model(folder / "cell.json", cell)


def plan_of(cells: list[FrozenCell]) -> Plan:
    identity = cells[0].identity
    system = parse(System, read_yaml(system_file(identity.system), "system"), system_file(identity.system))
    points = cells[0].points.points()
    return Plan(
        scope="formal",
        system=identity.system,
        system_sha256=digest(system),
        backend="vllm",
        backend_version=identity.runtime_backend_version,
        runtime_backend_version=identity.runtime_backend_version,
        deployments={
            cell.deployment: DeploymentPlan(
                model=f"models/{cell.deployment}",
                probe_digest=cell.identity.probe_digest,
                profile_sha256=cell.identity.probe_digest,
                points_sha256=cell.identity.points_sha256,
                origin="manifest",
                prefill_points=0,
                decode_points=len(points),
                dropped={},
                contract=cell.identity.contract,
                peak_blocks=1,
                estimated_blocks=1,
                free_blocks=cell.free_blocks,
            )
            for cell in cells
        },
        cells=tuple(map(entry_of, cells)),
    )


def write_campaign(root: Path, cells: int, points: int, ranks: int) -> Path:
    """A campaign of equal cells, their artifacts imported and not yet judged; its plan file.

    `artifacts/` holds what was imported, `model/config.json` the model's config.
    """
    write_atomic(root / "model" / "config.json", msgspec.json.encode(kind_of(ranks).config))
    asked = write_artifacts(root / "artifacts", points, ranks, root / "model")
    frozen = [cell_number(asked, number) for number in range(cells)]
    first = root / "cells" / frozen[0].name
    import_cell(frozen[0], root / "artifacts", first)
    for cell in frozen[1:]:
        link_cell(first, root / "cells" / cell.name, cell)
    plan_file = root / "plan" / "plan.json"
    write_model(plan_file, plan_of(frozen))
    return plan_file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cells", type=int, default=1)
    parser.add_argument("--points", type=int, default=577)
    parser.add_argument("--ranks", type=int, default=1)
    arguments = parser.parse_args()
    print(write_campaign(arguments.folder, arguments.cells, arguments.points, arguments.ranks))


if __name__ == "__main__":
    main()
