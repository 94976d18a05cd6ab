"""Write the pins file of a qualified release from its wheel: python -m producer.adapters.make_pins VERSION WHEEL."""

import argparse
import hashlib
import json
import zipfile
from pathlib import Path

from producer.adapters import adapter_of
from schemas.errors import Refusal, run

RELIED_ON = (
    # Imported, started, and asked for its version.
    "vllm/__init__.py",
    "vllm/version.py",
    "vllm/envs.py",
    "vllm/entrypoints/llm.py",
    "vllm/entrypoints/common/offline.py",
    "vllm/engine/arg_utils.py",
    "vllm/sampling_params.py",
    "vllm/utils/hashing.py",
    # The settings of a launch, their defaults, and who changes them by himself.
    "vllm/config/cache.py",
    "vllm/config/compilation.py",
    "vllm/config/engram.py",
    "vllm/config/kv_transfer.py",
    "vllm/config/mamba.py",
    "vllm/config/model.py",
    "vllm/config/observability.py",
    "vllm/config/offload.py",
    "vllm/config/parallel.py",
    "vllm/config/scheduler.py",
    "vllm/config/speculative.py",
    "vllm/config/vllm.py",
    "vllm/platforms/__init__.py",
    "vllm/platforms/cpu.py",
    "vllm/platforms/cuda.py",
    "vllm/platforms/interface.py",
    # The scheduler that is subclassed, and all that it decides with.
    "vllm/v1/core/block_pool.py",
    "vllm/v1/core/kv_cache_coordinator.py",
    "vllm/v1/core/kv_cache_manager.py",
    "vllm/v1/core/kv_cache_utils.py",
    "vllm/v1/core/sched/interface.py",
    "vllm/v1/core/sched/output.py",
    "vllm/v1/core/sched/request_queue.py",
    "vllm/v1/core/sched/scheduler.py",
    "vllm/v1/core/sched/utils.py",
    "vllm/v1/core/single_type_kv_cache_manager.py",
    "vllm/v1/kv_cache_interface.py",
    "vllm/v1/kv_cache_spec_registry.py",
    "vllm/v1/outputs.py",
    "vllm/v1/request.py",
    # The loop between scheduling and output, which is the interval that is measured.
    "vllm/v1/engine/__init__.py",
    "vllm/v1/engine/core.py",
    "vllm/v1/engine/core_client.py",
    "vllm/v1/engine/llm_engine.py",
    "vllm/v1/executor/abstract.py",
    "vllm/v1/executor/multiproc_executor.py",
    "vllm/v1/executor/uniproc_executor.py",
    "vllm/v1/serial_utils.py",
    "vllm/distributed/utils.py",
    # The workers that are observed, and who says which graph ran (`cudagraph_stats`).
    "vllm/v1/worker/cpu_model_runner.py",
    "vllm/v1/worker/cpu_worker.py",
    "vllm/v1/worker/dp_utils.py",
    "vllm/v1/worker/gpu/cudagraph_utils.py",
    "vllm/v1/worker/gpu/dp_utils.py",
    "vllm/v1/worker/gpu/model_runner.py",
    "vllm/v1/worker/gpu_model_runner.py",
    "vllm/v1/worker/gpu_worker.py",
    "vllm/v1/worker/mamba_utils.py",
    "vllm/v1/worker/worker_base.py",
    "vllm/v1/cudagraph_dispatcher.py",
    "vllm/compilation/cuda_graph.py",
    # Weights: how they are made or loaded, and when they can be counted.
    "vllm/model_executor/model_loader/base_loader.py",
    "vllm/model_executor/model_loader/default_loader.py",
    "vllm/model_executor/model_loader/dummy_loader.py",
    "vllm/model_executor/model_loader/utils.py",
    # Asked for the clocks of a device.
    "vllm/third_party/pynvml.py",
    # Where a recurrent layer saves its state inside a chunk.
    "vllm/model_executor/layers/mamba/checkpoint.py",
)
"""What the producer overrides, calls, launches, or reads its evidence from, in every qualified release."""

RELIED_ON_IN = {
    # 0.33.0 moved the planning of the cache out of kv_cache_utils.py.
    "0.33.0": ("vllm/v1/core/kv_cache_config_builder.py", "vllm/v1/core/kv_cache_planning.py"),
}
"""Release -> files that only it has."""


def relied_on(version: str) -> tuple[str, ...]:
    """Paths below site-packages of the files of a release that its pins name, sorted."""
    return tuple(sorted((*RELIED_ON, *RELIED_ON_IN.get(version, ()))))


def pins_of(version: str, wheel: Path) -> dict[str, str]:
    """Path -> sha256 of each relied-on file in a release's wheel.

    Raises:
        Refusal: a file that the wheel does not have.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        missing = [name for name in relied_on(version) if name not in names]
        if missing:
            raise Refusal("relied-on engine source", f"a file of vllm {version}", ", ".join(missing), wheel)
        return {name: hashlib.sha256(archive.read(name)).hexdigest() for name in relied_on(version)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version")
    parser.add_argument("wheel", type=Path)
    arguments = parser.parse_args()
    adapter = adapter_of(arguments.version, "command line")
    pins = pins_of(adapter.version, arguments.wheel)
    adapter.pins_file.write_text(json.dumps(pins, indent=2) + "\n")


if __name__ == "__main__":
    run(main)
