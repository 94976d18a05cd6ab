"""Have Dynamo's self-benchmark measure the cells of a campaign that imports them: record_dynamo.py CAMPAIGN FOLDER.

Needs the campaign's profile and `.dynamo-venv` (`make bench-dynamo` installs it). tests/fixtures/dynamo was made so, in
a folder with config/campaigns/cpu-dynamo.yaml (tests/campaigns) and the demo's profile.
"""

import json
import os
import sys
from pathlib import Path

from compare_dynamo import engine_arguments, run_child

from producer.adapters import adapter_of
from producer.exclusive import exclusive_devices
from producer.graph import CampaignGraph

SEEDED = {"DYN_BENCH_PREFILL_REAL_SEED": "on", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
ROOT = Path(__file__).parent.parent


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for cell in CampaignGraph(name).planned("formal").cells.values():
        identity = cell.identity
        output, settings = folder / f"{identity.phase}.json", folder / f"{identity.phase}-settings.json.tmp"
        benchmark = {
            "mode": identity.phase,
            "output_path": output.name,
            "points": cell.points.model_dump(mode="json", exclude_none=True),
            "warmup_iterations": identity.warmup_iterations,
        }
        arguments = engine_arguments(cell) | {"model": str(Path(cell.model).resolve())}
        document = {"engine": arguments, "benchmark": benchmark, "processes": "core_process"}
        settings.write_text(json.dumps(document))
        python = os.environ.get("DYNAMO_PYTHON", str(ROOT / ".dynamo-venv/bin/python"))
        command = [python, str(ROOT / "tests/dynamo_engine.py"), str(settings)]
        with exclusive_devices(adapter_of(identity.runtime_backend_version, cell.name).device, 1):
            run_child(command, folder / f"{identity.phase}.log", SEEDED | identity.environment, folder)
        settings.unlink()


if __name__ == "__main__":
    main()
