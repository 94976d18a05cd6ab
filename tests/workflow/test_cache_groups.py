"""Kinds of cache groups, pages computed again from the specs, and whether a scheduler counts what its workers hold."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import glm_records as glm
import pytest

from producer.adapters import ADAPTERS, GROUP_KINDS, REFUSED_SPECS, SPEC_MANAGERS, UNIFORM_SPEC
from producer.resolving import read_campaign, resolve
from schemas.canonical import parse
from schemas.errors import Refusal
from schemas.observation import CacheGroup, CacheMemory, LayerSpec, SchedulerRecord, WorkerRecord
from schemas.request import ResolvedDeployment

from cache_groups import group_findings, kind_of, memory_findings, profile_groups
from spec_checks import MAMBA_TYPES, SPEC_FIELDS
from spec_pages import ELEMENT_BYTES, page_bytes, pool_block_bytes, stride_alignment

ROOT = Path(__file__).parents[2]
VLLM_033 = "PASSGRID_VLLM_033"
VERSION = "0.32.0"

FULL = {
    "spec_type": "FullAttentionSpec",
    "block_size": 128,
    "page_size_bytes": 65_536,
    "dcp_sharded": True,
    "num_kv_heads": 2,
    "head_size": 64,
    "head_size_v": 64,
    "dtype": "bfloat16",
    "kv_quant_mode": "NONE",
    "tokens_per_state": "1",
}
WINDOW = FULL | {"spec_type": "SlidingWindowSpec", "sliding_window": 512, "extra_retained_tokens": 0}
CONVOLUTION = WINDOW | {"block_size": 4, "page_size_bytes": 4 * 2 * 64 * 2, "head_size_v": 0, "sliding_window": 4}
MAMBA = {
    "spec_type": "MambaSpec",
    "block_size": 256,
    "page_size_bytes": 131_072,
    "page_size_padded": 131_072,
    "dcp_sharded": False,
    "shapes": [[3, 512], [4, 64, 64]],
    "dtypes": ["bfloat16", "float32"],
    "mamba_type": "GDN_ATTN",
    "mamba_cache_mode": "align",
    "num_speculative_blocks": 0,
    "num_prefill_checkpoint_blocks": 0,
    "num_heads": 1,
    "tokens_per_state": "-1",
    "tp_replicated": False,
}
RING = glm.tail_spec()


def spec_of(fields: dict[str, Any], **change: Any) -> LayerSpec:
    return parse(LayerSpec, fields | change, "spec")


def group_of(*specs: dict[str, Any], **change: Any) -> CacheGroup:
    """A group of layers a, b, ...: of one class if all specs are equal, else a bundle."""
    layers = dict(zip("abcdef", specs, strict=False))
    uniform = any(spec != specs[0] for spec in specs)
    fields = {
        "layer_names": list(layers),
        "spec_type": UNIFORM_SPEC if uniform else specs[0]["spec_type"],
        "block_size_tokens": specs[0]["block_size"],
        "spec_page_size_bytes": sum(s["page_size_bytes"] for s in specs) if uniform else specs[0]["page_size_bytes"],
        "startup_blocks_per_request": 1,
        "layer_specs": layers,
        "is_eagle_group": False,
        "host_resident": False,
        "role": "default",
    }
    return parse(CacheGroup, fields | change, "group")


def engine_classes(environment: dict[str, str]) -> dict[str, Any]:
    command = [sys.executable, "tests/spec_classes.py"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def check_classes(found: dict[str, Any], later: set[str]) -> None:
    """Every spec class of an engine is in one table, with its own fields, but for those of later releases, and its own
    manager."""
    bases = {"AttentionSpec", UNIFORM_SPEC}
    assert GROUP_KINDS.keys() | REFUSED_SPECS.keys() == found["fields"].keys() - bases
    assert not GROUP_KINDS.keys() & REFUSED_SPECS.keys()
    assert {*MAMBA_TYPES} == {*found["mamba_types"]} - {"CUSTOM"}
    assert {name: found["managers"][name] for name in GROUP_KINDS} == SPEC_MANAGERS
    for name in GROUP_KINDS:
        assert {*found["fields"][name]} == SPEC_FIELDS[name] - {"spec_type", "page_size_bytes"} - later, name


def test_every_spec_class_of_the_installed_engine_has_a_kind_or_is_refused_by_name():
    pytest.importorskip("vllm.v1.kv_cache_interface")
    check_classes(engine_classes(dict(os.environ)), {"is_draft", "topk_buffer_width"})


@pytest.mark.skipif(VLLM_033 not in os.environ, reason=f"{VLLM_033} names no folder with vllm 0.33.0's Python files")
def test_every_spec_class_of_vllm_0_33_has_a_kind_or_is_refused_by_name():
    folder = Path(os.environ[VLLM_033]).resolve()
    found = engine_classes(os.environ | {"PYTHONPATH": str(folder)})
    assert found["vllm"].startswith("0.33.0")
    assert Path(found["file"]).is_relative_to(folder)
    check_classes(found, set())


@pytest.mark.parametrize(
    ("specs", "kind"),
    [
        ([FULL], "attention"),
        ([WINDOW, WINDOW], "attention"),
        ([glm.latent_spec(), glm.index_spec()], "attention"),
        ([FULL | {"spec_type": "SlidingWindowMLASpec", "sliding_window": 128}], "attention"),
        ([FULL, FULL | {"num_kv_heads": 1}], "attention"),
        ([MAMBA], "state"),
        ([RING], "state"),
    ],
)
def test_a_group_has_its_members_kind(specs, kind):
    for version in ADAPTERS:
        assert kind_of(version, group_of(*specs), {"a": "Attention", "b": "Attention"}) == kind


@pytest.mark.parametrize("name", [*REFUSED_SPECS, "SpecOfTomorrow"])
def test_a_class_without_a_kind_is_refused_by_name_and_with_its_reason(name):
    refused = FULL | {"spec_type": name}
    line = f"unsupported runtime cache spec {name}"
    if name in REFUSED_SPECS:
        line += f", which {REFUSED_SPECS[name]}"
    for group in (group_of(refused), group_of(FULL, refused), group_of(FULL, spec_type=name)):
        with pytest.raises(ValueError, match=f"^{re.escape(line)}$"):
            kind_of(VERSION, group, {})
        assert f"groups[0]: {line}" in list(group_findings(VERSION, memory(group)))


def test_a_group_of_several_kinds_is_refused():
    with pytest.raises(ValueError, match="kind: expected one of all layers, found attention, state"):
        kind_of(VERSION, group_of(FULL, MAMBA), {})


def test_a_release_without_an_adapter_has_no_kinds():
    with pytest.raises(Refusal, match=r"unqualified backend runtime: vllm '0\.33\.1'"):
        kind_of("0.33.1", group_of(FULL), {})


def test_only_inklings_short_convolutions_are_convolutions():
    classes = {"a": "InklingConvState", "b": "InklingConvState"}
    assert kind_of(VERSION, group_of(CONVOLUTION, CONVOLUTION), classes) == "convolution"
    (group,) = profile_groups(VERSION, memory(group_of(CONVOLUTION), layer_classes={"a": "InklingConvState"}), 7)
    assert (group.kind, group.sliding_window, group.blocks_per_request) == ("convolution", 4, None)
    # The same spec of any other layer is a short window of attention.
    assert kind_of(VERSION, group_of(CONVOLUTION), {"a": "Attention"}) == "attention"


@pytest.mark.parametrize("change", [{"sliding_window": 3}, {"dtype": "float16"}, {"spec_type": "FullAttentionSpec"}])
def test_a_convolution_unlike_inklings_is_refused(change):
    expected = r"of InklingConvState: expected class, window and dtype \('SlidingWindowSpec', 4, 'bfloat16'\), found"
    with pytest.raises(ValueError, match=f"unsupported runtime cache spec .*{expected}"):
        kind_of(VERSION, group_of(CONVOLUTION | change), {"a": "InklingConvState"})


def test_convolution_and_attention_in_one_group_are_refused():
    with pytest.raises(ValueError, match="kind: expected one of all layers, found attention, convolution"):
        kind_of(VERSION, group_of(CONVOLUTION, WINDOW), {"a": "InklingConvState", "b": "Attention"})


@pytest.mark.parametrize(
    ("fields", "change", "page"),
    [
        (FULL, {}, 2 * 128 * (64 + 64) * 2),
        (FULL, {"dtype": "uint8"}, 2 * 128 * 128),
        (FULL, {"head_size_v": 32}, 2 * 128 * (64 + 32) * 2),
        (FULL, {"num_head_slots": 3}, 3 * 128 * 128 * 2),
        (FULL, {"state_content_bytes": 656}, 2 * 128 * 656),
        (FULL, {"tokens_per_state": "4"}, 2 * 32 * 128 * 2),
        (FULL, {"tokens_per_state": "1/2"}, 2 * 256 * 128 * 2),
        (FULL, {"page_size_padded": 70_000}, 70_000),
        (MAMBA, {"page_size_padded": None}, 3 * 512 * 2 + 4 * 64 * 64 * 4),
        (MAMBA, {}, 131_072),
        (glm.latent_spec(), {}, 1_114_112),
        (glm.index_spec(), {}, 71_808),
        (RING, {}, 2_048),
        (glm.kda_spec(checkpoint=True), {"page_size_padded": None}, 3 * 6_144 * 2 + 16 * 128 * 128 * 4),
    ],
)
def test_pages_by_hand(fields, change, page):
    assert page_bytes(spec_of(fields, **change)) == page


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"dtype": "float4"}, "dtype: expected one of bfloat16, .*, found float4"),
        ({"dtype": None}, "dtype: expected one of bfloat16, .*, found None"),
        ({"head_size": None}, "head_size: expected a size, found none"),
        ({"tokens_per_state": "0"}, "tokens_per_state: expected a positive number, found 0"),
        ({"tokens_per_state": "1/0"}, "tokens_per_state: expected a positive number, found 1/0"),
        ({"tokens_per_state": "1e999999999"}, "tokens_per_state: expected a positive number, found 1e999999999"),
        ({"tokens_per_state": "129"}, "tokens_per_state: expected at most a block of 128 tokens, found 129"),
        ({"tokens_per_state": None}, "tokens_per_state: expected a positive number, found None"),
        ({"page_size_padded": 65_535}, "page_size_padded: expected at least 65536, found 65535"),
        ({"alignment": 576, "page_size_padded": 65_536}, "page_size_padded: expected at least 65664, found 65536"),
        ({"shapes": [[1]]}, "dtypes: expected one of each of 1 shapes, found 0"),
    ],
)
def test_a_page_that_does_not_follow_says_why(change, line):
    with pytest.raises(ValueError, match=f"^{line}$"):
        page_bytes(spec_of(FULL, **change))


@pytest.mark.parametrize(
    ("asked", "bytes_"),
    [
        (None, 1),
        ("512", 512),
        ("MultipleOf(32)", 2 * 32 * 128 * 2),
        ("MultipleOf(48)", 2 * 16 * 128 * 2),  # a kernel's block divides both 48 and 128
        ("MultipleOf(256)", 1),  # the block is one of the kernel's
    ],
)
def test_alignment_of_the_stride_between_blocks(asked, bytes_):
    assert stride_alignment(spec_of(FULL, block_stride_alignment=asked)) == bytes_


@pytest.mark.parametrize("asked", ["", "0", "-1", "MultipleOf(0)", "MultipleOf(a)", "64 bytes", "9" * 17])
def test_an_alignment_that_says_nothing(asked):
    with pytest.raises(ValueError, match="block_stride_alignment: expected bytes or MultipleOf"):
        stride_alignment(spec_of(FULL, block_stride_alignment=asked))


def test_an_alignment_to_a_kernels_block_of_no_state_is_refused():
    index = spec_of(glm.index_spec(), tokens_per_state="256")  # the kernel's block is gcd(256, 2176) = 128 tokens
    with pytest.raises(ValueError, match="tokens_per_state: expected at most a block of 128 tokens, found 256"):
        stride_alignment(index)


def memory(*groups: CacheGroup, **change: Any) -> CacheMemory:
    """A cache of `groups`, with as much of the rest as its schema asks for."""
    fields = glm.cache_memory() | {
        "groups": [group.model_dump(exclude_none=True) for group in groups],
        "layer_classes": {layer: "Attention" for group in groups for layer in group.layer_names},
        "kernel_block_size_tokens": [None for _ in groups],
    }
    return parse(CacheMemory, fields | change, "cache")


def test_a_block_of_the_pool_is_its_widest_group():
    three, one = group_of(FULL, FULL, FULL), group_of(MAMBA)
    assert pool_block_bytes(memory(three, one)) == 3 * 65_536
    assert pool_block_bytes(memory(three, one, kv_cache_layout="LBHNC")) == 3 * 65_536
    aligned = group_of(*[FULL | {"block_stride_alignment": "50000"}] * 3)
    assert pool_block_bytes(memory(aligned)) == 200_000  # 196,608, once
    assert pool_block_bytes(memory(aligned, kv_cache_layout="LBHNC")) == 3 * 100_000


def glm_cache(change: Callable[[dict[str, Any]], object] = bool) -> CacheMemory:
    cache = json.loads(json.dumps(glm.cache_memory()))
    change(cache)
    return parse(CacheMemory, cache, "cache")


FIRST_KDA, FIRST_INDEX = glm.layer(0), glm.layer(3, ".indexer.k_cache")
FIRST_LATENT, FIRST_TAIL = glm.layer(3, ".attn"), glm.layer(3, ".indexer.tail_cache")
PADDED, ALIGNMENT, RETAINED = "page_size_padded", "block_stride_alignment", "extra_retained_tokens"
LATENT = "num_kv_heads, head_size_v and max_tp_shards"
PLACE = {FIRST_KDA: 0, FIRST_INDEX: 4, FIRST_LATENT: 4, FIRST_TAIL: 5}


def test_layers_of_a_group_of_one_class_have_one_spec():
    cache = glm_cache(lambda fields: fields["groups"][4].update(spec_type="MLAAttentionSpec"))
    line = "groups[4].layer_specs: expected one spec of a group of MLAAttentionSpec, found 2"
    assert line in group_findings("0.33.0", cache)


def test_a_class_of_a_layer_that_no_group_has_is_named():
    cache = glm_cache(lambda fields: fields["layer_classes"].update(vision="Attention"))
    assert list(group_findings("0.33.0", cache)) == ["layer_classes: expected layers of the groups, found vision too"]


def test_nothing_stands_against_groups_as_they_should_be():
    assert list(group_findings("0.33.0", glm_cache())) == []
    for specs in ([FULL], [WINDOW, WINDOW], [MAMBA]):
        assert list(group_findings(VERSION, memory(group_of(*specs)))) == []


@pytest.mark.parametrize(
    ("layer", "field", "value", "line"),
    [
        (FIRST_KDA, "page_size_bytes", 1, "page_size_bytes: expected 1114112, found 1"),
        (FIRST_KDA, "page_size_padded", 1_114_113, "page_size_bytes: expected 1114113, found 1114112"),
        (
            FIRST_KDA,
            "shapes",
            [[3, 6144], [17, 128, 128]],
            "page_size_padded: expected at least 1150976, found 1114112",
        ),
        (FIRST_KDA, "dtypes", ["bfloat16"], "dtypes: expected one of each of 2 shapes, found 1"),
        (FIRST_KDA, "dtype", "bfloat16", "dtype: expected none of a MambaSpec, found bfloat16"),
        (FIRST_KDA, "sliding_window", 4, "sliding_window: expected none of a MambaSpec, found 4"),
        (FIRST_KDA, "num_speculative_blocks", 2, "num_speculative_blocks: expected 0, found 2"),
        (FIRST_KDA, "mamba_cache_mode", "all", "mamba_cache_mode: expected one of none, align, found all"),
        (
            FIRST_KDA,
            "num_prefill_checkpoint_blocks",
            0,
            "prefill_checkpoint_alignment: expected an alignment with checkpoint blocks, and none without, "
            "found 16 with 0 blocks",
        ),
        (
            FIRST_KDA,
            "prefill_checkpoint_alignment",
            None,
            "prefill_checkpoint_alignment: expected an alignment with checkpoint blocks, and none without, "
            "found None with 1 blocks",
        ),
        (FIRST_KDA, "num_heads", 2, "num_heads and tokens_per_state: expected 1 and -1, found 2 and -1"),
        (
            FIRST_KDA,
            "mamba_type",
            "CUSTOM",
            "mamba_type: expected one of MAMBA1, MAMBA2, SHORT_CONV, LINEAR, GDN_ATTN, found CUSTOM",
        ),
        (FIRST_KDA, "is_draft", True, "is_draft: expected False, found True"),
        (FIRST_LATENT, "head_size", 576, "page_size_bytes: expected 1253376, found 1114112"),
        (FIRST_LATENT, "sliding_window", 128, "sliding_window: expected none of a MLAAttentionSpec, found 128"),
        (FIRST_LATENT, "attention_chunk_size", 8, "attention_chunk_size: expected none, found 8"),
        (FIRST_LATENT, "non_causal", True, "non_causal: expected False, found True"),
        (FIRST_LATENT, "model_version", "deepseek_v4", "model_version: expected none, found deepseek_v4"),
        (
            FIRST_LATENT,
            "kv_quant_mode",
            "NVFP4_DS_MLA",
            "kv_quant_mode: expected one of NONE, FP8_PER_TENSOR, found NVFP4_DS_MLA",
        ),
        (
            FIRST_LATENT,
            "cache_dtype_str",
            "auto",
            "cache_dtype_str: expected one of ('fp8', 'fp8_e4m3', 'fp8_ds_mla') with FP8_PER_TENSOR, found auto",
        ),
        (FIRST_LATENT, "max_tp_shards", 2, f"{LATENT}: expected (1, 0, 1) of a latent, found (1, 0, 2)"),
        (FIRST_INDEX, "num_kv_heads", 2, f"{LATENT}: expected (1, 0, 1) of a latent, found (2, 0, 1)"),
        (FIRST_LATENT, "head_size_v", 512, f"{LATENT}: expected (1, 0, 1) of a latent, found (1, 512, 1)"),
        (FIRST_LATENT, "cache_role", "other", "cache_role: expected sparse or indexer, found other"),
        (FIRST_INDEX, "cache_role", "sparse", "tokens_per_state: expected 1 of all but an indexer, found 4"),
        (
            FIRST_INDEX,
            "block_stride_alignment",
            "?",
            "block_stride_alignment: expected bytes or MultipleOf(tokens), found ?",
        ),
        (FIRST_TAIL, "num_kv_heads", 1, "page_size_bytes: expected 1024, found 2048"),
        (
            FIRST_TAIL,
            "extra_retained_tokens",
            0,
            "extra_retained_tokens: expected none of a CircularBufferSpec, found 0",
        ),
    ],
)
def test_each_doubt_about_a_spec_names_layer_field_and_values(layer, field, value, line):
    place = PLACE[layer]

    def change(cache):
        cache["groups"][place]["layer_specs"][layer][field] = value

    found = list(group_findings("0.33.0", glm_cache(change)))
    assert f"groups[{place}].layer_specs.{layer}.{line}" in found


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda g: g[1].update(is_eagle_group=True), "groups[1].is_eagle_group: expected False, found True"),
        (lambda g: g[1].update(host_resident=True), "groups[1].host_resident: expected False, found True"),
        (lambda g: g[1].update(role="hisparse_source"), "groups[1].role: expected default, found hisparse_source"),
        (lambda g: g[5].update(block_size_tokens=8), "groups[5].block_size_tokens: expected 4, found 8"),
        (
            lambda g: g[0].update(spec_page_size_bytes=13_516_800),
            "groups[0].spec_page_size_bytes: expected 10027008, found 13516800",
        ),
        (
            lambda g: g[1]["layer_names"].append(FIRST_KDA),
            f"groups[1].layer_names: expected {FIRST_KDA} in one group, found it in groups[0]",
        ),
        (
            lambda g: g[0]["layer_names"].append("stranger"),
            "groups[0].layer_names: expected a class of stranger, found none",
        ),
        (
            lambda g: g[4]["layer_specs"][FIRST_INDEX].update(dcp_sharded=False),
            "groups[4].dcp_sharded: expected one value of all layers, found False, True",
        ),
        (
            lambda g: g[0]["layer_specs"].update({FIRST_KDA: glm.tail_spec()}),
            "groups[0].spec_type: expected one value of a state group's layers, found CircularBufferSpec, MambaSpec",
        ),
        (
            lambda g: g[0]["layer_specs"][FIRST_KDA].update(prefill_checkpoint_alignment=32),
            "prefill_checkpoint_alignment: expected one value of all MambaSpec layers, found 16, 32",
        ),
        (
            lambda g: g[0]["layer_specs"][FIRST_KDA].update(spec_type="RSWASpec"),
            "groups[0]: unsupported runtime cache spec RSWASpec, "
            "which frees the blocks between the prompt and the window",
        ),
        (
            lambda g: g[5].update(spec_type="MambaSpec"),
            "groups[5].spec_type: expected CircularBufferSpec, found MambaSpec",
        ),
    ],
)
def test_each_doubt_about_a_group_names_field_and_values(change, line):
    found = list(group_findings("0.33.0", glm_cache(lambda cache: change(cache["groups"]))))
    assert line in found


def test_layers_and_specs_are_the_same():
    found = list(group_findings("0.33.0", glm_cache(lambda cache: cache["groups"][5]["layer_specs"].pop(FIRST_TAIL))))
    assert [line.split(": ")[0] for line in found] == ["groups[5].layer_specs", "groups[5].spec_page_size_bytes"]


def test_a_window_over_full_attention_keeps_all_blocks_and_is_not_taken_for_a_window():
    """`_promote_local_kv_cache_specs` (v1/core/kv_cache_planning.py:744 of 0.33.0) leaves such specs."""
    group = group_of(FULL | {"sliding_window": 512})
    assert list(group_findings(VERSION, memory(group))) == [
        "groups[0].layer_specs.a.sliding_window: expected none of a FullAttentionSpec, found 512"
    ]
    (planned,) = profile_groups(VERSION, memory(group), 7)
    assert planned.sliding_window is None


def test_a_group_of_layers_that_have_no_spec_is_no_profile():
    with pytest.raises(ValueError, match="kind: expected one of all layers, found no layer"):
        profile_groups(VERSION, memory(group_of(FULL, layer_names=["other"])), 7)


@pytest.fixture(scope="module")
def deployment() -> ResolvedDeployment:
    before = Path.cwd()
    os.chdir(ROOT)
    file = Path("config/campaigns/glm-5.3-flash-gb300-tp4.yaml")
    try:
        return resolve(read_campaign(file), file).deployments["tp4"]
    finally:
        os.chdir(before)


def findings(deployment: ResolvedDeployment, change: Callable[[dict, dict], object]) -> list[str]:
    """What stands against one rank's worker and scheduler after `change` of both, as plain JSON."""
    worker, scheduler = json.loads(json.dumps([glm.worker(0), glm.scheduler()]))
    change(worker, scheduler)
    found = memory_findings(
        deployment,
        [parse(WorkerRecord, worker | {"attempt_id": "a"}, "worker")],
        parse(SchedulerRecord, scheduler | {"attempt_id": "a"}, "scheduler"),
    )
    return list(found)


SCHEDULER, WORKER = "scheduler dp0", "worker dp0 tp0 pp0"


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda w, s: s.update(initial_free_blocks=13_695), f"{SCHEDULER}: reserved blocks: expected 1, found 2"),
        (
            lambda w, s: s.update(permanent_reserved_block_ids=[1]),
            f"{SCHEDULER}: permanent_reserved_block_ids: expected (0, 1), found (1,)",
        ),
        (
            lambda w, s: s.update(permanent_reserved_block_ids=[0, 13_697], initial_free_blocks=13_695),
            f"{SCHEDULER}: permanent_reserved_block_ids: expected numbers below 13697, found 13697",
        ),
        (
            lambda w, s: s.update(mamba_cache_mode="all"),
            f"{SCHEDULER}: mamba_cache_mode: expected one of none, align, found all",
        ),
        (
            lambda w, s: s.update(enable_prefix_caching=False),
            f"{SCHEDULER}: enable_prefix_caching: expected True with mamba_cache_mode align, found False",
        ),
        (
            lambda w, s: w["settings"].update(enable_prefix_caching=False),
            f"{WORKER}: settings.enable_prefix_caching: expected True, found False",
        ),
        (
            lambda w, s: s.update(mamba_cache_mode="none"),
            f"{WORKER}: cache.groups[0].layer_specs.{FIRST_KDA}.mamba_cache_mode: expected none, found align",
        ),
        (
            lambda w, s: s["managers"].__setitem__(5, "FullAttentionManager"),
            f"{SCHEDULER}: managers: expected ('MambaManager', 'MambaManager', 'MambaManager', 'MambaManager', "
            "'FullAttentionManager', 'CircularBufferManager'), found ('MambaManager', 'MambaManager', 'MambaManager', "
            "'MambaManager', 'FullAttentionManager', 'FullAttentionManager')",
        ),
        (lambda w, s: w["cache"].update(num_blocks=13_696), f"{WORKER}: cache.num_blocks: expected 13697, found 13696"),
        (lambda w, s: w["cache"].update(kv_tp_replicas=4), f"{WORKER}: cache.kv_tp_replicas: expected 1, found 4"),
        (
            lambda w, s: w["cache"]["storages"][0].update(size_bytes=185_139_609_601),
            f"{WORKER}: cache.storages (bytes): expected 185139609600, found 185139609601",
        ),
        (lambda w, s: s["groups"].pop(), f"{WORKER}: cache.groups (number): expected 5, found 6"),
        (
            lambda w, s: w["cache"]["groups"][2].update(block_size_tokens=16),
            f"{WORKER}: cache.groups[2].block_size_tokens: expected 2176, found 16",
        ),
        (
            lambda w, s: w["cache"]["groups"][4]["layer_specs"][FIRST_INDEX].update(head_size=128),
            f"{WORKER}: cache.groups[4].layer_specs.{FIRST_INDEX}.head_size: expected 132, found 128",
        ),
        (
            lambda w, s: s["groups"][5].update(startup_blocks_per_request=2),
            f"{SCHEDULER}: groups[5].startup_blocks_per_request: expected 1, found 2",
        ),
        (
            lambda w, s: s.update(max_concurrency=13_697 / 491),
            f"{SCHEDULER}: max_concurrency: expected 13697 blocks / 495 of a request = {13_697 / 495}, "
            f"found {13_697 / 491}",
        ),
        (
            lambda w, s: w["cache"]["groups"][4]["layer_specs"][FIRST_LATENT].update(kv_quant_mode="NONE"),
            f"{WORKER}: cache.groups[4].layer_specs.{FIRST_LATENT}.kv_quant_mode: expected FP8_PER_TENSOR, found NONE",
        ),
        (
            lambda w, s: w["cache"]["groups"][4]["layer_specs"][FIRST_LATENT].update(dtype="bfloat16"),
            f"{WORKER}: cache.groups[4].layer_specs.{FIRST_LATENT}.dtype: expected one of uint8, float8_e4m3fn, "
            "found bfloat16",
        ),
        (
            lambda w, s: w["cache"]["groups"][4]["layer_specs"][FIRST_LATENT].update(dtype="float4"),
            f"{WORKER}: cache.groups: dtype: expected one of {', '.join(ELEMENT_BYTES)}, found float4",
        ),
        (
            lambda w, s: (w["cache"].update(num_blocks=495), s.update(num_blocks=495, initial_free_blocks=494)),
            f"{SCHEDULER}: initial_free_blocks: expected at least the 495 of a request of 1048576 tokens, found 494",
        ),
        (
            lambda w, s: w["cache"].pop("available_cache_bytes"),
            f"{WORKER}: cache.available_cache_bytes: expected what profiling left without kv_cache_memory_bytes, "
            "found none",
        ),
        (
            lambda w, s: w["cache"].update(available_cache_bytes=13_698 * 13_516_800),
            f"{SCHEDULER}: num_blocks: expected 13698 (185153126400 bytes in blocks of 13516800, {WORKER}), "
            "found 13697",
        ),
        (
            lambda w, s: w["cache"].update(available_cache_bytes=259_200_000_001),
            f"{WORKER}: cache.available_cache_bytes: expected at most 259200000000 (0.9 of 288000000000 bytes), "
            "found 259200000001",
        ),
        (
            lambda w, s: (
                w["hardware"].update(total_memory_bytes=205_710_677_333),
                w["cache"]["storages"][0].update(size_bytes=185_139_609_601),
            ),
            f"{WORKER}: cache.storages (bytes): expected at most 185139609600 (0.9 of 205710677333 bytes), "
            "found 185139609601",
        ),
        (
            lambda w, s: w["settings"].update(kv_cache_memory_bytes=185_139_609_600),
            f"{WORKER}: cache.available_cache_bytes: expected none with kv_cache_memory_bytes, found 185144609600",
        ),
        (
            lambda w, s: w["hardware"].update(device_type="cpu"),
            f"{WORKER}: cache.available_cache_bytes: expected none on cpu, found 185144609600",
        ),
    ],
)
def test_each_doubt_about_a_ranks_memory_names_field_and_values(deployment, change, line):
    found = findings(deployment, change)
    assert line in found, found


@pytest.mark.parametrize("more", [0, 13_516_799])
def test_bytes_that_are_asked_for_are_the_pool(deployment, more):
    """Less than a block may be left over."""

    def asked(worker: dict, scheduler: dict) -> None:
        worker["cache"].pop("available_cache_bytes")
        worker["settings"]["kv_cache_memory_bytes"] = 13_697 * 13_516_800 + more

    assert findings(deployment, asked) == []


@pytest.mark.parametrize(("bytes_", "blocks"), [(13_697 * 13_516_800 - 1, 13_696), (13_698 * 13_516_800, 13_698)])
def test_another_pool_than_the_bytes_that_were_asked_for(deployment, bytes_, blocks):
    def asked(worker: dict, scheduler: dict) -> None:
        worker["cache"].pop("available_cache_bytes")
        worker["settings"]["kv_cache_memory_bytes"] = bytes_

    assert findings(deployment, asked) == [
        f"{SCHEDULER}: num_blocks: expected {blocks} ({bytes_} bytes in blocks of 13516800, {WORKER}), found 13697"
    ]


def test_a_cache_without_specs_has_no_size_to_compare(deployment):
    def emptied(worker: dict, scheduler: dict) -> None:
        for group in worker["cache"]["groups"]:
            group["layer_specs"] = {}

    assert f"{WORKER}: cache.storages (bytes): expected 0, found 185139609600" in findings(deployment, emptied)


def test_the_worker_with_the_fewest_bytes_decides_for_its_rank(deployment):
    """`get_kv_cache_configs` gives every worker of an engine the smallest one's blocks."""
    workers = [json.loads(json.dumps(glm.worker(rank))) | {"attempt_id": "a"} for rank in range(2)]
    scheduler = parse(SchedulerRecord, glm.scheduler() | {"attempt_id": "a"}, "scheduler")

    def of(*available: int) -> list[str]:
        for worker, size in zip(workers, available, strict=True):
            worker["cache"]["available_cache_bytes"] = size
        return list(memory_findings(deployment, [parse(WorkerRecord, each, "worker") for each in workers], scheduler))

    enough, more = 13_697 * 13_516_800, 15_000 * 13_516_800
    assert of(enough, more) == of(more, enough) == []
    assert of(more, more) == [
        f"{SCHEDULER}: num_blocks: expected 15000 ({more} bytes in blocks of 13516800, {WORKER}), found 13697"
    ]


def test_a_precision_of_the_cache_that_is_not_planned_is_named_once(deployment):
    precision = deployment.precision.model_copy(update={"kv_cache": "int8"})
    other = deployment.model_copy(update={"precision": precision})
    assert findings(other, lambda worker, scheduler: None) == [
        f"{SCHEDULER}: precision.kv_cache: expected one of bfloat16, half, fp8, found int8"
    ]


def test_nothing_stands_against_a_ranks_memory_as_it_should_be(deployment):
    assert findings(deployment, lambda worker, scheduler: None) == []


def test_a_rank_without_workers_is_somebody_elses_finding(deployment):
    scheduler = parse(SchedulerRecord, glm.scheduler() | {"attempt_id": "a"}, "scheduler")
    assert list(memory_findings(deployment, [], scheduler)) == []


def test_latents_of_a_model_without_state_are_held_by_every_rank(deployment):
    """Every rank holds the whole latent (max_tp_shards 1), and a state only its part: the common count of both is 1."""

    def attention_alone(worker, scheduler):
        for groups in (worker["cache"]["groups"], scheduler["groups"]):
            groups[:] = groups[4:5]

    assert f"{WORKER}: cache.kv_tp_replicas: expected 4, found 1" in findings(deployment, attention_alone)
