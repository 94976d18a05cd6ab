"""Verify the evidence of one cell: what can be derived again is derived again, and every finding is written."""

import argparse
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import UNSET

from producer.adapters import adapter_of, pins_digest
from producer.artifact import assemble
from producer.contracts import CONTRACTS
from producer.journal import Journal, read_journal
from producer.seeding import prefix_of
from producer.session import kv_seed_regime, prompts_of, repetition_requests
from producer.tokens import GENERATOR, TokenStream
from schemas.canonical import read_bytes, read_model, sha256, write_model
from schemas.errors import Refusal, run
from schemas.evidence import CellEvidence
from schemas.native import CellReceipt, MergedArtifact, RankArtifact, read_struct
from schemas.plan import FrozenCell

from merge_ranks import merge_files
from seed_regime import Case, formal_regime, stamp_conflict


class CellFiles(NamedTuple):
    """The native files of one cell, read."""

    folder: Path
    cell: FrozenCell
    receipt: CellReceipt
    journal: Journal
    artifact: RankArtifact
    merged: MergedArtifact


def read_cell(folder: Path) -> CellFiles:
    cell = read_model(FrozenCell, folder / "cell.json", "frozen cell")
    return CellFiles(
        folder,
        cell,
        read_struct(CellReceipt, folder / "receipt.json", "receipt"),
        read_journal(folder / "repetitions.jsonl", cell.digest),
        read_struct(RankArtifact, folder / "benchmark.json", "rank artifact"),
        read_struct(MergedArtifact, folder / "merged.json", "merged artifact"),
    )


def check_identity(files: CellFiles) -> Iterator[str]:
    """The files are this cell's, unchanged since the receipt, measured by the contract that the cell chose."""
    cell, identity = files.cell, files.cell.identity
    if files.folder.name != cell.name:
        yield f"cell name: expected {files.folder.name}, found {cell.name}"
    for name, expected in files.receipt.files.items():
        found = sha256(read_bytes(files.folder / name, name))
        if found != expected:
            yield f"sha256 of {name}: expected {expected} of the receipt, found {found}"
    contract = CONTRACTS.get(identity.contract)
    if contract is None or contract.protocol != identity.producer_protocol:
        yield f"contract: expected one of {sorted(CONTRACTS)} with its protocol, found {identity.contract}"
    elif contract.measurement != identity.measurement:
        yield f"measurement: expected {contract.measurement}, found {identity.measurement}"
    producer = files.artifact.measurement_protocol.get("producer", {})
    adapter = adapter_of(identity.runtime_backend_version, files.folder)
    expected_producer = {
        "contract": identity.contract,
        "protocol": identity.producer_protocol,
        "cell_digest": cell.digest,
        "vllm_package_version": identity.runtime_backend_version,
        "runtime_source_manifest_sha256": pins_digest(adapter),
        "token_generator": GENERATOR,
    }
    for field, value in expected_producer.items():
        if producer.get(field) != value:
            yield f"producer.{field}: expected {value}, found {producer.get(field)}"
    for session in files.journal.sessions:
        if session.producer != producer:
            yield f"session {session.session}: expected the artifact's producer record, found another"
        if session.engine["versions"]["vllm"] != identity.runtime_backend_version:
            found = session.engine["versions"]["vllm"]
            yield f"session {session.session} vllm: expected {identity.runtime_backend_version}, found {found}"


def check_derivation(files: CellFiles) -> Iterator[str]:
    """The artifact is what its journal says; the merged file is what the artifact says."""
    try:
        # Through JSON, as the file went: nested structs of free blocks become plain values.
        derived = msgspec.json.decode(msgspec.json.encode(assemble(files.cell, files.journal)), type=RankArtifact)
    except ValueError as error:
        yield f"repetitions.jsonl: {error}"
        return
    for field in derived.__struct_fields__:
        if getattr(derived, field) != getattr(files.artifact, field):
            yield f"benchmark.json {field}: expected what repetitions.jsonl holds, found another value"
    try:
        merged = merge_files(files.cell, files.folder / "receipt.json", [files.folder / "benchmark.json"])
    except Refusal as refusal:
        yield f"merge: {refusal}"
        return
    for field in merged.__struct_fields__:
        if getattr(merged, field) != getattr(files.merged, field):
            yield f"merged.json {field}: expected what the rank artifacts hold, found another value"


def check_points(files: CellFiles) -> Iterator[str]:
    """Every point ran as often as its contract says, with the prompts that its specification gives."""
    cell = files.cell
    contract = CONTRACTS.get(cell.identity.contract)
    if contract is None:
        return
    points = cell.points.points()
    seed = files.artifact.measurement_protocol.get("producer", {}).get("token_seed", "")
    stream = TokenStream(seed, cell.vocab_size)
    for line in sorted(files.journal.points, key=lambda line: line.benchmark_id):
        where = f"benchmark_id={line.benchmark_id}"
        if not 1 <= line.benchmark_id <= len(points):
            yield f"{where}: expected 1..{len(points)}"
            continue
        point = points[line.benchmark_id - 1]
        for name, found, expected in (
            ("measurements", len(line.repetitions), contract.measurement.measurement_repeats),
            ("warm-ups", len(line.warmup_ordinals), contract.measurement.warmup_repeats),
        ):
            if found != expected:
                yield f"{where} {name}: expected {expected}, found {found}"
        if len(line.rejections) > contract.max_rejections:
            yield f"{where} rejections: expected at most {contract.max_rejections}, found {len(line.rejections)}"
        ordinals = [*line.warmup_ordinals, *(r.ordinal for r in line.repetitions)]
        ordinals += [rejection.ordinal for rejection in line.rejections]
        if sorted(ordinals) != list(range(len(ordinals))):
            yield f"{where} ordinals: expected each of 0..{len(ordinals) - 1} once, found {sorted(ordinals)}"
        if line.kv_seed_regime != kv_seed_regime(point):
            yield f"{where} kv_seed_regime: expected {kv_seed_regime(point)}, found {line.kv_seed_regime}"
        prefix = prefix_of(point, cell.cache_hit_alignment_tokens)
        for index, repetition in enumerate(line.repetitions):
            requests = repetition_requests(stream, cell.identity.phase, point, prefix, repetition.ordinal)
            derived = prompts_of(requests)
            if derived.sha256 != repetition.prompts_sha256:
                yield f"{where} repetition {repetition.ordinal}: prompts are not those of the specification"
            if index == 1 and derived != line.prompts:
                yield f"{where}: recorded prompts are not those of measurement 1"


def classify(files: CellFiles) -> tuple[list[str], list[str]]:
    """Formal label of each row of the merged file, and the contradictions found on the way."""
    labels, conflicts = [], []
    kvwarm = None if files.merged.kvwarm is UNSET else files.merged.kvwarm
    for row in files.merged.results:
        where = f"benchmark_id={row.point.benchmark_id}"
        conflict = stamp_conflict(row.kv_seed_regime, row.point.sample_reasons)
        if conflict:
            conflicts.append(f"{where} {conflict}")
        stamps = frozenset(row.point.sample_reasons)
        try:
            labels.append(formal_regime(Case(row.point.point_type, row.point.total_kv_read_tokens, stamps, kvwarm)))
        except ValueError as error:
            conflicts.append(f"{where} {error}")
    return labels, conflicts


def gaps_of(files: CellFiles) -> list[str]:
    """What the artifact does not establish; reported, never a reason to refuse."""
    eager = files.cell.identity.engine.enforce_eager
    unobserved = {
        row.point.benchmark_id
        for row in files.artifact.results
        for fpm in row.fpms
        if fpm.benchmark_measurement is not UNSET
        for raw in fpm.benchmark_measurement.raw_fpms
        if raw.benchmark_sample.cudagraph.status == "unavailable"
    }
    return [f"graph dispatch unobserved at {len(unobserved)} points"] if unobserved and not eager else []


def verify(files: CellFiles) -> CellEvidence:
    """The verdict on one cell, with all findings."""
    labels, conflicts = classify(files)
    failures = [*check_identity(files), *check_derivation(files), *check_points(files), *conflicts]
    gaps = gaps_of(files)
    return CellEvidence(
        cell_digest=files.cell.digest,
        phase=files.cell.identity.phase,
        state="failed" if failures else "unestablished" if gaps else "recorded",
        failures=tuple(failures),
        gaps=tuple(gaps),
        points=len(files.merged.results),
        native_regime_counts=dict(sorted(Counter(row.kv_seed_regime for row in files.merged.results).items())),
        formal_regime_counts=dict(sorted(Counter(labels).items())),
        formal_regimes=tuple(labels),
        merged_sha256=sha256(read_bytes(files.folder / "merged.json", "merged artifact")),
        run_id=files.merged.run_id,
        grid_digest=files.merged.grid_digest,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="folder of the cell")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    evidence = verify(read_cell(arguments.folder))
    write_model(arguments.output, evidence)
    print(f"{arguments.folder.name}: {evidence.state}")
    for failure in evidence.failures:
        print(f"  {failure}")


if __name__ == "__main__":
    run(main)
