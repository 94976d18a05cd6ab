"""Verify the evidence of one cell: what can be derived again is derived again, and every finding is written."""

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec import UNSET

from producer.journal import read_journal
from schemas.canonical import read_bytes, read_model, sha256, write_model
from schemas.errors import Refusal, run
from schemas.evidence import CellEvidence
from schemas.imported import ImportReceipt, read_receipt
from schemas.layout import rank_files
from schemas.merged import MergedArtifact, merged_bytes
from schemas.native import CudagraphObservation, NativePoint, RankArtifact, read_struct
from schemas.plan import FrozenCell

from dense_policy import read_config
from drift import drifting_points
from import_checks import check_imported, gaps_of_imported
from journal_checks import MeasuredCell, check_measured, differing
from launch_binding import read_accepted
from merge_ranks import Ranks, cell_findings, findings, merge
from seed_regime import classify


class CellFiles(NamedTuple):
    """The files of a cell that the verdict rests on."""

    folder: Path
    cell: FrozenCell
    receipt_files: dict[str, str]
    ranks: Ranks
    origin: MeasuredCell | ImportReceipt


def read_cell(folder: Path, accepted: Sequence[Path]) -> CellFiles:
    """A cell's files. `accepted` are the accepted profile and, unless it is declared, the probe's record of the phase;
    of an imported cell nothing is bound to them."""
    cell = read_model(FrozenCell, folder / "cell.json", "frozen cell")
    receipt = read_receipt(folder / "receipt.json")
    if receipt.cell_digest != cell.digest:
        raise Refusal("cell_digest", cell.digest, receipt.cell_digest, folder / "receipt.json")
    ranks = Ranks.read(rank_files(folder, cell.identity.topology.dp))
    if isinstance(receipt, ImportReceipt):
        return CellFiles(folder, cell, receipt.files, ranks, receipt)
    journal = read_journal(folder / "repetitions.jsonl", cell.digest)
    bound = read_accepted(accepted, cell.name)
    return CellFiles(folder, cell, receipt.files, ranks, MeasuredCell(folder, cell, receipt, journal, ranks, bound))


def check_merged(merged: MergedArtifact, merged_sha256: str, file: Path) -> Iterator[str]:
    """The merged file is what the rank artifacts say. It is read only when its bytes are not."""
    if merged_sha256 != sha256(merged_bytes(merged)):
        fields = list(differing(merged, read_struct(MergedArtifact, file, "merged artifact")))
        for field in fields or ["layout"]:
            yield f"merged.json {field}: expected what the rank artifacts hold, found another value"


def dispatch_gap(point: NativePoint, seen: list[CudagraphObservation]) -> str:
    """What the observed graph dispatch of a point's samples leaves open; empty when it is what its point expects.

    vLLM's statistics name the mode as `FULL` or `CUDAGraphMode.FULL`, by release.
    """
    if any(sample.status == "unavailable" for sample in seen):
        return "unobserved"
    found = {(str(sample.runtime_mode).rsplit(".", 1)[-1], sample.num_paddings) for sample in seen}
    expected = {(point.expected_cudagraph_mode, point.padding_tokens or 0)}
    if found == expected:
        return ""
    return f"{sorted(found)} (mode, padding) instead of {sorted(expected)}"


def dispatch_gaps(artifacts: Sequence[RankArtifact]) -> list[str]:
    """What the graph dispatch of all points leaves open."""
    points: dict[str, set[int]] = {}
    for artifact in artifacts:
        for row in artifact.results:
            for fpm in row.fpms:
                if fpm.benchmark_measurement is not UNSET:
                    seen = [raw.benchmark_sample.cudagraph for raw in fpm.benchmark_measurement.raw_fpms]
                    points.setdefault(dispatch_gap(row.point, seen), set()).add(row.point.benchmark_id)
    return [f"graph dispatch {gap} at {len(ids)} points" for gap, ids in sorted(points.items()) if gap]


def verify(files: CellFiles) -> CellEvidence:
    """The verdict on one cell, with all findings."""
    cell, artifacts = files.cell, files.ranks.artifacts
    merged_file, labels, drifting = files.folder / "merged.json", list[str](), tuple[str, ...]()
    merged_sha256 = sha256(read_bytes(merged_file, "merged artifact"))
    receipt_file = files.folder / "receipt.json"
    refusals = (*cell_findings(cell, receipt_file, files.receipt_files, files.ranks), *findings(files.ranks))
    failures = [f"merge: {refusal}" for refusal in refusals]
    if isinstance(files.origin, MeasuredCell):
        failures += check_measured(files.origin)
        gaps: list[str] = []
    else:
        failures += check_imported(cell, artifacts, files.folder)
        gaps = list(gaps_of_imported(cell, artifacts))
    if not cell.identity.engine.enforce_eager:
        gaps += dispatch_gaps(artifacts)
    if not refusals:
        merged = merge(files.ranks, cell.digest)
        failures += check_merged(merged, merged_sha256, merged_file)
        engines = [None if artifact.engine is UNSET else artifact.engine for artifact in artifacts]
        classified = classify(cell, merged, engines, read_config(cell))
        labels = classified.labels
        failures += classified.conflicts
        gaps += [f"dense policy: {line}" for line in classified.unmet]
        drifting = tuple(drifting_points(merged))
    # All ranks of a point agree: it counts once, however many ranks ran it.
    ranks = len(artifacts)
    native = Counter(str(row.kv_seed_regime or "unrecorded") for row in artifacts[0].results)
    return CellEvidence(
        cell_digest=cell.digest,
        phase=cell.identity.phase,
        state="failed" if failures else "unestablished" if gaps else "recorded",
        failures=tuple(failures),
        gaps=tuple(gaps),
        drifting=drifting,
        points=len(artifacts[0].iteration_groups),
        native_regime_counts=dict(sorted(native.items())),
        formal_regime_counts=dict(sorted(Counter(labels[::ranks]).items())),
        formal_regimes=tuple(labels),
        merged_sha256=merged_sha256,
        run_id=artifacts[0].run_id,
        grid_digest=str(artifacts[0].grid_digest),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="folder of the cell")
    parser.add_argument(
        "--accepted", type=Path, nargs="*", default=[], help="accepted profile, and the probe's record of the phase"
    )
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    evidence = verify(read_cell(arguments.folder, arguments.accepted))
    write_model(arguments.output, evidence)
    print(f"{arguments.folder.name}: {evidence.state}")
    for line in (*evidence.failures, *evidence.gaps, *evidence.drifting):
        print(f"  {line}")


if __name__ == "__main__":
    run(main)
