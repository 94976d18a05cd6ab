"""Where a cache lies: one that vLLM itself planned, allocated and bound has no finding, and every rule has a change of
such a cache that breaks it, with its line. The rule about shared bytes is compared with a count of every byte."""

import itertools
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_caches import (
    FULL,
    HYBRID,
    LIVE,
    PACKED,
    PAGED,
    SHORT,
    SPLIT,
    at,
    engine_cache,
    findings,
    glm_cache,
    group,
    layers,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.kv_cache_interface import FullAttentionSpec

from schemas.canonical import read_model
from schemas.observation import CacheMemory, ProbeRecord

from cache_placement import Page, placement_findings, shared_bytes

ROOT = Path(__file__).parents[2]
PROBES = ROOT / "tests" / "fixtures" / "probes"
VLLM_033 = "PASSGRID_VLLM_033"
RECORDED = [
    pytest.param(worker.cache, id=f"{file.stem} {worker.label}")
    for file in sorted(PROBES.glob("*.json"))
    for worker in read_model(ProbeRecord, file, "probe record").workers
]


@pytest.mark.parametrize("name", LIVE)
def test_a_cache_that_the_engine_made_has_no_finding(name: str):
    assert list(placement_findings(LIVE[name]())) == []


@pytest.mark.skipif(VLLM_033 not in os.environ, reason=f"{VLLM_033} names no folder with vllm 0.33.0's Python files")
def test_a_cache_that_vllm_0_33_made_has_no_finding():
    paths = (Path(os.environ[VLLM_033]).resolve(), ROOT, ROOT / "workflow" / "scripts")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "tests/engine_caches.py"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("vllm").startswith("0.33.0")
    assert found == {name: [] for name in LIVE}


@pytest.mark.parametrize("cache", RECORDED)
def test_a_cache_of_a_launch_has_no_finding(cache: CacheMemory):
    assert list(placement_findings(cache)) == []


def test_the_engine_lays_caches_as_the_names_of_these_tests_say():
    """Else the test above would see less than it names."""
    splits = LIVE["blocks that the kernel splits"]()
    assert splits.layer_tensors["full.0"][0].shape == (5 * 4, 2, 4, 16)
    short = LIVE["groups over one another, the last one short"]()
    assert [(each.offset, len(each.layers)) for each in short.tensor_allocations] == [(0, 3), (0, 3), (0, 2)]
    mixed = LIVE["two specs in a group, layers outermost"]()
    assert [each.offset for each in mixed.tensor_allocations] == [0, 2 * 5 * 1024]
    packed = LIVE["an indexer in its kernel's pages"]()
    # A page of 2 states of 12 bytes; 4 of them hold the 8 states of 32 tokens; a block is a multiple of it.
    (tensor,), stride = packed.layer_tensors["index.0"], packed.tensor_allocations[0].block_stride
    assert stride == 2 * 96 + 2 * 1536
    assert (tensor.shape, tensor.stride_bytes) == ((4 * 136 + 4, 2, 12), (24, 12, 1))
    glm = glm_cache()
    assert glm.storages[0].size_bytes == 13_697 * 13_516_800
    assert glm.layer_tensors["indexer.10"][0].shape == (13_696 * 3200 + 17, 32, 132)
    assert [len(each.layer_names) for each in glm.groups] == [22, 9, 9, 8, 8, 11]


DISJOINT = "in common only for the same block of different groups, found block"


def longer(bytes_more: int) -> Callable[[dict[str, Any]], None]:
    def changed(document: dict[str, Any]) -> None:
        document["available_cache_bytes"] = None
        for each in (*document["storages"], *document["tensor_allocations"]):
            each["size_bytes" if "size_bytes" in each else "size"] += bytes_more

    return changed


STORAGES = {
    "a storage that no allocation names": (
        SHORT,
        lambda document: document["storages"].append({"storage_id": "s1", "device": "cpu", "size_bytes": 5}),
        [
            "storages: expected one backing allocation, found ['storage0', 's1']",
            "storages: expected at most the 15360 bytes available, found 15365",
        ],
    ),
    "a storage twice": (
        SHORT,
        lambda document: document["storages"].append(document["storages"][0]),
        [
            "storages: expected one backing allocation, found ['storage0', 'storage0']",
            "storages: expected at most the 15360 bytes available, found 30720",
        ],
    ),
    "more than there was": (
        SHORT,
        at("available_cache_bytes", value=15_359),
        ["storages: expected at most the 15359 bytes available, found 15360"],
    ),
    "a tail": (SHORT, longer(4), ["storages: expected bytes divisible by 5 blocks, found 15364"]),
    "scattered pages": (
        SHORT,
        at("kv_cache_layout", value="BHLNC"),
        ["kv_cache_layout: expected one of LBHNC, LBNHC, BLHNC, BLNHC, found BHLNC"],
    ),
}

LAYERS = {
    "a layer of no group": (
        SHORT,
        at("tensor_allocations", 2, "layers", value=["b.0", "b.1", "c"]),
        ["tensor_allocations: expected layers of the groups alone, found c"],
    ),
    "a layer of no allocation": (
        SHORT,
        at("tensor_allocations", 2, "layers", value=["b.0"]),
        ["tensor_allocations: expected b.1 in one allocation, found it in 0"],
    ),
    "a layer twice in an allocation": (
        SHORT,
        at("tensor_allocations", 2, "layers", value=["b.0", "b.1", "b.1"]),
        ["tensor_allocations: expected b.1 in one allocation, found it in 2"],
    ),
    "an allocation of two groups": (
        SHORT,
        lambda document: (
            document["tensor_allocations"][2]["layers"].append("a.2"),
            document["tensor_allocations"][1]["layers"].pop(),
        ),
        ["tensor_allocations[2] (b.0).layers: expected those of one group, found layers of groups [1, 2]"],
    ),
    "a layer that is not bound": (
        SHORT,
        lambda document: document["layer_tensors"].pop("b.1"),
        ["layer_tensors: expected a tensor of b.1, found none"],
    ),
    "a layer bound to nothing": (
        SHORT,
        at("layer_tensors", "b.1", value=[]),
        ["layer_tensors: expected a tensor of b.1, found none"],
    ),
    "a bound layer of no group": (
        SHORT,
        lambda document: document["layer_tensors"].update(c=document["layer_tensors"]["b.1"]),
        ["layer_tensors: expected layers of the groups alone, found c"],
    ),
    "a kernel block too few": (
        SHORT,
        at("kernel_block_size_tokens", value=[16, 16]),
        ["kernel_block_size_tokens: expected one of each of 3 groups, found 2"],
    ),
    "a kernel block that does not divide": (
        SHORT,
        at("kernel_block_size_tokens", value=[16, 16, 12]),
        ["kernel_block_size_tokens[2]: expected a divisor of blocks of [16], found 12"],
    ),
}

ALLOCATIONS = {
    "an unknown storage": (
        SHORT,
        lambda document: [
            document["tensor_allocations"][2].update(storage_id="s9"),
            *(document["layer_tensors"][layer][0].update(storage_id="s9") for layer in ("b.0", "b.1")),
        ],
        ["tensor_allocations[2] (b.0).storage_id: expected one of ['storage0'], found s9"],
    ),
    "another size": (
        SHORT,
        at("tensor_allocations", 2, "size", value=15_359),
        ["tensor_allocations[2] (b.0).size: expected the 15360 bytes of storage0, found 15359"],
    ),
    "pages of the host": (
        SHORT,
        at("tensor_allocations", 2, "host_resident", value=True),
        ["tensor_allocations[2] (b.0).host_resident: expected False, found True"],
    ),
    "a region that leaves the storage": (
        SHORT,
        lambda document: (
            document["tensor_allocations"][2].update(offset=10_240),
            document["layer_tensors"]["b.0"][0].update(storage_offset_bytes=10_240),
            document["layer_tensors"]["b.1"][0].update(storage_offset_bytes=15_360),
        ),
        ["tensor_allocations[2] (b.0).size: expected at least 20480 bytes for 5 blocks, found 15360"],
    ),
    "a page larger than its block": (
        SHORT,
        at("groups", 2, "layer_specs", "b.1", "page_size_bytes", value=1025),
        [
            "tensor_allocations[2] (b.0).block_stride: expected at least the page of 1025 bytes, found 1024",
            f"tensor_allocations[2] (b.0): expected bytes of b.1 and full.1 {DISJOINT} b-1 and block b",
        ],
    ),
    "a layer stride that is not the layout's": (
        PACKED,
        at("tensor_allocations", 2, "layer_stride", value=200),
        [
            "tensor_allocations[2] (tail.0).layer_stride: expected 192 in layout BLHNC, found 200",
            *(
                f"layer_tensors.tail.{layer}[0].storage_offset_bytes: expected {200 * layer}, the start of the "
                f"layer's page, found {192 * layer}"
                for layer in (1, 2)
            ),
        ],
    ),
    "blocks outermost by name, layers outermost by place": (
        engine_cache([group(layers("full", FULL, 2))], "LBHNC"),
        at("kv_cache_layout", value="BLHNC"),
        [
            "tensor_allocations[0] (full.0).layer_stride: expected 1024 in layout BLHNC, found 5120",
            "tensor_allocations[0] (full.0).block_stride: expected 2048 in layout BLHNC, found 1024",
        ],
    ),
    "split blocks with a gap": (
        engine_cache(
            [group(layers("full", FullAttentionSpec(**vars(FULL) | {"block_stride_alignment": 1280}), 1))], "LBHNC"
        ),
        at("kernel_block_size_tokens", value=[8]),
        [
            "tensor_allocations[0] (full.0).block_stride: expected the page of 1024 bytes, split in 2, found 1280",
            "layer_tensors.full.0[0].shape: expected [2, 8, 16] behind the first axis, found [2, 16, 16]",
        ],
    ),
}

OWNERS = {
    "groups half a page apart": (
        SHORT,
        lambda document: [
            document["tensor_allocations"][2].update(offset=512),
            *(
                document["layer_tensors"][layer][0].update(storage_offset_bytes=start)
                for layer, start in (("b.0", 512), ("b.1", 5632))
            ),
        ],
        [
            f"tensor_allocations[2] (b.0): expected bytes of b.0 and full.0 {DISJOINT} b-1 and block b",
            f"tensor_allocations[2] (b.0): expected bytes of b.1 and full.1 {DISJOINT} b-1 and block b",
        ],
    ),
    "layers of one group over each other": (
        PACKED,
        lambda document: [
            document["tensor_allocations"][1].update(offset=160),
            *(
                document["layer_tensors"][layer][0].update(storage_offset_bytes=start)
                for layer, start in (("latent.0", 160), ("latent.1", 1696))
            ),
        ],
        [f"tensor_allocations[1] (latent.0): expected bytes of latent.0 and index.1 {DISJOINT} b and block b"],
    ),
    "layers of one allocation over each other": (
        engine_cache([group(layers("full", FULL, 2))], "BLHNC"),
        lambda document: (
            document["tensor_allocations"][0].update(layer_stride=1000),
            document["layer_tensors"]["full.1"][0].update(storage_offset_bytes=1000),
        ),
        [
            "tensor_allocations[0] (full.0).layer_stride: expected 1024 in layout BLHNC, found 1000",
            f"tensor_allocations[0] (full.0): expected bytes of full.1 and full.0 {DISJOINT} b and block b",
        ],
    ),
    "a layer over itself, and over another stride": (
        SHORT,
        lambda document: [
            document["tensor_allocations"][2].update(block_stride=512, layer_stride=2560, layers=["b.0"]),
            document["groups"][2].update(layer_names=["b.0"]),
            document["layer_tensors"].pop("b.1"),
            document["layer_tensors"]["b.0"][0].update(stride_bytes=[512, 512, 32, 2]),
        ],
        [
            "tensor_allocations[2] (b.0).block_stride: expected at least the page of 1024 bytes, found 512",
            *(
                f"tensor_allocations[2] (b.0).block_stride: expected 1024 of the allocation of {other} in the "
                "same bytes, found 512"
                for other in ("full.0", "a.0")
            ),
            f"tensor_allocations[2] (b.0): expected bytes of b.0 and b.0 {DISJOINT} b+1 and block b",
        ],
    ),
}

CHANGES = {**STORAGES, **LAYERS, **ALLOCATIONS, **OWNERS}


@pytest.mark.parametrize("name", CHANGES)
def test_each_change_has_its_line(name: str):
    cache, change, lines = CHANGES[name]
    assert list(placement_findings(cache)) == []
    assert findings(cache, change) == lines


def test_a_layout_that_is_not_known_asks_for_no_strides():
    known = "LBHNC, LBNHC, BLHNC, BLNHC"
    found = findings(PACKED, at("kv_cache_layout", value="LHBNC"))
    assert found == [f"kv_cache_layout: expected one of {known}, found LHBNC"]


def test_allocations_stand_in_any_order():
    mixed = LIVE["two specs in a group, layers outermost"]()
    assert findings(mixed, lambda document: document["tensor_allocations"].reverse()) == []


def test_a_worker_need_not_know_how_much_was_available():
    assert findings(SHORT, at("available_cache_bytes", value=None)) == []


def test_a_group_that_no_attention_kernel_reads_has_no_kernel_block():
    assert findings(HYBRID, at("kernel_block_size_tokens", value=[None, None, 256])) == []


def leaves(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    if isinstance(value, dict):
        return [leaf for key, below in value.items() for leaf in leaves(below, (*path, key))]
    if isinstance(value, list):
        return [leaf for index, below in enumerate(value) for leaf in leaves(below, (*path, index))]
    return [path]


PLACES = ("num_blocks", "kernel_block_size_tokens", "storages", "tensor_allocations", "layer_tensors")


def is_free(document: dict[str, Any], path: tuple[str | int, ...]) -> bool:
    """The name of the device is not a place, nor is the stride of an axis of one."""
    match path:
        case ("layer_tensors", layer, index, "stride_bytes", axis):
            return bool(document["layer_tensors"][layer][index]["shape"][axis] == 1)
    return path[-1] == "device"


SMALL = [pytest.param(make(), id=name) for name, make in LIVE.items() if name != "GLM-5.3-Flash"]


@pytest.mark.parametrize("cache", SMALL + RECORDED)
def test_no_number_and_no_name_of_a_place_can_change_unseen(cache: CacheMemory):
    document = json.loads(cache.model_dump_json())
    for path in leaves({field: document[field] for field in PLACES}):
        *parents, last = path
        parent = document
        for key in parents:
            parent = parent[key]
        value = parent[last]
        if isinstance(value, str):
            others = [value + "x"]
        elif isinstance(value, bool):
            others = [not value]
        else:
            others = [value + 1, 2 * value + 2]
        for other in others:
            seen = findings(cache, at(*path, value=other))
            assert bool(seen) != is_free(document, path), (path, value, other)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([SHORT, PACKED, PAGED, SPLIT, HYBRID]), st.data())
def test_no_number_is_too_strange_to_be_judged(cache: CacheMemory, data: st.DataObject):
    document = json.loads(cache.model_dump_json())
    numbers = [path for path in leaves(document) if path[0] in PLACES or path[0] == "groups"]
    values = st.sampled_from([0, 1, 2, 3, 7, 1023, 2**31, 2**53])
    for path in data.draw(st.lists(st.sampled_from(numbers), min_size=1, max_size=4, unique=True)):
        parent = document
        for key in path[:-1]:
            parent = parent[key]
        if isinstance(parent[path[-1]], int) and not isinstance(parent[path[-1]], bool):
            parent[path[-1]] = data.draw(values)
    try:
        changed = CacheMemory.model_validate_json(json.dumps(document))
    except ValueError:
        return  # the schema refuses it
    for line in placement_findings(changed):
        assert line.startswith("")
        assert ": expected " in line
        assert ", found " in line


pages = st.builds(
    Page,
    layer=st.uuids().map(str),
    group=st.integers(0, 2),
    allocation=st.just(0),
    start=st.integers(0, 40),
    size=st.integers(1, 9),
    block_stride=st.sampled_from([4, 6]),
)


@settings(max_examples=500, deadline=None)
@given(st.lists(pages, min_size=1, max_size=6, unique_by=lambda page: page.layer), st.integers(1, 6))
def test_bytes_with_two_owners_are_those_that_a_count_of_every_byte_finds(found: list[Page], blocks: int):
    """Every byte of every page of every block of a small cache: who may not share it?"""
    owners = defaultdict(set)
    for page in found:
        for block in range(blocks):
            start = page.start + block * page.block_stride
            for byte in range(start, start + page.size):
                owners[byte].add((page, block))
    expected = set()
    for own in owners.values():
        for (one, one_block), (other, other_block) in itertools.combinations(sorted(own), 2):
            allowed = one_block == other_block and one.group != other.group
            if one.block_stride == other.block_stride and not allowed:
                expected.add((frozenset((one.layer, other.layer)), one.group == other.group))
    shared = shared_bytes(found, blocks)
    assert {(frozenset((one.layer, other.layer)), one.group == other.group) for one, other, _ in shared} == expected
    for one, other, distance in shared:
        block = max(0, -distance)
        both = [
            set(range(page.start + at * page.block_stride, page.start + at * page.block_stride + page.size))
            for page, at in ((one, block), (other, block + distance))
        ]
        assert max(block, block + distance) < blocks
        assert both[0] & both[1]
