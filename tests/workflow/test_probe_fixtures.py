"""The CPU engine's real records against calculations by hand, from each model's config and the campaign's bytes."""

import json
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from schemas.canonical import read_model
from schemas.observation import ProbeRecord, SchedulerRecord, WorkerRecord

from cache_groups import profile_groups
from spec_pages import pool_page_bytes

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "tests" / "fixtures" / "probes"
MIB = 1 << 20
BFLOAT16 = 2


class ByHand(NamedTuple):
    """What a launch must report: bytes, blocks, and blocks of its longest request in each group.

    `layers` is how many layers each group has, all of one page; the largest of them makes a block of the pool.
    """

    model: str
    cache_bytes: int
    block: int
    page: int
    layers: tuple[int, ...]
    blocks: int
    startup: tuple[int, ...]


LAUNCHES = {
    # K and V of 2 heads x 64, 128 tokens: 64 KiB a layer, four layers a block; 256 MiB / 256 KiB. 4096 / 128 tokens.
    "dense": ByHand("config/models/qwen3-tiny", 256 * MIB, 128, 65_536, (4,), 1_024, (32,)),
    # Three of each four layers have a window of 512: of 6 layers, 4 in two groups of two. A request keeps 511 tokens
    # and a step of 2,048 in its window, 2,559 / 128 = 19.99: 20 blocks, and one because it starts inside of one.
    "sliding": ByHand("config/models/gemma3-tiny", 256 * MIB, 128, 65_536, (2, 2, 2), 2_048, (21, 21, 32)),
    # A state of 68,608 bytes needs 134 tokens of 512 bytes: two kernel blocks of 128. A request keeps the state that it
    # runs on and the one before; 4096 / 256 tokens of attention.
    "hybrid": ByHand("config/models/qwen3-next-tiny", 256 * MIB, 256, 131_072, (1, 1, 1, 1), 2_048, (2, 2, 2, 16)),
    # Half of everything on each of two ranks: as many blocks of half the bytes.
    "hybrid2": ByHand("config/models/qwen3-next-tiny", 128 * MIB, 256, 65_536, (1, 1, 1, 1), 2_048, (2, 2, 2, 16)),
    # One of two KV heads on each rank: 32 KiB a layer; 64 MiB / 128 KiB. 2048 / 128 tokens.
    "tensor": ByHand("config/models/qwen3-tiny", 64 * MIB, 128, 32_768, (4,), 512, (16,)),
    # Each data-parallel rank has both KV heads of both layers: 64 MiB / 128 KiB.
    "data": ByHand("config/models/llama-moe-tiny", 64 * MIB, 128, 65_536, (2,), 512, (16,)),
    # A latent of 512 and a rotary key of 64 in bfloat16, 16 tokens: 18,432 bytes a layer; 64 MiB / 36,864 = 1820.4.
    "mla": ByHand("tests/campaigns/models/deepseek-v2-tiny", 64 * MIB, 16, 18_432, (2,), 1_820, (128,)),
    # The convolutions' states of 1 KiB are padded to the page of the attention layer; 64 MiB / 64 KiB.
    "lfm2": ByHand("tests/campaigns/models/lfm2-tiny", 64 * MIB, 128, 65_536, (1, 1, 1, 1), 1_024, (2, 2, 2, 32)),
}

CONCURRENCY = {
    "dense": Fraction(1_024, 32),
    "sliding": Fraction(2_048, 74),
    "hybrid": Fraction(2_048, 22),
    "hybrid2": Fraction(2_048, 22),
    "tensor": Fraction(512, 16),
    "data": Fraction(512, 16),
    "mla": Fraction(1_820, 128),
    "lfm2": Fraction(1_024, 38),
}


def record_of(name: str) -> ProbeRecord:
    return read_model(ProbeRecord, FIXTURES / f"{name}.json", "probe record")


def config_of(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((ROOT / LAUNCHES[name].model / "config.json").read_text())
    return config


def workers() -> list[tuple[str, WorkerRecord]]:
    return [(name, worker) for name in LAUNCHES for worker in record_of(name).workers]


def schedulers() -> list[tuple[str, SchedulerRecord]]:
    return [(name, scheduler) for name in LAUNCHES for scheduler in record_of(name).schedulers]


def named(value: object) -> str | None:
    return value if isinstance(value, str) else getattr(value, "label", None)


def test_every_record_is_calculated():
    assert {file.stem for file in FIXTURES.glob("*.json")} == LAUNCHES.keys() == CONCURRENCY.keys()


@pytest.mark.parametrize("name", LAUNCHES)
def test_an_attention_page_follows_from_the_models_config(name):
    """Heads of this rank x tokens x (key and value) x 2 bytes; MLA: one latent and its rotary part."""
    config, hand, record = config_of(name), LAUNCHES[name], record_of(name)
    if "kv_lora_rank" in config:
        token = (config["kv_lora_rank"] + config["qk_rope_head_dim"]) * BFLOAT16
    else:
        head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
        heads = config["num_key_value_heads"] // record.launch["topology"]["tp"]
        token = heads * 2 * head_dim * BFLOAT16
    assert token * hand.block == hand.page


@pytest.mark.parametrize(("name", "worker"), workers(), ids=named)
def test_pages_and_blocks_of_a_worker(name, worker):
    hand, cache = LAUNCHES[name], worker.cache
    assert tuple(len(group.layer_names) for group in cache.groups) == hand.layers
    assert {spec.page_size_bytes for group in cache.groups for spec in group.layer_specs.values()} == {hand.page}
    assert {spec.block_size for group in cache.groups for spec in group.layer_specs.values()} == {hand.block}
    pool_block = max(hand.layers) * hand.page
    assert pool_page_bytes(cache) == pool_block
    assert cache.num_blocks == hand.blocks == hand.cache_bytes // pool_block
    assert sum(storage.size_bytes for storage in cache.storages) == hand.blocks * pool_block
    assert worker.settings.kv_cache_memory_bytes == hand.cache_bytes
    groups = profile_groups(worker.runtime.version, cache, pool_block)
    assert [group.page_size_bytes for group in groups] == [pool_block] * len(hand.layers)
    assert [group.num_layers for group in groups] == list(hand.layers)


@pytest.mark.parametrize(("name", "scheduler"), schedulers(), ids=named)
def test_blocks_and_concurrency_of_a_scheduler(name, scheduler):
    hand = LAUNCHES[name]
    assert scheduler.num_blocks == hand.blocks
    assert scheduler.initial_free_blocks == hand.blocks - 1  # without the null block
    assert scheduler.permanent_reserved_block_ids == (0,)
    assert tuple(group.startup_blocks_per_request for group in scheduler.groups) == hand.startup
    assert CONCURRENCY[name] == Fraction(hand.blocks, sum(hand.startup))
    assert scheduler.max_concurrency == float(CONCURRENCY[name])
    assert (scheduler.block_size, scheduler.hash_block_size) == (hand.block, hand.block)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("dense", ["attention"]),
        ("sliding", ["attention", "attention", "attention"]),
        ("hybrid", ["state", "state", "state", "attention"]),
        ("hybrid2", ["state", "state", "state", "attention"]),
        ("tensor", ["attention"]),
        ("data", ["attention"]),
        ("mla", ["attention"]),
        ("lfm2", ["state", "state", "state", "attention"]),
    ],
)
def test_kinds_windows_and_states(name, kinds):
    cache = record_of(name).workers[0].cache
    groups = profile_groups("0.32.0", cache, pool_page_bytes(cache))
    assert [group.kind for group in groups] == kinds
    windows = [512, 512, None] if name == "sliding" else [None] * len(kinds)
    assert [group.sliding_window for group in groups] == windows
    assert [group.blocks_per_request for group in groups] == [1 if kind == "state" else None for kind in kinds]
    assert {group.prefill_checkpoint_blocks for group in groups} == {None}


@pytest.mark.parametrize(("name", "tp"), [("hybrid", 1), ("hybrid2", 2)])
def test_a_recurrent_state_follows_from_the_models_config(name, tp):
    """Gated delta rule: 3 columns of keys, keys and values in bfloat16; one matrix of each value head in float32."""
    config = config_of(name)
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    columns = (config["linear_conv_kernel_dim"] - 1, (2 * keys + values) // tp)
    matrices = (config["linear_num_value_heads"] // tp, config["linear_value_head_dim"], config["linear_key_head_dim"])
    for group in record_of(name).workers[0].cache.groups[:3]:
        (spec,) = group.layer_specs.values()
        assert spec.shapes == (columns, matrices)
        assert spec.dtypes == ("bfloat16", "float32")
    content = columns[0] * columns[1] * 2 + matrices[0] * matrices[1] * matrices[2] * 4
    assert content == 68_608 // tp
    token = LAUNCHES[name].page // LAUNCHES[name].block
    assert 128 < content / token <= 256 == LAUNCHES[name].block  # whole blocks of the CPU's kernel, 128 tokens


def test_a_short_convolutions_state_follows_from_the_models_config():
    config = config_of("lfm2")
    for group in record_of("lfm2").workers[0].cache.groups[:3]:
        (spec,) = group.layer_specs.values()
        assert spec.shapes == ((config["conv_L_cache"] - 1, config["conv_dim"]),)
        assert spec.dtypes == ("bfloat16",)


@pytest.mark.parametrize(("name", "tp"), [("dense", 1), ("tensor", 2)])
def test_bytes_of_the_weights(name, tp):
    """Embeddings, attention and feed-forward are split over ranks; norms are not."""
    config = config_of(name)
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    attention = hidden * (queries + 2 * keys) + queries * hidden
    feed_forward = 3 * hidden * config["intermediate_size"]
    norms = 2 * hidden + 2 * config["head_dim"]
    split = config["vocab_size"] * hidden + layers * (attention + feed_forward)
    whole = layers * norms + hidden
    found = {worker.model.weights_bytes for worker in record_of(name).workers}
    assert found == {(split // tp + whole) * BFLOAT16}
