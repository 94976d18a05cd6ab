"""After a run: link what the run built (`current`, `request.json`) and say where things lie."""

import argparse
import os
from pathlib import Path

import polars as pl

from schemas.canonical import read_model
from schemas.errors import run
from schemas.evidence import Readiness
from schemas.plan import Plan, Scope

from campaign_argument import add_campaign, graph_of
from publish import PARQUET

FIRST_ROWS = 8


def link(name: Path, target: Path) -> None:
    """Point the link `name` at `target` in one step."""
    temporary = name.with_name(f".{name.name}.tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(os.path.relpath(target, name.parent))
    temporary.replace(name)


def print_first_rows(parquet: Path) -> None:
    columns = (
        "model_path",
        "workload_kind",
        "batch_size",
        "total_prefill_tokens",
        "total_kv_read_tokens",
        "kv_seed_regime",
        "latency_ms",
    )
    table = pl.read_parquet(parquet, columns=list(columns))
    rows = [
        [f"{value:.3f}" if isinstance(value, float) else str(value) for value in row]
        for row in table.select(columns).head(FIRST_ROWS).iter_rows()
    ]
    widths = [max(len(cell) for cell in column) for column in zip(columns, *rows, strict=True)]
    for cells in ([*columns], *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())
    print(f"… {table.height} rows")


def print_plan(plan: Plan) -> None:
    """Cells of a plan, and what each deployment's planning dropped."""
    for name, deployment in plan.deployments.items():
        dropped = ", ".join(f"{count} {rule}" for rule, count in deployment.dropped.items()) or "nothing"
        print(
            f"{name}: {deployment.prefill_points} prefill and {deployment.decode_points} decode points "
            f"({deployment.origin}), dropped {dropped}; "
            f"{deployment.peak_blocks} of {deployment.free_blocks} blocks at most"
        )
    for cell in plan.cells:
        print(f"  {cell.name}  {cell.points} points")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_campaign(parser)
    arguments = parser.parse_args()
    graph = graph_of(arguments)
    if Path(graph.request_file).exists():
        link(graph.layout.root / "request.json", Path(graph.request_file))
    if graph.missing_profiles or graph.unaccepted:
        return
    scopes: tuple[Scope, ...] = ("smoke", "formal")
    for scope in scopes:
        file = graph.plan_folder(scope) / "readiness.json"
        if file.exists():
            readiness = read_model(Readiness, file, "readiness")
            print(f"{scope}: {readiness.status} ({len(readiness.cells)} cells)")
            for blocker in readiness.blockers:
                print(f"  {blocker}")
    folder, plan = graph.plan_folder("formal"), graph.planned("formal").plan
    if (folder / "plan.json").exists():
        print_plan(plan)
        print(f"plan:    {folder / 'plan.json'}")
    if (folder / "final" / "finalization.json").exists():
        link(graph.layout.root / "current", folder)
        parquet = Path(graph.pair(str(folder))) / PARQUET
        print(f"table:   {parquet}\nsystems: {folder / 'systems'}\nreport:  {folder / 'report.html'}\n")
        print_first_rows(parquet)


if __name__ == "__main__":
    run(main)
