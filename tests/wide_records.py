"""Sound probe records of very many ranks, groups and layers; and one import of them, for figures.

python tests/wide_records.py import DIR    read, diagnose and make the profile of DIR/prefill.json and DIR/decode.json
python tests/wide_records.py parse DIR     the same files through `json.loads` alone
"""

import gc
import json
import resource
import sys
import time
from math import ceil
from pathlib import Path
from typing import Any

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
BLOCKS = 512


def wide_deployment(ranks: int, groups: int, layers: int) -> tuple[Request, ResolvedDeployment]:
    """The two data-parallel ranks of cpu-parallel as `ranks` of them, each with room for `BLOCKS` blocks."""
    request, deployment, _, _ = launches()["data"]
    memory = BLOCKS * layers * _specs()["FullAttentionSpec"]["page_size_bytes"]
    widths = {"dp": ranks, "moe_ep": ranks}
    wide = deployment.model_copy(
        update={
            "topology": deployment.topology.model_copy(update=widths),
            "engine": deployment.engine.model_copy(update={"kv_cache_memory_bytes": memory}),
        }
    )
    return request.model_copy(update={"deployments": {"data": wide}}), wide


def _specs() -> dict[str, dict[str, Any]]:
    """Specs of a layer with full attention and of one with a sliding window, by class, as an engine recorded them."""
    groups = launches()["sliding"].record["workers"][0]["cache"]["groups"]
    return {group["spec_type"]: next(iter(group["layer_specs"].values())) for group in groups}


def wide_cache(deployment: ResolvedDeployment, groups: int, layers: int) -> dict[str, Any]:
    """The cache of one rank: a group of full attention, the others of a sliding window, one over the other."""
    real = launches()["sliding"].record["workers"][0]["cache"]
    limits, specs = deployment.limits, _specs()
    full, page = specs["FullAttentionSpec"], specs["FullAttentionSpec"]["page_size_bytes"]
    samples = {group["spec_type"]: group for group in real["groups"]}
    (view, *_) = next(iter(real["layer_tensors"].values()))
    size = BLOCKS * layers * page
    cache: dict[str, Any] = real | {
        "num_blocks": BLOCKS,
        "available_cache_bytes": size,
        "groups": [],
        "kernel_block_size_tokens": real["kernel_block_size_tokens"][:1] * groups,
        "layer_classes": {},
        "storages": [real["storages"][0] | {"size_bytes": size}],
        "tensor_allocations": [],
        "layer_tensors": {},
    }
    layer_class = next(iter(real["layer_classes"].values()))
    for number in range(groups):
        spec = specs["SlidingWindowSpec"] if number else full
        names = [f"model.layers.{number + groups * index}.self_attn.attn" for index in range(layers)]
        tokens = limits.max_model_len
        if number:
            tokens = min(spec["sliding_window"] - 1 + limits.max_num_tokens, tokens)
        startup = ceil(tokens / spec["block_size"]) + (number > 0)
        cache["groups"].append(
            samples[spec["spec_type"]]
            | {
                "layer_names": names,
                "layer_specs": dict.fromkeys(names, spec),
                "startup_blocks_per_request": startup,
            }
        )
        cache["layer_classes"] |= dict.fromkeys(names, layer_class)
        cache["tensor_allocations"].append(
            real["tensor_allocations"][0]
            | {"size": size, "layers": names, "offset": 0, "block_stride": page, "layer_stride": BLOCKS * page}
        )
        for index, name in enumerate(names):
            kernel_blocks = view["shape"][0] // real["num_blocks"] * BLOCKS
            place = {"storage_offset_bytes": index * BLOCKS * page, "shape": [kernel_blocks, *view["shape"][1:]]}
            cache["layer_tensors"][name] = [view | place]
    return cache


def wide_record(request: Request, deployment: ResolvedDeployment, groups: int, layers: int) -> ProbeRecord:
    """The prefill record of a launch of `wide_deployment`."""
    real, kinds = launches()["data"].record, launches()["sliding"].record
    ranks = range(deployment.topology.dp)
    worker, scheduler = real["workers"][0], real["schedulers"][0]
    cache = wide_cache(deployment, groups, layers)
    own = [group | {"layer_specs": dict([next(iter(group["layer_specs"].items()))])} for group in cache["groups"]]
    (hybrid,) = kinds["schedulers"]
    classes = (group["spec_type"] for group in hybrid["groups"])
    managers = dict(zip(classes, hybrid["managers"], strict=True))
    settings = worker["settings"] | {
        "data_parallel_size": len(ranks),
        "kv_cache_memory_bytes": deployment.engine.kv_cache_memory_bytes,
    }
    decided = scheduler | {
        "coordinator": hybrid["coordinator"],
        "managers": [managers[group["spec_type"]] for group in own],
        "num_blocks": BLOCKS,
        "initial_free_blocks": BLOCKS - 1,
        "max_concurrency": BLOCKS / sum(group["startup_blocks_per_request"] for group in own),
        "groups": own,
    }
    record = real | {
        "probe_digest": probe_digest(request, deployment),
        "launch": launch_of(request, deployment),
        "workers": [worker | {"dp_rank": rank, "settings": settings, "cache": cache} for rank in ranks],
        "schedulers": [decided | {"dp_rank": rank} for rank in ranks],
    }
    return parse(ProbeRecord, record, "wide record")


def write_records(folder: Path, ranks: int = RANKS, groups: int = GROUPS, layers: int = LAYERS) -> list[Path]:
    """Both phases' records of one deployment, as a probe leaves them."""
    request, deployment = wide_deployment(ranks, groups, layers)
    record = wide_record(request, deployment, groups, layers)
    files = [folder / f"{phase}.json" for phase in PHASES]
    for file, each in zip(files, (record, other_phase(record)), strict=True):
        write_atomic(file, canonical_bytes(each))
    return files


def main() -> None:
    what, folder = sys.argv[1], Path(sys.argv[2])
    files = [folder / f"{phase}.json" for phase in PHASES]
    request, deployment = wide_deployment(RANKS, GROUPS, LAYERS)
    gc.freeze()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    began, cpu = time.monotonic(), time.process_time()
    if what == "parse":
        parsed = [json.loads(file.read_bytes()) for file in files]
        done = len(parsed)
    else:
        records = [read_model(ProbeRecord, file, "probe record") for file in files]
        read = time.monotonic() - began
        if found := diagnose(request, deployment, records):
            sys.exit("\n".join(found[:10]))
        diagnosed = time.monotonic() - began
        done = build_profile(request, deployment, records, {}).free_blocks
    figures = {"seconds": time.monotonic() - began, "cpu_seconds": time.process_time() - cpu, "before_mib": before}
    if what == "import":
        figures |= {"reading_seconds": read, "diagnosing_seconds": diagnosed - read}
    figures |= {"peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, "done": done}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
