"""Publish a ready plan as a systems root that the simulators load: one table, its sidecar, the system file."""

import argparse
import io
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from schemas.canonical import canonical_bytes, digest, parse, read_bytes, read_model, read_yaml, sha256, write_atomic
from schemas.errors import Refusal, run
from schemas.evidence import CellEvidence, Readiness
from schemas.layout import cells_folder, pair_folder, system_file
from schemas.merged import MergedArtifact
from schemas.native import read_struct
from schemas.plan import FrozenCell, Plan
from schemas.system import System
from schemas.table import (
    KEY_COLUMNS,
    LEGACY_IDENTITY,
    MEDIAN_POLICY,
    PARTITION,
    ROW_SCHEMA,
    STATE_PROTOCOL,
    TIMING_BOUNDARY,
    Sidecar,
)

PARQUET, SIDECAR = "fpm_forward_perf.parquet", "fpm_forward_perf.metadata.json"


class Publication(NamedTuple):
    """The bytes of a published pair and its system file."""

    parquet: bytes
    sidecar: Sidecar
    system: bytes
    rows: int


def rows_of_cell(
    plan: Plan, plan_sha256: str, cell: FrozenCell, merged: MergedArtifact, evidence: CellEvidence
) -> list[dict[str, Any]]:
    """One row per point: latency is the slowest rank's retained wall time, in milliseconds."""
    identity = cell.identity
    labels = {row.point.benchmark_id: label for row, label in zip(merged.results, evidence.formal_regimes, strict=True)}
    common = {
        "cell_id": f"fpm-{cell.digest[:16]}",
        "model_path": plan.deployments[cell.deployment].model,
        "system": plan.system,
        "backend": plan.backend,
        "backend_version": plan.backend_version,
        "weight_quantization": identity.precision.gemm,
        "gemm_quant_mode": identity.precision.gemm,
        "moe_quant_mode": identity.precision.moe,
        "fmha_quant_mode": identity.precision.fmha,
        "comm_quant_mode": identity.precision.comm,
        "kv_cache_dtype": identity.precision.kv_cache,
        **identity.topology.model_dump(),
        "moe_backend": "auto",
        "attention_backend": "auto",
        "enable_wideep": False,
        "enable_eplb": False,
        **(LEGACY_IDENTITY if identity.execution_identity is None else identity.execution_identity.model_dump()),
        "workload_kind": identity.phase,
        "partition_policy": PARTITION,
        "runtime_backend_version": identity.runtime_backend_version,
        "fmha_resolution": "auto",
        "parallel_strategy": identity.parallel_strategy,
        "global_warmup_iterations": 0,
        "warmup_repeats": identity.measurement.warmup_repeats,
        "measurement_repeats": identity.measurement.measurement_repeats,
        "measurement_policy": MEDIAN_POLICY,
        "state_protocol": STATE_PROTOCOL,
        "timing_boundary": TIMING_BOUNDARY,
        "source_plan_sha256": plan_sha256,
        "collector_attempt_id": merged.run_id,
        "runtime_run_id": merged.run_id,
        "runtime_grid_digest": merged.grid_digest,
    }
    return [
        common
        | {
            "batch_size": group.point.batch_size,
            "total_prefill_tokens": group.point.total_prefill_tokens,
            "total_kv_read_tokens": group.point.total_kv_read_tokens,
            "latency_ms": group.wall_time * 1000.0,
            "kv_seed_regime": labels[group.benchmark_id],
        }
        for group in merged.iteration_groups
    ]


def build(plan_file: Path) -> Publication:
    """The pair of a plan, derived from its cells' merged artifacts and verdicts.

    Raises:
        Refusal: a cell's evidence has failed or is another cell's, two rows with one key, a latency that is no number.
    """
    plan = read_model(Plan, plan_file, "plan")
    plan_sha256 = sha256(read_bytes(plan_file, "plan"))
    rows: list[dict[str, Any]] = []
    repeats = set()
    for entry in plan.cells:
        folder = cells_folder(plan_file) / entry.name
        cell = read_model(FrozenCell, folder / "cell.json", "frozen cell")
        evidence = read_model(CellEvidence, folder / "evidence.json", "evidence")
        merged = read_struct(MergedArtifact, folder / "merged.json", "merged artifact")
        for field, found in (
            ("cell_digest", cell.digest),
            ("evidence cell_digest", evidence.cell_digest),
            ("merged cell_digest", merged.cell_digest),
        ):
            if found != entry.digest:
                raise Refusal(f"{entry.name} {field}", entry.digest, found, folder)
        merged_sha256 = sha256(read_bytes(folder / "merged.json", "merged artifact"))
        if merged_sha256 != evidence.merged_sha256:
            raise Refusal(f"{entry.name} merged_sha256", evidence.merged_sha256, merged_sha256, folder / "merged.json")
        if len(evidence.formal_regimes) != len(merged.results):
            labels = len(evidence.formal_regimes)
            raise Refusal(f"{entry.name} formal_regimes", len(merged.results), labels, folder / "evidence.json")
        if evidence.state == "failed":
            raise Refusal(f"{entry.name} state", "recorded or unestablished", "failed", folder / "evidence.json")
        rows.extend(rows_of_cell(plan, plan_sha256, cell, merged, evidence))
        repeats.add((cell.identity.measurement.warmup_repeats, cell.identity.measurement.measurement_repeats))
    if len(repeats) != 1:
        raise Refusal("measurement", "one protocol over all cells", sorted(repeats), plan_file)
    # A cell is no coordinate: loaders look rows up without it, so rows that differ in it alone collide there.
    key = [name for name, _ in KEY_COLUMNS if name != "cell_id"]
    rows.sort(key=lambda row: tuple(row[name] for name in key))
    for first, second in pairwise(rows):
        if all(first[name] == second[name] for name in key):
            raise Refusal("row key", "each key once", {name: first[name] for name in key}, plan_file)
    parquet = parquet_bytes(rows)
    warmups, measurements = repeats.pop()
    sidecar = Sidecar(
        warmup_repeats=warmups,
        measurement_repeats=measurements,
        system=plan.system,
        backend=plan.backend,
        backend_version=plan.backend_version,
        row_count=len(rows),
        parquet_sha256=sha256(parquet),
        source_plan_sha256=(plan_sha256,),
        collector_attempt_ids=_distinct(rows, "collector_attempt_id"),
        runtime_run_ids=_distinct(rows, "runtime_run_id"),
        runtime_grid_digests=_distinct(rows, "runtime_grid_digest"),
        model_paths=_distinct(rows, "model_path"),
        aic_revision=plan.table_revision,
    )
    return Publication(parquet, sidecar, system_bytes(plan), len(rows))


def _distinct(rows: list[dict[str, Any]], column: str) -> tuple[str, ...]:
    return tuple(sorted({row[column] for row in rows}))


def parquet_bytes(rows: list[dict[str, Any]]) -> bytes:
    """The rows as zstd parquet; equal rows give equal bytes."""
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, schema=ROW_SCHEMA), buffer, compression="zstd")
    return buffer.getvalue()


def system_bytes(plan: Plan) -> bytes:
    """The consumers' system file: ours without our own keys.

    Raises:
        Refusal: the system file is not the one that the plan was made with.
    """
    file = system_file(plan.system)
    system = parse(System, read_yaml(file, "system"), file)
    if digest(system) != plan.system_sha256:
        raise Refusal("system", plan.system_sha256, digest(system), file)
    facts = {"data_dir": f"data/{plan.system}"} | system.model_dump(include={"gpu", "node", "misc"})
    facts["misc"]["nccl_mem"] = {int(gpus): size for gpus, size in facts["misc"]["nccl_mem"].items()}
    return yaml.safe_dump(facts, sort_keys=False).encode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--readiness", type=Path, required=True)
    arguments = parser.parse_args()
    plan = read_model(Plan, arguments.plan, "plan")
    readiness = read_model(Readiness, arguments.readiness, "readiness")
    if plan.scope != "formal":
        raise Refusal("scope", "formal: a smoke run is never published", plan.scope, arguments.plan)
    if readiness.plan_sha256 != digest(plan):
        raise Refusal("plan_sha256", digest(plan), readiness.plan_sha256, arguments.readiness)
    if readiness.status != "ready":
        raise Refusal("readiness", "ready", f"{readiness.status}: {readiness.blockers[0]}", arguments.readiness)
    publication = build(arguments.plan)
    folder = pair_folder(arguments.plan.parent, plan.system, plan.backend, plan.backend_version)
    # The parquet first: a crash between the two leaves a pair whose sha256 does not match, which loaders refuse.
    write_atomic(folder / PARQUET, publication.parquet)
    write_atomic(folder / SIDECAR, canonical_bytes(publication.sidecar))
    write_atomic(arguments.plan.parent / "systems" / f"{plan.system}.yaml", publication.system)
    print(f"published {publication.rows} rows in {folder}")


if __name__ == "__main__":
    run(main)
