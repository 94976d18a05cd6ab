"""Assess a plan: is every cell measured, verified, and the plan's own? Read-only."""

import argparse
from pathlib import Path

from schemas.canonical import read_bytes, read_model, sha256, write_model
from schemas.errors import run
from schemas.evidence import CellEvidence, CellReadiness, Readiness
from schemas.layout import cells_folder
from schemas.plan import CellEntry, Plan


def assess_cell(entry: CellEntry, folder: Path) -> CellReadiness:
    """One cell against its entry in the plan."""
    evidence_file, merged_file = folder / "evidence.json", folder / "merged.json"
    absent = [file.name for file in (evidence_file, merged_file) if not file.exists()]
    if absent:
        return CellReadiness(
            name=entry.name,
            cell_digest=entry.digest,
            status="incomplete",
            blockers=(f"{entry.name}: {', '.join(absent)} missing",),
            native_regime_counts={},
            formal_regime_counts={},
            direct_eligible_points=0,
        )
    evidence = read_model(CellEvidence, evidence_file, "evidence")
    merged = sha256(read_bytes(merged_file, "merged artifact"))
    eligible = evidence.points - evidence.formal_regime_counts.get("fake_fallback", 0)
    blockers = [f"{entry.name}: {failure}" for failure in evidence.failures]
    for field, expected, found in (
        ("cell_digest", entry.digest, evidence.cell_digest),
        ("phase", entry.phase, evidence.phase),
        ("points", entry.points, evidence.points),
        ("merged_sha256", merged, evidence.merged_sha256),
    ):
        if expected != found:
            blockers.append(f"{entry.name} {field}: expected {expected}, found {found}")
    if not eligible:
        blockers.append(f"{entry.name}: no point is eligible for direct use")
    return CellReadiness(
        name=entry.name,
        cell_digest=entry.digest,
        status="blocked" if blockers else "ready",
        blockers=tuple(blockers),
        native_regime_counts=evidence.native_regime_counts,
        formal_regime_counts=evidence.formal_regime_counts,
        direct_eligible_points=eligible,
    )


def assess(plan_file: Path) -> Readiness:
    plan = read_model(Plan, plan_file, "plan")
    cells = tuple(assess_cell(entry, cells_folder(plan_file) / entry.name) for entry in plan.cells)
    states = {cell.status for cell in cells}
    return Readiness(
        scope=plan.scope,
        plan_sha256=sha256(read_bytes(plan_file, "plan")),
        status="blocked" if "blocked" in states else "incomplete" if "incomplete" in states else "ready",
        blockers=tuple(blocker for cell in cells for blocker in cell.blockers),
        cells=cells,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    readiness = assess(arguments.plan)
    write_model(arguments.output, readiness)
    print(f"{readiness.scope} plan {readiness.plan_sha256[:16]}: {readiness.status}")
    for blocker in readiness.blockers:
        print(f"  {blocker}")


if __name__ == "__main__":
    run(main)
