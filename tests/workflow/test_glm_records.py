"""Records of GLM-5.3-Flash at TP 4: what the engine plans of its specs, and what imports as the declared profile."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import glm_records as glm
import pytest

from producer.resolving import read_campaign, resolve
from schemas.canonical import read_model
from schemas.observation import ProbeRecord
from schemas.profile import Profile
from schemas.request import Request

from import_profile import build_profile
from probe_checks import diagnose

ROOT = Path(__file__).parents[2]
VLLM_033 = "PASSGRID_VLLM_033"
"""Environment variable that names a folder with the Python files of the vllm 0.33.0 wheel."""

CAMPAIGNS = {"glm-5.3-flash-gb300-tp4": True, "glm-5.3-flash-gb300-tp4-triton": False}
"""Campaign with a declared profile of this name -> whether its prefill kernel exports checkpoints."""

ONLY_OF_A_PROBE = {"provenance", "probe_digest", "weights_bytes", "cudagraph_capture_sizes"}
"""Fields of a profile that a declared one leaves out, or says in words."""


@pytest.fixture(params=CAMPAIGNS)
def launch(request, monkeypatch) -> tuple[str, Request, list[ProbeRecord]]:
    monkeypatch.chdir(ROOT)
    file = Path("config/campaigns") / f"{request.param}.yaml"
    resolved = resolve(read_campaign(file), file)
    return request.param, resolved, glm.probe_records(resolved, CAMPAIGNS[request.param])


def test_the_live_values_come_out_of_the_specs():
    pages = {name: spec["page_size_bytes"] for name, spec in glm.layer_specs().items()}
    sizes = [sum(pages[name] for name in names) for names in glm.group_layers()]
    assert [len(names) for names in glm.group_layers()] == [9, 9, 8, 8, 22, 11]
    assert sizes[0] == 10_027_008  # 9 x 1,114,112, live
    # 11 x (512 x 2,176 + 544 x 132); 13,045,120 was the whole block on 0.31, which aligned nothing.
    assert sizes[4] == 13_045_120
    # Aligned to 540,672, which both pages of 32 latents (16,384) and of 32 index entries (4,224) divide.
    assert glm.POOL_BLOCK == 25 * 540_672
    assert 24 * 540_672 < 13_045_120
    assert glm.BLOCKS * glm.POOL_BLOCK - glm.POOL_BLOCK == 185_126_092_800
    assert sum(group["startup_blocks_per_request"] for group in glm.groups()) == 482 + 4 * 3 + 1
    assert sum(group["startup_blocks_per_request"] for group in glm.groups(checkpoint=False)) == 482 + 4 * 2 + 1
    assert glm.scheduler()["max_concurrency"] == pytest.approx(27.67, abs=0.005)


def test_nothing_stands_against_them(launch):
    _, request, records = launch
    assert diagnose(request, request.deployments["tp4"], records) == []


def test_they_import_as_the_declared_profile(launch):
    name, request, records = launch
    declared = read_model(Profile, Path(f"config/profiles/{name}.json"), "profile").model_dump(exclude_none=True)
    imported = build_profile(request, request.deployments["tp4"], records, {}).model_dump(exclude_none=True)
    settings = {"gpu_memory_utilization", "kv_cache_memory_bytes", "enable_chunked_prefill"}
    left_out = ONLY_OF_A_PROBE | settings
    assert {field: value for field, value in imported.items() if field not in left_out} == {
        field: value for field, value in declared.items() if field not in left_out
    }
    assert not settings & declared.keys()


def planned(environment: dict[str, str]) -> dict[str, Any]:
    """What an engine's own planning makes of the specs."""
    arguments = {
        "cache": glm.cache_memory(),
        "order": list(glm.layer_specs()),
        "block_size": glm.BLOCK,
        "mamba_cache_mode": "align",
        "max_model_len": glm.MAX_MODEL_LEN,
        "max_num_tokens": 8192,
        "tensor_parallel": glm.TP,
    }
    command = [sys.executable, "tests/engine_planning.py"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, input=json.dumps(arguments), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def check_planned(found: dict[str, Any]) -> None:
    """Groups, placement, views and counts of the records are the engine's."""
    cache, scheduler, specs = glm.cache_memory(), glm.scheduler(), glm.layer_specs()
    assert found["num_blocks"] == glm.BLOCKS
    assert found["pages"] == {name: spec["page_size_bytes"] for name, spec in specs.items()}
    for planned_groups, groups in (
        (found["groups"], cache["groups"]),
        (found["scheduler_groups"], scheduler["groups"]),
    ):
        assert planned_groups == [{field: group[field] for field in planned_groups[0]} for group in groups]
    assert found["startup"] == [group["startup_blocks_per_request"] for group in scheduler["groups"]]
    assert found["max_concurrency"] == scheduler["max_concurrency"]
    assert found["block_sizes"] == [scheduler["block_size"], scheduler["hash_block_size"]]
    assert found["tp_replicas"] == cache["kv_tp_replicas"]
    assert found["managers"] == scheduler["managers"]
    fields = ("size", "layers", "offset", "block_stride", "layer_stride")
    assert found["tensors"] == [{field: tensor[field] for field in fields} for tensor in cache["tensor_allocations"]]
    kda = specs[glm.layer(0)]
    assert found["kda_shapes"] == [list(shape) for shape in kda["shapes"]]
    assert found["kda_dtypes"] == kda["dtypes"]
    assert found["alignments"] == {
        "sparse": glm.latent_spec()["block_stride_alignment"],
        "indexer": glm.index_spec()["block_stride_alignment"],
    }
    for name, view in found["views"].items():
        bound = cache["layer_tensors"][name][0]
        assert view["storage_offset_bytes"] == bound["storage_offset_bytes"], name
        assert view["stride_bytes"][0] == bound["stride_bytes"][0], name
        if specs[name]["spec_type"] != "MambaSpec":  # whose states are cut out of the page's bytes
            dense = [size for size in view["shape"] if size != 1]
            assert dense == [size for size in bound["shape"] if size != 1], name


def test_the_installed_engine_plans_them_so():
    pytest.importorskip("vllm.v1.core.kv_cache_utils")
    check_planned(planned(dict(os.environ)))


@pytest.mark.skipif(VLLM_033 not in os.environ, reason=f"{VLLM_033} names no folder with vllm 0.33.0's Python files")
def test_vllm_0_33_plans_them_so():
    folder = Path(os.environ[VLLM_033]).resolve()
    found = planned(os.environ | {"PYTHONPATH": str(folder)})
    assert found["vllm"].startswith("0.33.0")
    assert Path(found["file"]).is_relative_to(folder)
    check_planned(found)
