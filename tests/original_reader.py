"""Judge a cell's artifacts with the original's own reader, and print what it took and which rows it made.

Runs in the consumer's environment: original_reader.py CELL_FOLDER. One JSON object: {"seconds", "cpu_seconds",
"peak_rss_mib", "rows"}. Of the original it is what a publication does: `aggregate_cell`, which validates the rank
artifacts (`validate_native_collection`) and makes the rows, and `extract_measurement_evidence`, which readiness runs.
"""

import argparse
import json
import resource
import sys
import tempfile
import time
import uuid
from pathlib import Path

from collector.fpm_forward.config import FPMCollectionOptions, add_fpm_arguments
from collector.fpm_forward.database import aggregate_cell
from collector.fpm_forward.measurement_evidence import extract_measurement_evidence
from collector.fpm_forward.native_artifact import validate_native_collection
from collector.fpm_forward.planner import FPMCollectionPlan, build_collection_plan


def plan_of(folder: Path, ranks: int) -> FPMCollectionPlan:
    """The original's plan of the cell's model: one GPU, or one data-parallel rank a GPU."""
    parser = argparse.ArgumentParser()
    add_fpm_arguments(parser)
    presets = ["--fpm-parallel-presets", "tp" if ranks == 1 else "dep"]
    arguments = parser.parse_args([*presets, "--fpm-gpu-counts", str(ranks), "--fpm-max-gpus", str(ranks)])
    return build_collection_plan(
        backend="vllm",
        model_path=str(folder / "model"),
        system="h200_sxm",
        selected_ops={"fpm_forward", "attention_generation", "attention_context"},
        options=FPMCollectionOptions.from_args(arguments),
        model_config_path=str(folder / "model" / "config.json"),
    )


def main() -> None:
    folder = Path(sys.argv[1])
    files = [folder / "benchmark.json", *sorted(folder.glob("benchmark_dp*.json"))]
    plan = plan_of(folder, len(files))
    (cell,) = (each for each in plan.cells if each.workload_kind == "decode")
    attempt = str(uuid.uuid4())
    provenance = {
        "schema_name": "aic_fpm_collector_provenance",
        "schema_version": 1,
        "cell_id": cell.cell_id,
        "plan_sha256": plan.sha256,
        "attempt_id": attempt,
        "runtime": {"backend": "vllm", "backend_version": "0.32.0"},
    }
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        raw = Path(temporary) / "raw" / "node"
        raw.mkdir(parents=True)
        (raw / "collector-provenance.json").write_text(json.dumps(provenance))
        for file in files:
            (raw / file.name).hardlink_to(file)
        began, cpu = time.monotonic(), time.process_time()
        collection = validate_native_collection(
            cell, raw.parent, expected_plan_sha256=plan.sha256, expected_attempt_id=attempt
        )
        validated = time.process_time()
        evidence = extract_measurement_evidence(raw.parent, collection)
        extracted = time.process_time()
        rows = aggregate_cell(plan, cell, Path(temporary), expected_attempt_id=attempt)
        figures = {"seconds": time.monotonic() - began, "cpu_seconds": time.process_time() - cpu}
    print({k:(type(v).__name__, len(v) if hasattr(v,"__len__") else v) for k,v in evidence.items()}, str(evidence)[-3000:], file=sys.stderr)
    figures["peak_rss_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps(figures | {"rows": len(rows)}))


if __name__ == "__main__":
    main()
