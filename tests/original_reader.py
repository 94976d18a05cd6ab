"""Judge a cell's artifacts with the original's own reader, and print what it took.

Runs in the consumer's environment: original_reader.py ARTIFACTS_FOLDER MODEL_FOLDER VLLM_VERSION. One JSON object:
{"seconds", "cpu_seconds", "before_mib", "peak_mib", "rows", "latencies"}, as of judge_once.py. It runs what stands
between the artifacts and the rows of a cell there: `validate_native_collection`, `extract_measurement_evidence`,
`aggregate_cell`.
"""

import argparse
import json
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

from collector.fpm_forward.config import FPMCollectionOptions, add_fpm_arguments
from collector.fpm_forward.database import aggregate_cell
from collector.fpm_forward.measurement_evidence import extract_measurement_evidence
from collector.fpm_forward.native_artifact import validate_native_collection
from collector.fpm_forward.planner import FPMCollectionPlan, build_collection_plan


def plan_of(model: Path, ranks: int) -> FPMCollectionPlan:
    """The original's plan of a model: on one GPU, or with one data-parallel rank a GPU."""
    parser = argparse.ArgumentParser()
    add_fpm_arguments(parser)
    presets = ["--fpm-parallel-presets", "tp" if ranks == 1 else "dep"]
    arguments = parser.parse_args([*presets, "--fpm-gpu-counts", str(ranks), "--fpm-max-gpus", str(ranks)])
    return build_collection_plan(
        backend="vllm",
        model_path=str(model),
        system="h200_sxm",
        selected_ops={"fpm_forward", "attention_generation", "attention_context"},
        options=FPMCollectionOptions.from_args(arguments),
        model_config_path=str(model / "config.json"),
    )


def peak_mib() -> float:
    """Peak memory of this program; `ru_maxrss` would hold its parent's too."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) / 1024


def main() -> None:
    artifacts, model, version = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    files = sorted(artifacts.iterdir())
    plan = plan_of(model, len(files))
    (cell,) = (each for each in plan.cells if each.workload_kind == "decode")
    attempt = str(uuid.uuid4())
    provenance = {
        "schema_name": "aic_fpm_collector_provenance",
        "schema_version": 1,
        "cell_id": cell.cell_id,
        "plan_sha256": plan.sha256,
        "attempt_id": attempt,
        "runtime": {"backend": "vllm", "backend_version": version},
    }
    with tempfile.TemporaryDirectory() as temporary:
        raw = Path(temporary) / "raw" / "node"
        raw.mkdir(parents=True)
        (raw / "collector-provenance.json").write_text(json.dumps(provenance))
        for file in files:
            (raw / file.name).symlink_to(file.absolute())
        figures: dict[str, Any] = {"before_mib": peak_mib()}
        began, cpu = time.monotonic(), time.process_time()
        collection = validate_native_collection(
            cell, raw.parent, expected_plan_sha256=plan.sha256, expected_attempt_id=attempt
        )
        evidence = extract_measurement_evidence(raw.parent, collection)
        rows = aggregate_cell(plan, cell, Path(temporary), expected_attempt_id=attempt)
        figures |= {"seconds": time.monotonic() - began, "cpu_seconds": time.process_time() - cpu}
    assert evidence["status"] == "recorded", evidence["reasons"]
    figures |= {"peak_mib": peak_mib(), "rows": len(rows)}
    latencies = sorted((row["batch_size"], row["total_kv_read_tokens"], row["latency_ms"]) for row in rows)
    print(json.dumps(figures | {"latencies": latencies}))


if __name__ == "__main__":
    main()
