"""Each way in which a bound tensor can leave its layer's page has its line."""

import pytest
from engine_caches import FULL, HYBRID, PACKED, PAGED, SHORT, SPLIT, at, engine_cache, findings, group, layers

START = "the start of the layer's page"
VIEWS = {
    "a stride too few": (
        SHORT,
        at("layer_tensors", "b.1", 0, "stride_bytes", value=[1024, 512, 32]),
        ["layer_tensors.b.1[0].stride_bytes: expected one of each of 4 axes, found 3"],
    ),
    "another storage": (
        SHORT,
        at("layer_tensors", "b.1", 0, "storage_id", value="s9"),
        ["layer_tensors.b.1[0].storage_id: expected storage0 of its allocation, found s9"],
    ),
    "another dtype": (
        SHORT,
        at("layer_tensors", "b.1", 0, "dtype", value="float16"),
        ["layer_tensors.b.1[0].dtype: expected bfloat16 of its spec, found float16"],
    ),
    "an element that does not fit": (
        SHORT,
        at("layer_tensors", "b.1", 0, "element_size_bytes", value=1),
        ["layer_tensors.b.1[0].element_size_bytes: expected 2 of bfloat16, found 1"],
    ),
    "fewer tokens": (
        SHORT,
        at("layer_tensors", "b.1", 0, "shape", value=[5, 2, 15, 16]),
        ["layer_tensors.b.1[0].shape: expected [2, 16, 16] behind the first axis, found [2, 15, 16]"],
    ),
    "an empty axis": (
        SHORT,
        at("layer_tensors", "b.1", 0, "shape", value=[5, 0, 16, 16]),
        ["layer_tensors.b.1[0].shape: expected [2, 16, 16] behind the first axis, found [0, 16, 16]"],
    ),
    "fewer blocks": (
        SHORT,
        at("layer_tensors", "b.1", 0, "shape", value=[4, 2, 16, 16]),
        ["layer_tensors.b.1[0].shape: expected 5 on the first axis for 5 blocks, found 4"],
    ),
    "blocks in steps of their own": (
        SHORT,
        at("layer_tensors", "b.1", 0, "stride_bytes", value=[1020, 512, 32, 2]),
        ["layer_tensors.b.1[0].stride_bytes: expected [1024, 512, 32, 2], found [1020, 512, 32, 2]"],
    ),
    "heads over each other": (
        SHORT,
        at("layer_tensors", "b.1", 0, "stride_bytes", value=[1024, 0, 32, 2]),
        ["layer_tensors.b.1[0].stride_bytes: expected [1024, 512, 32, 2], found [1024, 0, 32, 2]"],
    ),
    "tokens outside heads": (
        engine_cache([group(layers("full", FULL, 1))], "LBHNC"),
        at("kv_cache_layout", value="LBNHC"),
        ["layer_tensors.full.0[0].stride_bytes: expected [1024, 32, 64, 2], found [1024, 512, 32, 2]"],
    ),
    "past the end of its page": (
        SHORT,
        at("layer_tensors", "b.1", 0, "storage_offset_bytes", value=5122),
        [f"layer_tensors.b.1[0].storage_offset_bytes: expected 5120, {START}, found 5122"],
    ),
    "before its page": (
        SHORT,
        at("layer_tensors", "b.1", 0, "storage_offset_bytes", value=5118),
        [f"layer_tensors.b.1[0].storage_offset_bytes: expected 5120, {START}, found 5118"],
    ),
    "in the page of the next layer of its block": (
        PACKED,
        at("layer_tensors", "latent.0", 0, "storage_offset_bytes", value=194),
        [f"layer_tensors.latent.0[0].storage_offset_bytes: expected 192, {START}, found 194"],
    ),
    "larger than its page": (
        PACKED,
        at("groups", 0, "layer_specs", "index.1", "page_size_bytes", value=95),
        ["layer_tensors.index.1: expected at most the 95 bytes of the layer's page, found 96 of a block"],
    ),
    "two tensors where there is one": (
        SHORT,
        lambda document: document["layer_tensors"]["b.1"].append(document["layer_tensors"]["b.1"][0]),
        ["layer_tensors.b.1: expected 1 tensors, found 2"],
    ),
    "states over each other": (
        HYBRID,
        at("layer_tensors", "a.0", 1, "storage_offset_bytes", value=3068),
        ["layer_tensors.a.0[1].storage_offset_bytes: expected 3072, behind tensor 0, found 3068"],
    ),
    "states in the wrong order": (
        HYBRID,
        lambda document: document["layer_tensors"]["a.0"].reverse(),
        ["layer_tensors.a.0[0].dtype: expected bfloat16 of its spec, found float32"],
    ),
    "a state of an unknown dtype": (
        HYBRID,
        lambda document: (
            document["groups"][0]["layer_specs"]["a.0"].update(dtypes=["bits7", "float32"]),
            document["layer_tensors"]["a.0"][0].update(dtype="bits7"),
        ),
        [
            "groups[0].layer_specs.a.0.dtype: expected one of bfloat16, float16, float32, uint8, int8, float8_e4m3fn, "
            "float8_e5m2, found bits7"
        ],
    ),
    "a state without a dtype": (
        HYBRID,
        at("groups", 0, "layer_specs", "a.0", "dtypes", value=["bfloat16"]),
        ["groups[0].layer_specs.a.0.dtypes: expected one of each of 2 shapes, found 1"],
    ),
    "an attention spec without heads": (
        SHORT,
        at("groups", 2, "layer_specs", "b.1", "num_kv_heads", value=None),
        ["groups[2].layer_specs.b.1.num_kv_heads: expected a size, found none"],
    ),
    "a state of more tokens than a block has": (
        SHORT,
        at("groups", 2, "layer_specs", "b.1", "tokens_per_state", value="17"),
        ["groups[2].layer_specs.b.1.tokens_per_state: expected at most a block of 16 tokens, found 17"],
    ),
    "whole blocks where the kernel splits them": (
        SPLIT,
        at("layer_tensors", "full.1", 0, "shape", value=[5, 2, 4, 16]),
        ["layer_tensors.full.1[0].shape: expected 20 on the first axis for 5 blocks, found 5"],
    ),
    "pages of blocks that lie close together": (
        PAGED,
        at("layer_tensors", "index.1", 0, "shape", value=[20, 2, 12]),
        ["layer_tensors.index.1[0].shape: expected 548 on the first axis for 5 blocks, found 20"],
    ),
    "pages of no state": (
        PAGED,
        at("layer_tensors", "index.1", 0, "shape", value=[548, 0, 12]),
        ["layer_tensors.index.1[0].shape: expected [1, 8, 12] behind the first axis, found [0, 12]"],
    ),
    "pages that divide no block": (
        PAGED,
        lambda document: document["tensor_allocations"][0].update(block_stride=3263),
        [
            "tensor_allocations[0] (index.0).block_stride: expected 3264 in layout BLHNC, found 3263",
            *(
                f"tensor_allocations[{place}] ({layer}).block_stride: expected 3263 of the allocation of index.0 "
                "in the same bytes, found 3264"
                for place, layer in ((1, "latent.0"), (2, "tail.0"))
            ),
            *(
                f"layer_tensors.index.{layer}[0].shape: expected pages that divide the block stride of 3263 "
                "bytes, found 24"
                for layer in (0, 1)
            ),
        ],
    ),
    "pages of a cache that is not compressed": (
        PAGED,
        at("groups", 0, "layer_specs", "index.1", "tokens_per_state", value="1"),
        ["layer_tensors.index.1[0].shape: expected [1, 32, 12] behind the first axis, found [2, 12]"],
    ),
}


@pytest.mark.parametrize("name", VIEWS)
def test_each_change_of_a_view_has_its_line(name: str):
    cache, change, lines = VIEWS[name]
    assert findings(cache, change) == lines
