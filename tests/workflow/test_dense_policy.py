"""The conditions of `dense_full_attention_v1`, each with its own way of not holding."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from cells import frozen_cell
from native_samples import cell_of, one_phase

from schemas.canonical import digest
from schemas.errors import Refusal

from dense_policy import Evidence, conditions, read_config, unmet

CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64}
KVWARM = {"enabled": True, "warm_eligible": False, "skip_reason": "dense_model_content_insensitive"}
GROUP = {"type": "FullAttentionSpec", "sliding_window": None, "attention_chunk_size": None, "non_causal": False}
ENGINE = {
    "model": {"model": "config/models/llama", "model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "versions": {"vllm": "0.32.0"},
    "parallel": {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "data_parallel_rank": 0,
        "prefill_context_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "enable_expert_parallel": False,
    },
    "kv_cache": {"groups": [GROUP]},
}
MISSING = object()


def evidence(**change: Any) -> Evidence:
    """A dense model on two GPUs that fulfils the policy; `change` replaces parts of the evidence or of the identity."""
    identity = {"phase": "decode", "parallel_strategy": "tp", "topology": {"tp": 2}}
    parts = {"config": CONFIG, "kvwarm": KVWARM, "engines": [ENGINE]}
    parts |= {name: change.pop(name) for name in list(change) if name in parts}
    topology = change.pop("topology", {})
    cell = frozen_cell(**identity | change).model_copy(update={"model": "config/models/llama"})
    # What no campaign may ask for, a cell of another system may have.
    wide = cell.identity.topology.model_copy(update=topology)
    cell = cell.model_copy(update={"identity": cell.identity.model_copy(update={"topology": wide})})
    return Evidence(cell, **parts)


def changed(block: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """`block` with the value at a dotted path replaced, or gone."""
    block = copy.deepcopy(block)
    *outer, last = path.split(".")
    inner: Any = block
    for key in outer:
        inner = inner[int(key) if isinstance(inner, list) else key]
    if value is MISSING:
        del inner[last]
    else:
        inner[int(last) if isinstance(inner, list) else last] = value
    return block


def kvwarm(path: str, value: Any) -> dict[str, Any]:
    return {"kvwarm": changed(KVWARM, path, value)}


def engine(path: str, value: Any) -> dict[str, Any]:
    return {"engines": [changed(ENGINE, path, value)]}


def groups(*specs: Any) -> dict[str, Any]:
    return engine("kv_cache.groups", list(specs))


def uniform(*specs: Any) -> dict[str, Any]:
    return {"type": "UniformTypeKVCacheSpecs", "block_size": 16, "specs": list(specs)}


OTHER_GROUPS = [
    ("type", "SlidingWindowSpec"),
    ("type", "ChunkedLocalAttentionSpec"),
    ("type", "MambaSpec"),
    ("type", "MLAAttentionSpec"),
    ("type", MISSING),
    ("sliding_window", 256),
    ("sliding_window", 0),
    ("sliding_window", MISSING),
    ("attention_chunk_size", 8192),
    ("attention_chunk_size", MISSING),
    ("non_causal", True),
    ("non_causal", None),
    ("non_causal", 0),
    ("non_causal", MISSING),
]
"""Of a group, and of a layer in a uniform group: what is not full attention shown as such."""

PARALLEL = [
    ("tensor_parallel_size", 1),
    ("tensor_parallel_size", "2"),
    ("tensor_parallel_size", MISSING),
    ("pipeline_parallel_size", 2),
    ("pipeline_parallel_size", True),
    ("pipeline_parallel_size", MISSING),
    ("data_parallel_size", 2),
    ("data_parallel_size", 1.0),
    ("data_parallel_size", MISSING),
    ("data_parallel_rank", 1),
    ("data_parallel_rank", False),
    ("data_parallel_rank", MISSING),
    ("prefill_context_parallel_size", 2),
    ("prefill_context_parallel_size", True),
    ("prefill_context_parallel_size", MISSING),
    ("decode_context_parallel_size", 2),
    ("decode_context_parallel_size", MISSING),
    ("enable_expert_parallel", True),
    ("enable_expert_parallel", 0),
    ("enable_expert_parallel", None),
    ("enable_expert_parallel", MISSING),
]

OTHER_MODELS = ("/elsewhere", "llama", "models/llama", "/config/models/other/llama", "", None, MISSING)
BROKEN: list[tuple[str, dict[str, Any]]] = [
    ("phase", {"phase": "prefill"}),
    ("kvwarm", {"kvwarm": None}),
    *(("kvwarm.enabled", kvwarm("enabled", value)) for value in (False, 1, None, MISSING)),
    *(("kvwarm.warm_eligible", kvwarm("warm_eligible", value)) for value in (True, 0, None, MISSING)),
    *(
        ("kvwarm.skip_reason", kvwarm("skip_reason", value))
        for value in ("flag_off", "moe_tp_balanced_by_construction", "", None, MISSING)
    ),
    *(("parallel_strategy", {"parallel_strategy": strategy}) for strategy in ("pure_tp", "tep", "dep")),
    *((f"topology.{axis}", {"topology": {axis: 2}}) for axis in ("pp", "moe_tp", "moe_ep", "cp")),
    ("topology.dp", {"topology": {"dp": 2}, "engines": [ENGINE, ENGINE]}),
    ("model config", {"config": None}),
    ("engines", {"engines": []}),
    ("engines", {"engines": [ENGINE, ENGINE]}),
    ("rank 0 engine", {"engines": [None]}),
    ("rank 0 engine.capture_error", engine("capture_error", "'NoneType' object has no attribute 'groups'")),
    *(("rank 0 engine.model.model", engine("model.model", value)) for value in OTHER_MODELS),
    *(("rank 0 engine.model.model_type", engine("model.model_type", value)) for value in ("qwen3", None, MISSING)),
    ("rank 0 engine.model.model_type", {"config": changed(CONFIG, "model_type", MISSING)}),
    *(
        ("rank 0 engine.model.architectures", engine("model.architectures", value))
        for value in (["Qwen3ForCausalLM"], [], "LlamaForCausalLM", MISSING)
    ),
    ("rank 0 engine.model.architectures", {"config": changed(CONFIG, "architectures", [])}),
    *(("rank 0 engine.versions.vllm", engine("versions.vllm", value)) for value in ("0.33.0", None, MISSING)),
    *((f"rank 0 engine.parallel.{key}", engine(f"parallel.{key}", value)) for key, value in PARALLEL),
    *(("rank 0 engine.kv_cache.groups", engine("kv_cache.groups", value)) for value in ([], None, {}, MISSING)),
    ("rank 0 engine.kv_cache.groups[0]", groups("FullAttentionSpec")),
    *((f"rank 0 engine.kv_cache.groups[0].{key}", groups(changed(GROUP, key, value))) for key, value in OTHER_GROUPS),
    *(
        (f"rank 0 engine.kv_cache.groups[1].{key}", groups(GROUP, changed(GROUP, key, value)))
        for key, value in OTHER_GROUPS
    ),
    ("rank 0 engine.kv_cache.groups[0].specs", groups(uniform())),
    ("rank 0 engine.kv_cache.groups[0].specs", groups(changed(uniform(GROUP), "specs", MISSING))),
    ("rank 0 engine.kv_cache.groups[0].specs", groups(changed(uniform(GROUP), "specs", {"a": GROUP}))),
    *(
        (f"rank 0 engine.kv_cache.groups[0].specs[1].{key}", groups(uniform(GROUP, changed(GROUP, key, value))))
        for key, value in OTHER_GROUPS
    ),
    ("rank 0 engine.kv_cache.groups[0].specs[0].type", groups(uniform(uniform(GROUP)))),
]

EXPERT_PLACES = {
    "root": lambda key, value: {key: value},
    "text_config": lambda key, value: {"text_config": {key: value}},
    "llm_config": lambda key, value: {"llm_config": {key: value}},
    "thinker_config.text_config": lambda key, value: {"thinker_config": {"text_config": {key: value}}},
    "block_configs[1]": lambda key, value: {"block_configs": [{"n_heads": 2}, {key: value}]},
}
EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def test_the_policy_holds_where_every_condition_does():
    assert unmet(evidence()) == []


def test_the_policy_holds_on_one_gpu():
    one = changed(ENGINE, "parallel.tensor_parallel_size", 1)
    assert unmet(evidence(parallel_strategy="single", topology={"tp": 1}, engines=[one])) == []


@pytest.mark.parametrize("path", ["/srv/campaign/config/models/llama", "./config/models/llama"])
def test_a_relative_model_may_have_been_launched_from_another_folder(path: str):
    assert unmet(evidence(**engine("model.model", path))) == []


def test_an_absolute_model_is_nowhere_else():
    cell = evidence().cell.model_copy(update={"model": "/srv/llama"})
    for path, lines in (("/srv/llama", 0), ("/mnt/srv/llama", 1)):
        assert len(unmet(evidence(**engine("model.model", path))._replace(cell=cell))) == lines


def test_the_policy_holds_for_a_uniform_group_of_full_attention():
    assert unmet(evidence(**groups(GROUP, uniform(GROUP, GROUP)))) == []


@pytest.mark.parametrize(("name", "change"), BROKEN)
def test_a_condition_that_does_not_hold_is_named(name: str, change: dict[str, Any]):
    lines = unmet(evidence(**change))
    assert [line for line in lines if line.startswith(f"{name}: expected ")], lines


def test_each_condition_has_a_negative_case():
    """A new condition without one fails here."""
    broken = {name for name, _ in BROKEN} | {"config experts", "config attention"}
    shapes = (evidence(), evidence(**groups(uniform(GROUP), GROUP)), evidence(kvwarm=None), evidence(config=None))
    names = {condition.name for shape in shapes for condition in conditions(shape)}
    there = {name.replace("specs[0]", "specs[1]") for name in names}
    assert there <= broken, sorted(there - broken)


def test_a_whole_block_that_is_missing_is_one_line():
    assert unmet(evidence(kvwarm=None)) == ["kvwarm: expected a block, found absent"]


def test_a_condition_says_what_it_expected_and_what_it_found():
    assert unmet(evidence(**engine("versions.vllm", "0.33.0"))) == [
        "rank 0 engine.versions.vllm: expected 0.32.0, found 0.33.0"
    ]
    assert unmet(evidence(parallel_strategy="tep")) == ["parallel_strategy: expected single or tp, found tep"]


@pytest.mark.parametrize("key", EXPERT_KEYS)
@pytest.mark.parametrize("place", EXPERT_PLACES)
def test_experts_are_found_wherever_a_config_keeps_them(place: str, key: str):
    """aisim#778: experts below llm_config were overlooked, and an MoE was taken for dense."""
    path = key if place == "root" else f"{place}.{key}"
    for count in (8, [64, 64]):
        assert unmet(evidence(config=CONFIG | EXPERT_PLACES[place](key, count))) == [
            f"config experts: expected [], found ['{path}']"
        ]


@pytest.mark.parametrize("place", EXPERT_PLACES)
def test_a_null_says_no_more_than_a_missing_key(place: str):
    assert unmet(evidence(config=CONFIG | EXPERT_PLACES[place]("num_experts", None) | {"kv_lora_rank": None})) == []


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"kv_lora_rank": 512}, "['kv_lora_rank']"),
        ({"text_config": {"index_topk": 2048}}, "['text_config.index_topk']"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "['layer_types linear_attention']"),
        ({"text_config": {"layer_types": ["sliding_attention"]}}, "['text_config.layer_types sliding_attention']"),
    ],
)
def test_attention_other_than_full_is_found_in_the_config(settings: dict[str, Any], found: str):
    assert unmet(evidence(config=CONFIG | settings)) == [f"config attention: expected [], found {found}"]


def test_layers_of_full_attention_may_be_listed():
    assert unmet(evidence(config=CONFIG | {"layer_types": ["full_attention"] * 4})) == []


def real(name: str, config: dict[str, Any]) -> Evidence:
    """The decode rows of a real artifact as a cell whose identity names `config`."""
    document = one_phase(name, "decode")
    cell = cell_of(document, model_config_sha256=digest(config))
    return Evidence(cell, config, document["kvwarm"], [document["engine"]])


@pytest.mark.parametrize("name", ["d161_dense_agg", "d17_dense_agg"])
def test_dynamos_own_dense_artifacts_fulfil_the_policy(name: str):
    assert unmet(real(name, CONFIG)) == []


def test_dynamos_own_moe_artifact_does_not():
    mixtral = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 4}
    assert unmet(real("d17_full_moe_agg", mixtral)) == [
        "kvwarm.warm_eligible: expected False, found True",
        "kvwarm.skip_reason: expected dense_model_content_insensitive, found None",
        "config experts: expected [], found ['num_local_experts']",
        "rank 0 engine.parallel.enable_expert_parallel: expected False, found True",
    ]


def test_a_worker_probe_beside_the_artifact_is_no_engine_block():
    """What the launcher's probe resolved stands in the merged file; the policy asks the rank's own snapshot."""
    document = one_phase("d17_dense_agg", "decode")
    probe = {"worker_probe": {"responses": [document["engine"]]}, "resolved": document["engine"]}
    lines = unmet(real("d17_dense_agg", CONFIG)._replace(engines=[probe]))
    assert "rank 0 engine.kv_cache.groups: expected a list with a spec, found None" in lines


def test_the_config_is_the_one_that_the_identity_names(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG, indent=4))
    cell = frozen_cell(model_config_sha256=digest(CONFIG)).model_copy(update={"model": str(tmp_path)})
    assert read_config(cell) == CONFIG
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"hidden_size": 128}))
    assert read_config(cell) is None
    (tmp_path / "config.json").unlink()
    assert read_config(cell) is None


def test_a_config_that_is_no_json_is_refused(tmp_path: Path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(Refusal, match="model config: expected JSON"):
        read_config(frozen_cell().model_copy(update={"model": str(tmp_path)}))
