"""Sound probe records of very many ranks, groups and layers; and one import of them, for figures.

python tests/wide_records.py write DIR equal     DIR/prefill.json and DIR/decode.json; `other`: no rank's pool is
                                                 as large as another's
python tests/wide_records.py import DIR equal    read and diagnose them, and make the profile
python tests/wide_records.py parse DIR equal     the same files through `json.loads` alone
"""

import gc
import json
import sys
import time
from math import ceil
from pathlib import Path
from typing import Any, Literal, cast

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "workflow" / "scripts"), str(ROOT / "tests")]

from probe_mutants import launches, other_phase  # noqa: E402

from producer.resolving import launch_of, probe_digest  # noqa: E402
from schemas.canonical import canonical_bytes, parse, read_model, write_atomic  # noqa: E402
from schemas.observation import ProbeRecord  # noqa: E402
from schemas.points import PHASES  # noqa: E402
from schemas.request import Request, ResolvedDeployment  # noqa: E402

from import_profile import build_profile  # noqa: E402
from probe_checks import diagnose  # noqa: E402

RANKS, GROUPS, LAYERS = 64, 6, 64
"""Ranks of a launch, cache groups of each, layers of each group."""

BLOCKS = 512
"""Blocks of the largest pool."""

Pools = Literal["equal", "other"]


def wide_deployment(ranks: int) -> tuple[Request, ResolvedDeployment]:
    """The two data-parallel ranks of cpu-parallel as `ranks` of them, which take what memory they find."""
    request, deployment, _, _ = launches()["data"]
    engine = deployment.engine.model_copy(update={"kv_cache_memory_bytes": None, "gpu_memory_utilization": 0.9})
    topology = deployment.topology.model_copy(update={"dp": ranks, "moe_ep": ranks})
    wide = deployment.model_copy(update={"topology": topology, "engine": engine})
    return request.model_copy(update={"deployments": {"data": wide}}), wide


def wide_cache(deployment: ResolvedDeployment, blocks: int) -> dict[str, Any]:
    """The cache of one rank: a group of full attention and others of a sliding window, one over the other.

    Specs, views and the layout are those that an engine recorded of Gemma 3.
    """
    real = launches()["sliding"].record["workers"][0]["cache"]
    samples = {group["spec_type"]: group for group in real["groups"]}
    specs = {name: next(iter(group["layer_specs"].values())) for name, group in samples.items()}
    page = specs["FullAttentionSpec"]["page_size_bytes"]
    (view,) = next(iter(real["layer_tensors"].values()))
    shape = [view["shape"][0] // real["num_blocks"] * blocks, *view["shape"][1:]]
    size = blocks * LAYERS * page
    cache: dict[str, Any] = real | {
        "num_blocks": blocks,
        "groups": [],
        "kernel_block_size_tokens": real["kernel_block_size_tokens"][:1] * GROUPS,
        "layer_classes": {},
        "storages": [real["storages"][0] | {"size_bytes": size}],
        "tensor_allocations": [],
        "layer_tensors": {},
    }
    for number in range(GROUPS):
        name = "SlidingWindowSpec" if number else "FullAttentionSpec"
        layers = [f"model.layers.{number + GROUPS * index}.self_attn.attn" for index in range(LAYERS)]
        group = {"layer_names": layers, "layer_specs": dict.fromkeys(layers, specs[name])}
        startup = startup_blocks(deployment, specs[name])
        cache["groups"].append(samples[name] | group | {"startup_blocks_per_request": startup})
        cache["layer_classes"] |= dict.fromkeys(layers, next(iter(real["layer_classes"].values())))
        strides = {"block_stride": page, "layer_stride": blocks * page}
        place = {"size": size, "layers": layers, "offset": 0} | strides
        cache["tensor_allocations"].append(real["tensor_allocations"][0] | place)
        for index, layer in enumerate(layers):
            offset = index * blocks * page
            cache["layer_tensors"][layer] = [view | {"storage_offset_bytes": offset, "shape": shape}]
    return cache


def startup_blocks(deployment: ResolvedDeployment, spec: dict[str, Any]) -> int:
    """All tokens of a request, or its window and one step, and a block more since a window starts anywhere in one
    (0.32.0, v1/kv_cache_interface.py `max_memory_usage_bytes`)."""
    limits, window = deployment.limits, spec.get("sliding_window")
    if window is None:
        return ceil(limits.max_model_len / spec["block_size"])
    return ceil(min(window - 1 + limits.max_num_tokens, limits.max_model_len) / spec["block_size"]) + 1


def wide_record(request: Request, deployment: ResolvedDeployment, pools: Pools) -> ProbeRecord:
    """The prefill record of a launch of `wide_deployment`; `other`: no rank's pool is as large as another's."""
    real = launches()["data"].record
    workers, schedulers = [], []
    for rank in range(deployment.topology.dp):
        blocks = BLOCKS - (rank if pools == "other" else 0)
        cache = wide_cache(deployment, blocks)
        workers.append(real["workers"][0] | {"dp_rank": rank, "settings": _settings(deployment), "cache": cache})
        schedulers.append(_scheduler(cache) | {"dp_rank": rank})
    own = {"probe_digest": probe_digest(request, deployment), "launch": launch_of(request, deployment)}
    return parse(ProbeRecord, real | own | {"workers": workers, "schedulers": schedulers}, "wide record")


def _settings(deployment: ResolvedDeployment) -> dict[str, Any]:
    real = dict(launches()["data"].record["workers"][0]["settings"])
    real.pop("kv_cache_memory_bytes", None)
    return real | {
        "data_parallel_size": deployment.topology.dp,
        "gpu_memory_utilization": deployment.engine.gpu_memory_utilization,
    }


def _scheduler(cache: dict[str, Any]) -> dict[str, Any]:
    """The scheduler of one rank: settings of the data-parallel launch, blocks and groups of the cache."""
    (hybrid,) = launches()["sliding"].record["schedulers"]
    classes = [group["spec_type"] for group in hybrid["groups"]]
    managers = dict(zip(classes, hybrid["managers"], strict=True))
    groups = [group | {"layer_specs": _first(group["layer_specs"])} for group in cache["groups"]]
    return launches()["data"].record["schedulers"][0] | {
        "coordinator": hybrid["coordinator"],
        "managers": [managers[group["spec_type"]] for group in groups],
        "num_blocks": cache["num_blocks"],
        "initial_free_blocks": cache["num_blocks"] - 1,
        "max_concurrency": cache["num_blocks"] / sum(group["startup_blocks_per_request"] for group in groups),
        "groups": groups,
    }


def _first(specs: dict[str, Any]) -> dict[str, Any]:
    return dict([next(iter(specs.items()))])


def write_records(folder: Path, pools: Pools, ranks: int = RANKS) -> tuple[Request, ResolvedDeployment]:
    """Both phases' records of one deployment, as a probe leaves them; and what they were launched as."""
    request, deployment = wide_deployment(ranks)
    record = wide_record(request, deployment, pools)
    for phase, each in zip(PHASES, (record, other_phase(record)), strict=True):
        write_atomic(folder / f"{phase}.json", canonical_bytes(each))
    return request, deployment


def peak_mib() -> float:
    """Peak memory of this program; `ru_maxrss` would hold its parent's too."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) / 1024


def import_once(files: list[Path]) -> dict[str, float]:
    """Seconds of an import as the rule makes it, without the files that it writes.

    Raises:
        SystemExit: the records are not sound, so that the figures would be those of something else.
    """
    request, deployment = wide_deployment(RANKS)
    gc.disable()  # as the script does
    began = time.process_time()
    records = [read_model(ProbeRecord, file, "probe record") for file in files]
    read = time.process_time()
    if found := diagnose(request, deployment, records):
        sys.exit("\n".join(found[:10]))
    diagnosed = time.process_time()
    build_profile(request, deployment, records, {})
    ended = time.process_time()
    return {
        "cpu_seconds": ended - began,
        "reading_cpu_seconds": read - began,
        "diagnosing_cpu_seconds": diagnosed - read,
    }


def main() -> None:
    what, folder, pools = sys.argv[1], Path(sys.argv[2]), cast(Pools, sys.argv[3])
    files = [folder / f"{phase}.json" for phase in PHASES]
    gc.freeze()  # as `run` does for each script
    began = time.monotonic()
    if what == "write":
        write_records(folder, pools)
        print(json.dumps({"mib": sum(file.stat().st_size for file in files) / 2**20}))
        return
    if what == "parse":
        cpu = time.process_time()
        parsed = [json.loads(file.read_bytes()) for file in files]
        figures = {"cpu_seconds": time.process_time() - cpu, "records": len(parsed)}
    else:
        figures = import_once(files)
    print(json.dumps(figures | {"seconds": time.monotonic() - began, "peak_mib": peak_mib()}))


if __name__ == "__main__":
    main()
