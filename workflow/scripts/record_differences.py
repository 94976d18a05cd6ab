"""What differs: found values from expected ones, two processes of a launch, or two launches of a deployment.

Ranks and launches may hold pools of another size, and nothing else: replicas profile their memory independently
(vllm#46106). So a cache is compared by its geometry, which leaves the number of blocks out.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from schemas.canonical import Strict
from schemas.observation import CacheMemory, LayerTensor, SchedulerRecord, TensorAllocation, WorkerRecord


class _Nothing:
    """In place of a field that is not there; a setting may have the value "absent", which is another."""

    def __repr__(self) -> str:
        return "nothing"


NOTHING = _Nothing()

WORKER_OWN: dict[str, Any] = {
    **dict.fromkeys(("attempt_id", "dp_rank", "tp_rank", "pp_rank", "cache"), True),
    "hardware": {"total_memory_bytes"},
}
"""Which process a worker record is of, and the machine's memory, of which equal ones differ by some bytes. Its cache is
compared by its geometry."""

SCHEDULER_OWN = {"attempt_id", "dp_rank", "num_blocks", "initial_free_blocks", "max_concurrency"}
"""Which process a scheduler record is of, and what follows from the size of its pool."""

RANK_OWN = ("model.weights_bytes",)
"""Fields in which ranks of one launch differ: tensor-parallel shards need not be equally large."""


def differ(pairs: Mapping[str, tuple[Any, Any]]) -> Iterator[str]:
    """A line for each field whose expected and found value are not equal, or of two types: 1 is no 1.0 and no True."""
    for field, (expected, found) in pairs.items():
        if expected != found or type(expected) is not type(found):
            yield f"{field}: expected {expected}, found {found}"


class Difference(NamedTuple):
    """A field whose values differ: dots between keys, numbers in brackets."""

    field: str
    expected: Any
    found: Any

    def __str__(self) -> str:
        return f"{self.field}: expected {self.expected!r}, found {self.found!r}"


def differences(expected: Any, found: Any, field: str = "") -> Iterator[Difference]:
    """The deepest fields in which two trees of plain values differ; 1, 1.0 and True are three values."""
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        for key in dict.fromkeys([*expected, *found]):
            below = f"{field}.{key}" if field else str(key)
            yield from differences(expected.get(key, NOTHING), found.get(key, NOTHING), below)
    elif isinstance(expected, list | tuple) and isinstance(found, list | tuple):
        if len(expected) != len(found):
            yield Difference(f"number of {field}", len(expected), len(found))
        for index, pair in enumerate(zip(expected, found, strict=False)):
            yield from differences(*pair, f"{field}[{index}]")
    elif type(expected) is not type(found) or expected != found:
        yield Difference(field, expected, found)


def geometry(cache: CacheMemory) -> dict[str, Any]:
    """Where each group's layers and their views lie, in blocks: equal for caches that differ in their size alone."""
    return {
        **_plain(cache, "kv_cache_layout", "kv_tp_replicas", "groups", "kernel_block_size_tokens", "layer_classes"),
        # A rank's GPU has a number of its own (0.33.0, v1/worker/gpu_worker.py:492).
        "devices": sorted({storage.device.partition(":")[0] for storage in cache.storages}),
        "tensor_allocations": [_placement(tensor, cache.num_blocks) for tensor in cache.tensor_allocations],
        "layer_tensors": _views(cache),
    }


def _plain(record: Strict, *fields: str) -> dict[str, Any]:
    return record.model_dump(include=set(fields), exclude_none=True)


def _scaled(stride: int, num_blocks: int, block_stride: int) -> dict[str, int]:
    """A distance that is whole layers of all blocks, by one block of them; one within a block, in bytes."""
    if stride >= block_stride and stride % num_blocks == 0:
        return {"bytes_of_each_block": stride // num_blocks}
    return {"bytes": stride}


def _placement(tensor: TensorAllocation, num_blocks: int) -> dict[str, Any]:
    strides = {"offset": tensor.offset}
    if len(tensor.layers) > 1:  # one layer's stride leads nowhere
        strides["layer_stride"] = tensor.layer_stride
    return {
        **_plain(tensor, "storage_id", "layers", "block_stride", "host_resident"),
        **{name: _scaled(stride, num_blocks, tensor.block_stride) for name, stride in strides.items()},
    }


def _last_rows(view: LayerTensor, num_blocks: int, block_stride: int) -> int:
    """How far a view's first axis goes on from the last block: a kernel may split a block, and leave gaps between."""
    return view.shape[0] - (num_blocks - 1) * (block_stride // max(1, view.stride_bytes[0]))


def _views(cache: CacheMemory) -> dict[str, list[dict[str, Any]]]:
    """The views of each layer, from the start of its first page."""
    starts = {
        layer: tensor.offset + index * tensor.layer_stride
        for tensor in cache.tensor_allocations
        for index, layer in enumerate(tensor.layers)
    }
    block_strides = {layer: tensor.block_stride for tensor in cache.tensor_allocations for layer in tensor.layers}
    return {
        layer: [
            {
                "storage_id": view.storage_id,
                "stride_bytes": view.stride_bytes,
                "dtype": view.dtype,
                "element_size_bytes": view.element_size_bytes,
                "kernel_blocks_of_the_last_block": _last_rows(view, cache.num_blocks, block_strides.get(layer, 0)),
                "shape": view.shape[1:],
                "offset_in_page": view.storage_offset_bytes - starts.get(layer, 0),
            }
            for view in views
        ]
        for layer, views in cache.layer_tensors.items()
    }


def _compared(expected: Any, found: Any, field: str = "") -> Iterator[Difference]:
    """`differences`, for trees that hardly ever have any: their JSON tells in one step whether they are the same."""
    if msgspec.json.encode(expected) != msgspec.json.encode(found):
        yield from differences(expected, found, field)


def worker_differences(expected: WorkerRecord, found: WorkerRecord) -> Iterator[Difference]:
    """All but which rank it is, and how many blocks it has."""
    one, other = (record.model_dump(exclude=WORKER_OWN, exclude_none=True) for record in (expected, found))
    yield from _compared(one, other)
    if expected.cache != found.cache:  # each of its fields has one type, so what is equal is the same
        yield from _compared(geometry(expected.cache), geometry(found.cache), "cache")


def scheduler_differences(expected: SchedulerRecord, found: SchedulerRecord) -> Iterator[Difference]:
    """All but which rank it is, and how many blocks it has."""
    one, other = (record.model_dump(exclude=SCHEDULER_OWN, exclude_none=True) for record in (expected, found))
    yield from _compared(one, other)
