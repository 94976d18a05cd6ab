"""Write the pins file of a qualified release from its wheel: make_pins.py VERSION WHEEL."""

import argparse
import hashlib
import json
import zipfile
from pathlib import Path

from producer.adapters import adapter_of

RELIED_ON = (
    "vllm/v1/core/block_pool.py",
    "vllm/v1/core/kv_cache_coordinator.py",
    "vllm/v1/core/kv_cache_manager.py",
    "vllm/v1/core/kv_cache_utils.py",
    "vllm/v1/core/sched/interface.py",
    "vllm/v1/core/sched/output.py",
    "vllm/v1/core/sched/scheduler.py",
    "vllm/v1/core/single_type_kv_cache_manager.py",
    "vllm/v1/engine/core.py",
    "vllm/v1/kv_cache_interface.py",
    "vllm/v1/outputs.py",
    "vllm/v1/request.py",
    "vllm/v1/worker/worker_base.py",
)
"""What the benchmark scheduler overrides, calls, or reads its evidence from."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version")
    parser.add_argument("wheel", type=Path)
    arguments = parser.parse_args()
    adapter = adapter_of(arguments.version, "command line")
    with zipfile.ZipFile(arguments.wheel) as wheel:
        pins = {name: hashlib.sha256(wheel.read(name)).hexdigest() for name in RELIED_ON}
    adapter.pins_file.write_text(json.dumps(pins, indent=2) + "\n")


if __name__ == "__main__":
    main()
