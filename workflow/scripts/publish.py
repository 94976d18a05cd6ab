"""Publish a ready plan as a systems root that the simulators load: one table, its sidecar, the system file."""

import argparse
import functools
import io
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import yaml

from producer.contracts import DYNAMO
from schemas.canonical import canonical_bytes, digest, parse, read_bytes, read_model, read_yaml, sha256, write_atomic
from schemas.errors import Refusal, run
from schemas.evidence import CellEvidence, Readiness
from schemas.layout import cells_folder, pair_folder, system_file
from schemas.merged import PublishedGroup, PublishedValues
from schemas.plan import FrozenCell, Plan
from schemas.system import System
from schemas.table import (
    KEY_COLUMNS,
    LEGACY_IDENTITY,
    MEDIAN_OF_3,
    MEDIAN_POLICY,
    PARTITION,
    PER_ROW_POLICY,
    ROW_SCHEMA,
    SINGLE_POLICY,
    STATE_PROTOCOL,
    TIMING_BOUNDARY,
    SeedClassification,
    Sidecar,
    TablePolicy,
)

from dense_policy import DENSE_LABEL

SEEDED = {"prefill_real_seed", "prefill_fake_prefix"}
POLICY_COLUMNS = ("measurement_policy", "warmup_repeats", "measurement_repeats", "state_protocol", "timing_boundary")
PARQUET, SIDECAR = "fpm_forward_perf.parquet", "fpm_forward_perf.metadata.json"


class Publication(NamedTuple):
    """The bytes of a published pair and its system file."""

    parquet: bytes
    sidecar: Sidecar
    system: bytes
    rows: int


def read_values(data: bytes, file: Path) -> PublishedValues:
    """What a table needs of a merged file."""
    try:
        return msgspec.json.decode(data, type=PublishedValues)
    except msgspec.MsgspecError as error:
        raise Refusal("merged artifact", "a merged artifact", error, file) from None


def published_groups(groups: list[PublishedGroup], file: Path) -> list[PublishedGroup]:
    """One group for each coordinate of a table.

    Of points that were measured at the same coordinates one counts (domain, rank artifact): the one whose contexts were
    not clamped, of clamped ones the first; of prefills without a cache the one that none was seeded for. Latency has
    no say.

    Raises:
        Refusal: any other two points at one coordinate.
    """
    by_coordinate: dict[tuple[Any, ...], list[PublishedGroup]] = {}
    for group in sorted(groups, key=_benchmark_id):
        point = group.point
        split = msgspec.json.encode([point.partition, point.rows])
        where = (point.point_type, point.batch_size, point.total_prefill_tokens, point.total_kv_read_tokens, split)
        by_coordinate.setdefault(where, []).append(group)
    kept = []
    for where, same in by_coordinate.items():
        clamped = [group for group in same if "context_clamped" in group.point.sample_reasons]
        candidates = [group for group in same if group not in clamped] or clamped[:1]
        if len(candidates) > 1 and where[0] == "prefill" and not where[3]:
            candidates = [group for group in candidates if not SEEDED & set(group.point.sample_reasons)] or candidates
        if len(candidates) > 1:
            ids = [group.benchmark_id for group in candidates]
            raise Refusal(f"points {ids}", "one point at each coordinate", f"{len(ids)} at {where[:4]}", file)
        kept += candidates
    return sorted(kept, key=_benchmark_id)


def _benchmark_id(group: PublishedGroup) -> int:
    return group.benchmark_id


class Policy(NamedTuple):
    """What a value is, in the columns of a table."""

    name: str
    warmup_repeats: int
    measurement_repeats: int
    state_protocol: str | None = None
    timing_boundary: str | None = None

    def columns(self) -> dict[str, Any]:
        return dict(zip(POLICY_COLUMNS, self, strict=True))


def policy_of(cell: FrozenCell, group: PublishedGroup, file: Path) -> Policy:
    """The policy of one row.

    Raises:
        Refusal: a median of so many steps that no consumer has a name for it.
    """
    if cell.identity.contract != DYNAMO.name:
        measurement = cell.identity.measurement
        repeats = measurement.warmup_repeats, measurement.measurement_repeats
        return Policy(MEDIAN_POLICY, *repeats, STATE_PROTOCOL, TIMING_BOUNDARY)
    steps = {fpm.kvwarm_giant_median_of for result in group.rank_results for fpm in result.fpms}
    if steps == {None}:
        return Policy(SINGLE_POLICY, 0, 1)
    if steps == {3}:
        return Policy(MEDIAN_OF_3, 0, 3)
    field = f"benchmark_id={group.benchmark_id} kvwarm_giant_median_of"
    raise Refusal(field, "3 on every rank: consumers know no other median", sorted(steps, key=str), file)


def table_policy(policies: set[Policy], plan_file: Path) -> Policy:
    """The policy of a table by those of its rows.

    Raises:
        Refusal: rows of producers that no one policy describes.
    """
    if len(policies) == 1 and next(iter(policies)).name != MEDIAN_OF_3:
        return next(iter(policies))
    if {policy.name for policy in policies} <= {SINGLE_POLICY, MEDIAN_OF_3}:
        return Policy(PER_ROW_POLICY, 0, 1)
    raise Refusal("measurement", "one protocol over all cells", sorted(policies), plan_file)


def rows_of_cell(
    plan: Plan, plan_sha256: str, cell: FrozenCell, merged: PublishedValues, evidence: CellEvidence, file: Path
) -> list[dict[str, Any]]:
    """One row per point: latency is the slowest rank's retained wall time, in milliseconds."""
    identity = cell.identity
    ranks = identity.topology.dp
    if len(evidence.formal_regimes) != len(merged.iteration_groups) * ranks:
        wanted = len(merged.iteration_groups) * ranks
        raise Refusal(f"{cell.name} formal_regimes", wanted, len(evidence.formal_regimes), file)
    labels = dict(enumerate(evidence.formal_regimes[::ranks], start=1))
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
        "global_warmup_iterations": identity.warmup_iterations or 0,
        "source_plan_sha256": plan_sha256,
        "collector_attempt_id": merged.run_id,
        "runtime_run_id": merged.run_id,
        "runtime_grid_digest": merged.grid_digest,
    }
    return [
        common
        | policy_of(cell, group, file).columns()
        | {
            "batch_size": group.point.batch_size,
            "total_prefill_tokens": group.point.total_prefill_tokens,
            "total_kv_read_tokens": group.point.total_kv_read_tokens,
            "latency_ms": group.wall_time * 1000.0,
            "kv_seed_regime": labels[group.benchmark_id],
        }
        for group in published_groups(merged.iteration_groups, file)
    ]


def build(plan_file: Path) -> Publication:
    """The pair of a plan, derived from its cells' merged artifacts and verdicts.

    Raises:
        Refusal: a cell's evidence has failed or is another cell's, two rows with one key, a latency that is no number.
    """
    plan = read_model(Plan, plan_file, "plan")
    plan_sha256 = sha256(read_bytes(plan_file, "plan"))
    tables: list[pa.Table] = []  # a cell's rows as dicts take ten times the memory
    for entry in plan.cells:
        folder = cells_folder(plan_file) / entry.name
        cell = read_model(FrozenCell, folder / "cell.json", "frozen cell")
        evidence = read_model(CellEvidence, folder / "evidence.json", "evidence")
        merged_file = folder / "merged.json"
        data = read_bytes(merged_file, "merged artifact")
        merged = read_values(data, merged_file)
        for field, found in (
            ("cell_digest", cell.digest),
            ("evidence cell_digest", evidence.cell_digest),
            ("merged cell_digest", merged.cell_digest),
        ):
            if found != entry.digest:
                raise Refusal(f"{entry.name} {field}", entry.digest, found, folder)
        if sha256(data) != evidence.merged_sha256:
            raise Refusal(f"{entry.name} merged_sha256", evidence.merged_sha256, sha256(data), merged_file)
        if evidence.state == "failed":
            raise Refusal(f"{entry.name} state", "recorded or unestablished", "failed", folder / "evidence.json")
        tables.append(table_of(rows_of_cell(plan, plan_sha256, cell, merged, evidence, merged_file)))
    # A cell is no coordinate: loaders look rows up without it, so rows that differ in it alone collide there.
    key = [name for name, _ in KEY_COLUMNS if name != "cell_id"]
    table = pa.concat_tables(tables).sort_by([(name, "ascending") for name in key])
    check_keys(table.select(key), plan_file)
    used = table.select(POLICY_COLUMNS).group_by(list(POLICY_COLUMNS)).aggregate([]).to_pylist()
    policy = table_policy({Policy(*(row[name] for name in POLICY_COLUMNS)) for row in used}, plan_file)
    parquet = parquet_bytes(table)
    sidecar = Sidecar(
        measurement_policy=cast(TablePolicy, policy.name),
        warmup_repeats=policy.warmup_repeats,
        measurement_repeats=policy.measurement_repeats,
        system=plan.system,
        backend=plan.backend,
        backend_version=plan.backend_version,
        row_count=table.num_rows,
        parquet_sha256=sha256(parquet),
        source_plan_sha256=(plan_sha256,),
        collector_attempt_ids=_distinct(table, "collector_attempt_id"),
        runtime_run_ids=_distinct(table, "runtime_run_id"),
        runtime_grid_digests=_distinct(table, "runtime_grid_digest"),
        model_paths=_distinct(table, "model_path"),
        aic_revision=plan.table_revision,
        kv_seed_classification=seed_classification(table),
    )
    return Publication(parquet, sidecar, system_bytes(plan), table.num_rows)


def table_of(rows: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(rows, schema=ROW_SCHEMA)


def check_keys(keys: pa.Table, plan_file: Path) -> None:
    """No two rows of a sorted table have one key.

    Raises:
        Refusal: the key that stands twice.
    """
    before, after = keys.slice(0, keys.num_rows - 1), keys.slice(1)
    same = functools.reduce(pc.and_, (pc.equal(before[name], after[name]) for name in keys.column_names))
    first = pc.index(same, value=True).as_py()
    if first >= 0:
        raise Refusal("row key", "each key once", keys.slice(first, 1).to_pylist()[0], plan_file)


def _distinct(table: pa.Table, column: str) -> tuple[str, ...]:
    return tuple(sorted(table[column].unique().to_pylist()))


def seed_classification(table: pa.Table) -> SeedClassification | None:
    """Exactly the cells with rows that the dense policy let in; None without such rows."""
    dense = _distinct(table.filter(pc.field("kv_seed_regime") == DENSE_LABEL), "cell_id")
    return SeedClassification(cells=dense) if dense else None


def parquet_bytes(table: pa.Table) -> bytes:
    """The table as zstd parquet; equal rows give equal bytes."""
    buffer = io.BytesIO()
    pq.write_table(table.combine_chunks(), buffer, compression="zstd")
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
