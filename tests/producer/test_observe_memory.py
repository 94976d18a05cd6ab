"""What observers read of a worker and a scheduler, and what they say that they could not read."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
import vllm
from vllm.config.cache import CacheConfig
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowMLASpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
)

from producer import observe_memory
from producer.adapters import ADAPTERS, read_pins
from producer.observe_memory import Views, cache_memory, layer_spec, plain, recurrent_settings
from schemas.canonical import parse
from schemas.observation import ProbeRecord, WorkerRecord

ROOT = Path(__file__).parents[2]
VLLM_033 = "PASSGRID_VLLM_033"
"""Environment variable that names a folder with the Python files of the vllm 0.33.0 wheel."""

NEEDS_033 = pytest.mark.skipif(
    VLLM_033 not in os.environ, reason=f"{VLLM_033} names no folder with vllm 0.33.0's Python files"
)
STATE = MambaSpec(block_size=128, shapes=((3, 256),), dtypes=(torch.bfloat16,), mamba_cache_mode="align")
ATTENTION = FullAttentionSpec(block_size=128, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
LATENT = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)


# Whole records, of each release's own classes.


@cache
def observed(version: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, list[str]]]:
    """Worker record, scheduler record, and the fields of each spec class that no record has."""
    folders = [str(ROOT), str(ROOT / "tests")]
    if version == "0.33.0":
        folders.insert(0, str(Path(os.environ[VLLM_033]).resolve()))
    command = [sys.executable, "tests/producer/observe_program.py", version]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folders)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    worker, scheduler, unknown = json.loads(done.stdout.splitlines()[-1])
    assert worker["runtime"]["version"] == scheduler["runtime"]["version"] == version
    return worker, scheduler, unknown


RELEASES = ["0.32.0", pytest.param("0.33.0", marks=NEEDS_033, id="0_33")]


@pytest.mark.parametrize("version", RELEASES)
def test_a_worker_of_the_release_is_recorded_whole(version: str):
    """Two recurrent layers in one bundle, over the pages of an attention layer: pages of 64 KiB, 4 blocks."""
    record = parse(WorkerRecord, observed(version)[0], "worker")
    assert (record.attempt_id, record.label, record.unresolved_fields) == ("a" * 32, "worker dp0 tp1 pp0", ())
    assert record.runtime.distribution == ADAPTERS[version].distribution
    assert record.runtime.source_files == read_pins(ADAPTERS[version])
    assert record.model.model == "config/models/qwen3-next-tiny"
    assert record.model.weights_bytes == 4 * 3 * 2
    memory = record.cache
    assert [(group.spec_type, group.spec_page_size_bytes) for group in memory.groups] == [
        ("UniformTypeKVCacheSpecs", 2 << 16),
        ("FullAttentionSpec", 1 << 16),
    ]
    # A request of 2,048 tokens: two states in align mode, 16 blocks of 128 tokens.
    assert [group.startup_blocks_per_request for group in memory.groups] == [2, 16]
    assert {name: spec.spec_type for name, spec in memory.groups[0].layer_specs.items()} == {
        "state.0": "MambaSpec",
        "state.1": "MambaSpec",
    }
    assert memory.groups[0].layer_specs["state.1"].shapes == ((3, 256), (2, 64, 64))
    assert memory.groups[1].layer_specs["attention"].head_size == 64
    assert [storage.size_bytes for storage in memory.storages] == [2 * 4 << 16]
    assert {allocation.storage_id for allocation in memory.tensor_allocations} == {"storage0"}
    assert memory.kernel_block_size_tokens == (128, 128)
    views = {
        layer: [(view.storage_offset_bytes, view.shape, view.stride_bytes) for view in tensors]
        for layer, tensors in memory.layer_tensors.items()
    }
    assert views == {
        "state.0": [
            (0, (4, 3, 256), (1 << 16, 512, 2)),
            (1536, (4, 2, 64, 64), (1 << 16, 16384, 256, 4)),
        ],
        "state.1": [
            (4 << 16, (4, 3, 256), (1 << 16, 512, 2)),
            ((4 << 16) + 1536, (4, 2, 64, 64), (1 << 16, 16384, 256, 4)),
        ],
        "attention": [(0, (4, 2, 128, 128), (1 << 16, 32768, 256, 2))],
    }


@pytest.mark.parametrize("version", RELEASES)
def test_graphs_are_recorded_as_they_were_before_a_backend_lowered_them(version: str):
    settings = parse(WorkerRecord, observed(version)[0], "worker").settings
    before, after = settings.initial_compilation, settings.compilation
    assert (before.cudagraph_mode, after.cudagraph_mode) == ("FULL_AND_PIECEWISE", "PIECEWISE")
    assert (before.cudagraph_capture_sizes, after.cudagraph_capture_sizes) == ((1, 2, 4), (1, 2))
    assert (before.max_cudagraph_capture_size, after.max_cudagraph_capture_size) == (4, 2)


@pytest.mark.parametrize("version", RELEASES)
def test_the_six_recurrent_settings_are_recorded_on_0_33_alone(version: str):
    recurrent = parse(WorkerRecord, observed(version)[0], "worker").settings.recurrent
    if version == "0.32.0":
        assert recurrent is None
    else:
        assert recurrent.model_dump(exclude_none=True) == {
            "block_size": 16,
            "mamba_cache_mode": "align",
            "mamba_block_size": 16,
            "mamba_cache_dtype": "auto",
            "mamba_ssm_cache_dtype": "float32",
        }


@pytest.mark.parametrize("version", RELEASES)
def test_a_scheduler_of_the_release_is_recorded_with_the_first_layers_specs(version: str):
    scheduler = observed(version)[1]
    assert (scheduler["attempt_id"], scheduler["dp_rank"], scheduler["unresolved_fields"]) == ("a" * 32, 0, [])
    assert scheduler["runtime"]["source_files"] == read_pins(ADAPTERS[version])
    assert scheduler["coordinator"] == "HybridKVCacheCoordinator"
    assert scheduler["managers"] == ["MambaManager", "FullAttentionManager"]
    assert scheduler["permanent_reserved_block_ids"] == [0]
    assert scheduler["initial_free_blocks"] == scheduler["num_blocks"] - 1
    assert [[*group["layer_specs"]] for group in scheduler["groups"]] == [["group0"], ["group1"]]
    absent = scheduler["launch"]["num_hash_lookahead_tokens"]
    assert absent == ("absent" if version == "0.32.0" else 0)


@pytest.mark.parametrize("version", RELEASES)
def test_every_field_of_every_known_spec_has_its_place_in_a_record(version: str):
    """The classes with other fields are in no table of kinds, and bundles are recorded layer by layer."""
    unknown = observed(version)[2]
    assert {name for name, fields in unknown.items() if fields} == {
        "HiSparseHotSpec",
        "HiSparseResidentSpec",
        "RSWASpec",
        "SinkFullAttentionSpec",
        "UniformTypeKVCacheSpecs",
    }


# The six settings.

UNIFORM = UniformTypeKVCacheSpecs(block_size=128, kv_cache_specs={"state": STATE})


@pytest.mark.parametrize(
    ("version", "specs", "recorded"),
    [
        ("0.33.0", [STATE], True),
        ("0.33.0", [ATTENTION, STATE], True),
        ("0.33.0", [ATTENTION, UNIFORM], True),
        ("0.33.0", [ATTENTION, LATENT], False),
        ("0.33.0", [], False),
        ("0.32.0", [STATE], False),
        ("0.33.1", [UNIFORM], False),
    ],
)
def test_recurrent_settings_belong_to_one_release_and_to_recurrent_groups(version: str, specs, recorded: bool):
    config = CacheConfig(block_size=128, mamba_block_size=256, mamba_ssm_cache_dtype="float32")
    found = recurrent_settings(version, config, specs)
    settings = {
        "block_size": 128,
        "mamba_cache_mode": "none",
        "mamba_block_size": 256,
        "prefix_match_unit": None,
        "mamba_cache_dtype": "auto",
        "mamba_ssm_cache_dtype": "float32",
    }
    assert found == (settings if recorded else None)


# Specs.


@pytest.mark.parametrize(
    ("spec", "values"),
    [
        (ATTENTION, {"dtype": "bfloat16", "kv_quant_mode": "NONE", "tokens_per_state": "1", "non_causal": False}),
        (STATE, {"dtypes": ["bfloat16"], "shapes": [[3, 256]], "mamba_type": "MAMBA2", "tokens_per_state": "-1"}),
        (LATENT, {"cache_role": "sparse", "head_size_v": 0, "block_stride_alignment": None}),
        (
            MLAAttentionSpec(
                block_size=64,
                num_kv_heads=1,
                head_size=128,
                dtype=torch.uint8,
                cache_role=SparseCacheRole.INDEXER,
                block_stride_alignment=MultipleOf(16),
                tokens_per_state=Fraction(1, 2),
            ),
            {"cache_role": "indexer", "block_stride_alignment": "MultipleOf(16)", "tokens_per_state": "1/2"},
        ),
        (
            SlidingWindowMLASpec(
                block_size=64, num_kv_heads=1, head_size=128, dtype=torch.uint8, sliding_window=128, bounded_replay=True
            ),
            {"bounded_replay": True, "sliding_window": 128, "extra_retained_tokens": 0},
        ),
    ],
    ids=["attention", "state", "latent", "indexer", "sliding latent"],
)
def test_the_fields_of_a_spec_are_plain_values(spec, values: dict[str, Any]):
    unresolved: list[str] = []
    record = layer_spec(spec, "spec", unresolved)
    assert values.items() <= record.items()
    assert (record["spec_type"], record["page_size_bytes"]) == (type(spec).__name__, spec.page_size_bytes)
    assert unresolved == []


def test_a_field_that_no_record_has_is_unresolved_and_not_guessed():
    spec = RSWASpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.bfloat16, rswa_window=512)
    unresolved: list[str] = []
    record = layer_spec(spec, "groups.0.layer_specs.a", unresolved)
    assert unresolved == ["groups.0.layer_specs.a.rswa_window"]
    assert "rswa_window" not in record
    assert record["head_size"] == 64


def test_a_value_that_is_no_plain_value_is_unresolved():
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.bfloat16, max_tp_shards=object())
    unresolved: list[str] = []
    assert "max_tp_shards" not in layer_spec(spec, "spec", unresolved)
    assert unresolved == ["spec.max_tp_shards"]


@pytest.mark.parametrize("value", [object(), {1, 2}, torch.zeros(1), [ATTENTION], {"a": b"bytes"}])
def test_what_json_does_not_have_is_refused(value):
    with pytest.raises(TypeError):
        plain(value)


# Views and storages.

PAGE = 256


def view(storage: torch.Tensor, offset: int = 0) -> torch.Tensor:
    return torch.as_strided(storage.view(torch.bfloat16), (2, 4, 8), (PAGE // 2, 8, 1), offset // 2)


@pytest.mark.parametrize(
    "bound",
    [None, (), [], torch.tensor([]), (torch.tensor([]),), torch.empty(4, device="meta"), "a tensor"],
    ids=["nothing", "empty tuple", "empty list", "no element", "tuple of none", "no memory", "no tensor"],
)
def test_a_layer_without_a_bound_tensor_is_unresolved(bound):
    storage = torch.zeros(2 * PAGE, dtype=torch.int8)
    modules = {"a": SimpleNamespace(kv_cache=view(storage)), "b": SimpleNamespace(kv_cache=bound)}
    unresolved: list[str] = []
    views = Views(modules, {"a", "b"}, unresolved)
    assert unresolved == ["cache.layer_tensors.b"]
    assert [*views.layer_tensors] == ["a"]
    assert len(views.storages) == 1


def test_a_layer_without_a_module_is_unresolved():
    unresolved: list[str] = []
    Views({}, {"a", "b"}, unresolved)
    assert unresolved == ["cache.layer_tensors.a", "cache.layer_tensors.b"]


def test_of_several_tensors_the_one_without_memory_is_named():
    storage = torch.zeros(2 * PAGE, dtype=torch.int8)
    module = SimpleNamespace(kv_cache=(view(storage), torch.empty(4, device="meta")))
    unresolved: list[str] = []
    views = Views({"a": module}, {"a"}, unresolved)
    assert unresolved == ["cache.layer_tensors.a.1"]
    assert [tensor["shape"] for tensor in views.layer_tensors["a"]] == [[2, 4, 8]]


def memory_of(**modules: Any) -> tuple[dict[str, Any], list[str]]:
    """`cache_memory` of a worker with one group and one allocation of layers a and b."""
    group = SimpleNamespace(
        layer_names=["a", "b"], kv_cache_spec=ATTENTION, is_eagle_group=False, host_resident=False, role="default"
    )
    regions = {"size": 2048, "layer_stride": 1024, "block_stride": 512, "offset": 0, "host_resident": False}
    tensor = SimpleNamespace(layers=["a", "b"], **regions)
    kv_cache = SimpleNamespace(
        num_blocks=2, kv_cache_groups=[group], kv_cache_tensors=[tensor], kv_cache_layout=None, kv_tp_replicas=1
    )
    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=300),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        compilation_config=SimpleNamespace(
            static_forward_context={name: SimpleNamespace(kv_cache=bound) for name, bound in modules.items()}
        ),
    )
    runner = SimpleNamespace(kv_cache_config=kv_cache, _kernel_block_sizes=[128])
    unresolved: list[str] = []
    return cache_memory(SimpleNamespace(vllm_config=config, model_runner=runner), unresolved), unresolved


def test_the_storage_of_an_allocation_is_the_one_that_holds_its_layers():
    storage = torch.zeros(4 * PAGE, dtype=torch.int8)
    memory, unresolved = memory_of(a=view(storage), b=view(storage, 2 * PAGE))
    assert unresolved == []
    assert [each["storage_id"] for each in memory["tensor_allocations"]] == ["storage0"]
    assert memory["layer_tensors"]["b"][0]["storage_offset_bytes"] == 2 * PAGE
    assert memory["groups"][0]["startup_blocks_per_request"] == 3  # 300 tokens in blocks of 128
    assert memory["available_cache_bytes"] is None


def test_an_allocation_over_several_storages_has_none_that_could_be_named():
    one, two = (torch.zeros(2 * PAGE, dtype=torch.int8) for _ in range(2))
    memory, unresolved = memory_of(a=view(one), b=view(two))
    assert unresolved == ["cache.tensor_allocations.0.storage_id"]
    assert [each["storage_id"] for each in memory["tensor_allocations"]] == ["unresolved"]
    assert len(memory["storages"]) == 2


# The files beside the engine.


@pytest.fixture
def installed(tmp_path: Path, monkeypatch) -> Iterator[Path]:
    """A copy of the pinned files, and a process that imported vLLM from there."""
    root = Path(vllm.__file__).parent.parent
    for name in read_pins(ADAPTERS["0.32.0"]):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((root / name).read_bytes())
    monkeypatch.setattr(observe_memory.vllm, "__file__", str(tmp_path / "vllm" / "__init__.py"))
    return tmp_path


def test_each_process_hashes_the_files_that_it_finds(installed: Path):
    name = "vllm/v1/core/sched/scheduler.py"
    (installed / name).write_text("patched = True\n")
    unresolved: list[str] = []
    found = observe_memory.runtime(unresolved)["source_files"]
    pins = read_pins(ADAPTERS["0.32.0"])
    assert found == pins | {name: hashlib.sha256(b"patched = True\n").hexdigest()}
    assert unresolved == []


def test_a_file_that_is_not_there_is_unresolved(installed: Path):
    (installed / "vllm/envs.py").unlink()
    unresolved: list[str] = []
    found = observe_memory.runtime(unresolved)["source_files"]
    assert unresolved == ["runtime.source_files.vllm/envs.py"]
    assert found.keys() == read_pins(ADAPTERS["0.32.0"]).keys() - {"vllm/envs.py"}


def test_a_release_without_pins_says_so(monkeypatch):
    monkeypatch.setattr(observe_memory.vllm, "__version__", "0.99.0")
    unresolved: list[str] = []
    assert observe_memory.runtime(unresolved)["source_files"] == {}
    assert unresolved == ["runtime.source_files"]


# Real records.


def real(name: str) -> ProbeRecord:
    file = ROOT / "tests" / "fixtures" / "probes" / f"{name}.json"
    return parse(ProbeRecord, json.loads(file.read_text()), file)


REAL = ("dense", "sliding", "hybrid", "tensor", "data", "lfm2", "mla", "hybrid2")


@pytest.mark.parametrize("name", REAL)
def test_every_process_of_a_launch_says_the_same_attempt_and_resolved_all(name: str):
    record = real(name)
    everybody = [*record.workers, *record.schedulers]
    assert {each.attempt_id for each in everybody} == {record.attempt_id}
    assert len(record.attempt_id) == 32
    assert {each.unresolved_fields for each in everybody} == {()}
    assert all(each.runtime.source_files == read_pins(ADAPTERS["0.32.0"]) for each in everybody)
    assert all(worker.settings.recurrent is None for worker in record.workers)


def test_weights_are_those_before_the_backend_repacked_them():
    """qwen3-tiny: tied embedding of 8,192 x 256; 4 layers of 4 + 2 x 2 heads of 64, an MLP of 768, norms."""
    layer = (4 + 2 + 2) * 64 * 256 + 4 * 64 * 256 + 3 * 768 * 256
    norms = 2 * 64 + 2 * 256
    (worker,) = real("dense").workers
    assert worker.model.weights_bytes == 2 * (8192 * 256 + 4 * (layer + norms) + 256)
    # Two ranks halve every matrix, and each has all norms.
    halves = {worker.model.weights_bytes for worker in real("tensor").workers}
    assert halves == {2 * (8192 * 256 // 2 + 4 * (layer // 2 + norms) + 256)}
