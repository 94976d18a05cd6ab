"""Judge the cells of a campaign and make its table as the rules do, and print what it took.

    judge_once.py PLAN.json

One JSON object: {"seconds", "cpu_seconds", "table_cpu_seconds", "before_mib", "cells_peak_mib", "peak_mib", "rows",
"latencies"}: peak memory before anything, after the last cell, and after the table. `merge_ranks` and `verify_cell` run
for each cell from its files, then `publish` over all, in this one process. `latencies` are the distinct
[batch size, tokens read, milliseconds] that were published.
"""

import contextlib
import gc
import io
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from conftest import ROOT

from schemas.canonical import read_model
from schemas.evidence import CellEvidence
from schemas.layout import cells_folder, rank_files
from schemas.plan import FrozenCell, Plan
from schemas.table import MEDIAN_POLICY

sys.path.insert(0, str(ROOT / "workflow" / "scripts"))
import merge_ranks
import publish
import verify_cell


def peak_mib() -> float:
    """Peak memory of this program; `ru_maxrss` would hold its parent's too."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) / 1024


def run(script: Callable[[], None], *arguments: object) -> None:
    """A rule's script with its command line; what it says is left out."""
    sys.argv = [script.__module__, *map(str, arguments)]
    with contextlib.redirect_stdout(io.StringIO()):
        script()


def judge(folder: Path) -> None:
    """Merge and verify one cell.

    Raises:
        AssertionError: the cell failed, so that the figures would be those of something else.
    """
    ranks = rank_files(folder, read_model(FrozenCell, folder / "cell.json", "frozen cell").identity.topology.dp)
    cell, receipt, merged = (folder / name for name in ("cell.json", "receipt.json", "merged.json"))
    run(merge_ranks.main, "--cell", cell, "--receipt", receipt, "--output", merged, *ranks)
    run(verify_cell.main, "--folder", folder, "--output", folder / "evidence.json")
    evidence = read_model(CellEvidence, folder / "evidence.json", "evidence")
    assert not evidence.failures, evidence.failures


def policy_of_ten(*_: object) -> publish.Policy:
    """Consumers have no name for Dynamo's median of nine steps, so `publish` refuses it; here it goes as our own."""
    return publish.Policy(MEDIAN_POLICY, 0, 10)


def main() -> None:
    plan_file = Path(sys.argv[1])
    plan = read_model(Plan, plan_file, "plan")
    pa.array([0])  # imports pandas, if it is there: once a process, and no part of judging a cell
    gc.freeze()  # as `run` does for each script
    figures: dict[str, Any] = {"before_mib": peak_mib()}
    began, cpu = time.monotonic(), time.process_time()
    for entry in plan.cells:
        judge(cells_folder(plan_file) / entry.name)
    cells_cpu = time.process_time()
    figures["cells_peak_mib"] = peak_mib()
    publish.policy_of = policy_of_ten
    table = publish.build(plan_file)
    ended = time.process_time()
    figures |= {"seconds": time.monotonic() - began, "cpu_seconds": ended - cpu, "peak_mib": peak_mib()}
    figures |= {"table_cpu_seconds": ended - cells_cpu, "rows": table.rows}
    # Without threads: those of pyarrow's reader abort some interpreters at exit.
    parquet = pq.ParquetFile(io.BytesIO(table.parquet), pre_buffer=False)
    rows = parquet.read(columns=["batch_size", "total_kv_read_tokens", "latency_ms"], use_threads=False)
    print(json.dumps(figures | {"latencies": sorted({tuple(row.values()) for row in rows.to_pylist()})}))


if __name__ == "__main__":
    main()
