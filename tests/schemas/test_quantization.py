import time
from pathlib import Path
from typing import Any

import pytest
from quantization_blocks import FP8_BLOCK, LAGUNA_BLOCK

from schemas.errors import Refusal
from schemas.quantization import Quantization, detect, fmha_label

FILE = Path("model/config.json")

NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}

# The public config of Laguna-XS.2-FP8, cut to what matters.
LAGUNA = {
    "num_attention_heads": 48,
    "num_attention_heads_per_layer": [48, 64],
    "num_hidden_layers": 2,
    "layer_types": ["full_attention", "sliding_attention"],
    "mlp_layer_types": ["dense", "sparse"],
    "sliding_window": 512,
    "rope_parameters": {
        "full_attention": {"rope_type": "yarn", "factor": 64.0},
        "sliding_attention": {"rope_type": "default"},
        "original_max_position_embeddings": 4096,
    },
    "quantization_config": LAGUNA_BLOCK,
}

FP8_WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "tensor"}
FP8_INPUTS = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
FP4_WEIGHTS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
FP4_INPUTS = FP4_WEIGHTS | {"dynamic": "local"}


def group(weights: Any, inputs: Any, *targets: str, **more: Any) -> dict[str, Any]:
    return {"weights": weights, "input_activations": inputs, "targets": list(targets or ["Linear"]), **more}


def compressed(form: str | None, *groups: dict[str, Any], **more: Any) -> dict[str, Any]:
    named = {f"group_{number}": found for number, found in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": named, **more}


def labels(block: object, sidecar: Any = None, base: str = "bfloat16", **config: Any) -> tuple[str, str, str]:
    """gemm, moe and attention of a config with this block."""
    found = detect({"num_hidden_layers": 2, **config, "quantization_config": block}, sidecar, base, FILE)
    return found.gemm, found.moe, found.attention


def refusal(block: object, sidecar: Any = None, **config: Any) -> str:
    with pytest.raises(Refusal) as refused:
        detect({**config, "quantization_config": block}, sidecar, "bfloat16", FILE)
    return str(refused.value)


# --- one scheme for the whole checkpoint ---


@pytest.mark.parametrize("base", ["bfloat16", "half"])
@pytest.mark.parametrize("config", [{}, {"quantization_config": None}])
def test_without_a_block_every_label_is_the_base_dtype(config: dict[str, Any], base: str):
    assert detect(config, None, base, FILE) == Quantization(
        method=None, gemm=base, moe=base, attention=base, kv_cache=None
    )


@pytest.mark.parametrize(
    ("block", "label"),
    [
        (FP8_BLOCK, "fp8_block"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "fp8_static"),
        ({"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}, "fp8_static"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "fp8"}, "fp8"),
        ({"quant_algo": "FP8"}, "fp8"),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4"}}, "nvfp4"),
        (NVFP4, "nvfp4"),
        ({"quant_method": "modelopt_fp4", "quant_algo": "NVFP4"}, "nvfp4"),
        (compressed("float-quantized", group(FP8_WEIGHTS, FP8_INPUTS)), "fp8_static"),
        (compressed("nvfp4-pack-quantized", group(FP4_WEIGHTS, FP4_INPUTS)), "nvfp4"),
        (compressed(None, group(FP4_WEIGHTS, FP4_INPUTS, format="nvfp4-pack-quantized")), "nvfp4"),
    ],
)
def test_one_scheme_labels_every_module_class(block: dict[str, Any], label: str):
    assert labels(block) == (label, label, label)


def test_the_method_is_recorded_as_declared():
    assert detect({"quantization_config": FP8_BLOCK}, None, "bfloat16", FILE).method == "fp8"


# --- the sidecar ---


def test_the_sidecar_alone_is_read():
    sidecar = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}}
    assert detect({}, sidecar, "bfloat16", FILE) == Quantization(
        method="modelopt", gemm="nvfp4", moe="nvfp4", attention="nvfp4", kv_cache="fp8"
    )


def test_config_and_sidecar_complete_each_other_when_they_agree():
    sidecar = {"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}}
    found = detect({"quantization_config": NVFP4}, sidecar, "bfloat16", FILE)
    assert (found.gemm, found.kv_cache) == ("nvfp4", "fp8")


def test_a_sidecar_that_says_otherwise_is_refused():
    line = refusal(FP8_BLOCK, {"quantization": {"quant_algo": "NVFP4"}})
    expected = "expected the gemm of config.json, fp8_block, found nvfp4: model/hf_quant_config.json"
    assert line == f"quantization: {expected}"


# --- excluded modules keep the base dtype ---


@pytest.mark.parametrize(
    "excluded",
    [
        ["*self_attn*"],
        ["self_attn"],
        ["model.layers.*.self_attn*", "lm_head"],
        ["model.layers.0.self_attn*", "model.layers.1.self_attn*"],
        ["model.layers.0.self_attn", "model.layers.1.self_attn"],
        [f"model.layers.{layer}.self_attn.{leaf}_proj" for layer in (0, 1) for leaf in "qkvo"],
        [
            f"model.language_model.layers.{layer}.self_attn.{leaf}"
            for layer in (0, 1)
            for leaf in ("qkv_proj", "o_proj")
        ],
        ["re:.*self_attn.*"],
        [r"re:model\.layers\.\d+\.self_attn\..*"],
        [r"re:.*layers\.0\.self_attn.*", r"re:.*layers\.1\.self_attn.*"],
    ],
)
def test_excluded_attention_keeps_the_base_dtype(excluded: list[str]):
    assert labels(NVFP4 | {"ignore": excluded}, base="half") == ("nvfp4", "nvfp4", "half")


@pytest.mark.parametrize(
    "excluded",
    [
        ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"],
        ["re:.*mlp.gate$", "re:visual.*"],
        ["model.layers.0.self_attn*"],
        ["*self_attn.q_proj"],
        [r"re:model\.layers\.(0|1)\.self_attn\.q_proj"],
        ["vision_model.encoder.layers.0.self_attn*", "vision_model.encoder.layers.1.self_attn*"],
    ],
)
def test_a_class_excluded_in_part_keeps_the_label_of_the_rest(excluded: list[str]):
    assert labels(NVFP4 | {"ignore": excluded}) == ("nvfp4", "nvfp4", "nvfp4")


def test_every_format_has_its_own_name_for_the_excluded():
    assert labels(FP8_BLOCK | {"modules_to_not_convert": ["self_attn"]}) == ("fp8_block", "fp8_block", "bfloat16")
    assert labels(FP8_BLOCK | {"ignored_layers": ["self_attn"]}) == ("fp8_block", "fp8_block", "bfloat16")
    sidecar = {"quantization": {"quant_algo": "FP8", "exclude_modules": ["*self_attn*"]}}
    assert labels(None, sidecar) == ("fp8", "fp8", "bfloat16")


def test_attention_of_a_hybrid_stands_only_in_its_attention_layers():
    block = NVFP4 | {"ignore": ["model.layers.1.self_attn*"]}
    assert labels(block, layer_types=["linear_attention", "full_attention"]) == ("nvfp4", "nvfp4", "bfloat16")
    assert labels(block, full_attention_interval=2) == ("nvfp4", "nvfp4", "bfloat16")
    assert labels(block, layer_types=["full_attention", "full_attention"]) == ("nvfp4", "nvfp4", "nvfp4")


def test_quantized_experts_alone_leave_gemm_in_the_base_dtype():
    attention_out = NVFP4 | {"ignore": ["*self_attn*"]}
    no_dense = {"decoder_sparse_step": 1, "mlp_only_layers": []}
    assert labels(attention_out, **no_dense) == ("bfloat16", "nvfp4", "bfloat16")
    assert labels(attention_out, first_k_dense_replace=0) == ("bfloat16", "nvfp4", "bfloat16")
    # Shared experts are linear layers that stay quantized, until they are excluded too.
    assert labels(attention_out, first_k_dense_replace=0, n_shared_experts=1) == ("nvfp4", "nvfp4", "bfloat16")
    all_out = NVFP4 | {"ignore": ["*self_attn*", "model.layers.0.mlp*", "*shared_experts*"]}
    assert labels(all_out, first_k_dense_replace=1, n_shared_experts=1) == ("bfloat16", "nvfp4", "bfloat16")


def test_excluded_experts_keep_the_base_dtype():
    assert labels(NVFP4 | {"ignore": ["*mlp.experts*"]}) == ("nvfp4", "bfloat16", "nvfp4")
    listed = [
        f"model.layers.{layer}.block_sparse_moe.experts.{expert}.w{number}"
        for layer in (0, 1)
        for expert in (0, 1)
        for number in (1, 2, 3)
    ]
    assert labels(NVFP4 | {"ignore": listed}) == ("nvfp4", "bfloat16", "nvfp4")


@pytest.mark.parametrize(
    ("excluded", "found"),
    [("lm_head", "'lm_head'"), ([1], "[1]")],
)
def test_exclusions_that_are_no_list_of_names_are_refused(excluded: object, found: str):
    expected = f"quantization_config.ignore: expected a list of module names, found {found}: model/config.json"
    assert refusal(NVFP4 | {"ignore": excluded}) == expected


def test_an_exclusion_that_is_no_regex_is_refused():
    line = refusal(NVFP4 | {"ignore": ["re:("]})
    assert line.startswith("quantization_config.ignore: expected a regex after re:, found 're:(' (missing )")


def test_thousands_of_listed_modules_are_read_in_no_time():
    listed = [
        f"model.layers.{layer}.mlp.experts.{expert}.{leaf}_proj"
        for layer in range(48)
        for expert in range(128)
        for leaf in ("gate", "up", "down")
    ]
    start = time.process_time()
    assert labels(NVFP4 | {"ignore": listed}, num_hidden_layers=48) == ("nvfp4", "bfloat16", "nvfp4")
    assert time.process_time() - start < 2


# --- MIXED_PRECISION ---


@pytest.mark.parametrize("algo", [{"quant_algo": "MIXED_PRECISION"}, {}])
@pytest.mark.parametrize("nest", [lambda layers: layers, lambda layers: {"quantized_layers": layers}])
def test_a_layer_map_labels_each_module_class(algo: dict[str, str], nest: Any):
    layers = {"a.o_proj": {"quant_algo": "FP8"}, "a.experts.0.up_proj": {"quant_algo": "NVFP4", "group_size": 16}}
    assert labels(algo | {"quantized_layers": nest(layers)}) == ("fp8_static", "nvfp4", "fp8_static")
    assert labels(None, {"quantization": algo | {"quantized_layers": nest(layers)}}) == (
        "fp8_static",
        "nvfp4",
        "fp8_static",
    )


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("model.layers.0.mlp.experts.0.up_proj", ("bfloat16", "nvfp4", "bfloat16")),
        ("model.layers.0.self_attn.q_proj", ("nvfp4", "bfloat16", "nvfp4")),
        ("model.layers.0.mlp.up_proj", ("nvfp4", "bfloat16", "bfloat16")),
        ("model.layers.0.mlp.shared_experts.up_proj", ("nvfp4", "bfloat16", "bfloat16")),
        ("lm_head", ("bfloat16", "bfloat16", "bfloat16")),
        ("visual.blocks.0.attn.qkv", ("bfloat16", "bfloat16", "bfloat16")),
    ],
)
def test_a_sibling_that_the_map_leaves_out_is_unquantized(module: str, expected: tuple[str, str, str]):
    block = {"quant_algo": "MIXED_PRECISION", "quantized_layers": {module: {"quant_algo": "NVFP4"}}}
    assert labels(block) == expected


@pytest.mark.parametrize("more", [{}, {"quantized_layers": None}, {"quantized_layers": {}}])
def test_a_bare_mixed_precision_is_refused_with_both_readings(more: dict[str, Any]):
    line = refusal(None, {"quantization": {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None, **more}})
    assert line == (
        "quantization.quantized_layers: expected a map of layers, found a bare MIXED_PRECISION, read as ModelOpt's "
        "(an algorithm per layer) or W4AFP8 (int4 experts, fp8 activations; sglang#28099): model/hf_quant_config.json"
    )


def test_two_algorithms_within_one_class_are_refused():
    layers = {"a.self_attn.q_proj": {"quant_algo": "FP8"}, "a.mlp.up_proj": {"quant_algo": "NVFP4"}}
    line = refusal({"quant_algo": "MIXED_PRECISION", "quantized_layers": layers})
    expected = "expected one label for all gemm layers, found fp8_static and nvfp4: model/config.json"
    assert line == f"quantization_config: {expected}"


def test_an_unknown_algorithm_of_a_layer_is_refused_with_the_layer():
    line = refusal({"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a.up_proj": {"quant_algo": "W4A8_AWQ"}}})
    expected = "expected one of FP8, NVFP4, found 'W4A8_AWQ': model/config.json"
    assert line == f"quantization_config.quantized_layers.a.up_proj: {expected}"


# --- compressed-tensors ---


def test_block_quantized_compressed_tensors_with_excluded_attention():
    assert detect(LAGUNA, None, "bfloat16", FILE) == Quantization(
        method="compressed-tensors", gemm="fp8_block", moe="fp8_block", attention="bfloat16", kv_cache="fp8"
    )


def test_nulls_in_a_scheme_mean_absent():
    weights = FP8_WEIGHTS | {"group_size": None, "block_structure": None, "dynamic": None}
    inputs = {"num_bits": 8, "type": None, "strategy": "tensor", "dynamic": None}
    block = compressed("float-quantized", group(weights, inputs), kv_cache_scheme=None)
    assert labels(block) == ("fp8_static", "fp8_static", "fp8_static")


def test_a_groups_own_names_go_before_linear():
    experts = group(FP4_WEIGHTS, FP4_INPUTS, "re:.*mlp.experts.*", format="nvfp4-pack-quantized")
    rest = group(FP8_WEIGHTS, FP8_INPUTS, format="float-quantized")
    for groups in ((experts, rest), (rest, experts)):
        assert labels(compressed("mixed-precision", *groups)) == ("fp8_static", "nvfp4", "fp8_static")


def test_a_group_for_some_layers_leaves_the_others_unquantized():
    block = compressed("nvfp4-pack-quantized", group(FP4_WEIGHTS, FP4_INPUTS, "re:.*mlp.experts.*"))
    assert labels(block) == ("bfloat16", "nvfp4", "bfloat16")


def test_two_groups_within_one_class_are_refused():
    queries = group(FP4_WEIGHTS, FP4_INPUTS, "re:.*q_proj", format="nvfp4-pack-quantized")
    line = refusal(compressed("float-quantized", queries, group(FP8_WEIGHTS, FP8_INPUTS)))
    assert line.startswith("quantization_config: expected one label for all gemm layers, found fp8_static and nvfp4")


def test_fp8_dynamic_is_refused_by_its_name():
    weights = FP8_WEIGHTS | {"strategy": "channel", "dynamic": False}
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    assert refusal(compressed("float-quantized", group(weights, inputs))) == (
        "quantization_config.config_groups.group_0: expected a scheme of fp8_block, fp8_static, nvfp4, found "
        "FP8_DYNAMIC: weights 8 float channel False, activations 8 float token True: model/config.json"
    )


@pytest.mark.parametrize(
    ("block", "line"),
    [
        (
            compressed("marlin-24", group(FP8_WEIGHTS, FP8_INPUTS)),
            "format: expected one of float-quantized, nvfp4-pack-quantized, found 'marlin-24'",
        ),
        (
            compressed(None, group(FP8_WEIGHTS, FP8_INPUTS)),
            "format: expected one of float-quantized, nvfp4-pack-quantized, found None",
        ),
        (
            compressed("float-quantized", group(FP8_WEIGHTS | {"strategy": "lattice"}, FP8_INPUTS)),
            "config_groups.group_0: expected a scheme of fp8_block, fp8_static, nvfp4, found "
            "weights 8 float lattice False, activations 8 float tensor False",
        ),
        (
            compressed(
                "float-quantized",
                group({"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [64, 64]}, FP8_INPUTS),
            ),
            "config_groups.group_0: expected a scheme of fp8_block, fp8_static, nvfp4, found "
            "weights 8 float block [64, 64] False, activations 8 float tensor False",
        ),
        (
            compressed(
                "float-quantized",
                group(
                    {"num_bits": 8, "type": "int", "strategy": "channel"},
                    {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True},
                ),
            ),
            "config_groups.group_0: expected a scheme of fp8_block, fp8_static, nvfp4, found "
            "weights 8 int channel False, activations 8 int token True",
        ),
        (
            compressed("nvfp4-pack-quantized", group(FP4_WEIGHTS, None)),
            "config_groups.group_0: expected weights and input_activations, found weights, targets",
        ),
        (
            compressed("float-quantized", group(FP8_WEIGHTS, FP8_INPUTS, "re:.*tower.*")),
            "config_groups.group_0.targets: expected Linear, or linear layers of the decoder, found ['re:.*tower.*']",
        ),
        (compressed("float-quantized"), "config_groups: expected an object with groups, found {}"),
        (
            {"quant_method": "compressed-tensors", "config_groups": ["Linear"]},
            "config_groups: expected an object with groups, found ['Linear']",
        ),
        (
            compressed("float-quantized", group(FP8_WEIGHTS, FP8_INPUTS) | {"targets": 3}),
            "config_groups.group_0.targets: expected a list of module names, found 3",
        ),
    ],
)
def test_compressed_tensors_without_a_label_are_refused(block: dict[str, Any], line: str):
    assert refusal(block).startswith(f"quantization_config.{line}")


# --- what is refused, whatever the format ---


METHODS = "expected one of fp8, modelopt, modelopt_fp4, modelopt_mixed, compressed-tensors"
FP8_EXPECTED = "expected dynamic with weight_block_size [128, 128], or static without"
ALGOS = "expected one of FP8, NVFP4, or MIXED_PRECISION with quantized_layers"


@pytest.mark.parametrize(
    ("block", "line"),
    [
        ({"version": "0.6"}, f".quant_method: {METHODS}, found nothing"),
        ({}, f".quant_method: {METHODS}, found nothing"),
        ({"quant_method": None, "bits": 4}, f".quant_method: {METHODS}, found nothing"),
        ({"quant_method": "gptq", "bits": 4}, f".quant_method: {METHODS}, found 'gptq'"),
        ({"quant_method": ["fp8"]}, f".quant_method: {METHODS}, found ['fp8']"),
        ("fp8", ": expected an object, found 'fp8'"),
        ({"quant_method": "fp8"}, f".activation_scheme: {FP8_EXPECTED}, found None with weight_block_size None"),
        (
            {"quant_method": "fp8", "activation_scheme": "dynamic"},
            f".activation_scheme: {FP8_EXPECTED}, found 'dynamic' with weight_block_size None",
        ),
        (
            {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": [128, 128]},
            f".activation_scheme: {FP8_EXPECTED}, found 'static' with weight_block_size [128, 128]",
        ),
        (
            {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [64, 128]},
            f".activation_scheme: {FP8_EXPECTED}, found 'dynamic' with weight_block_size [64, 128]",
        ),
        (
            FP8_BLOCK | {"expert_dtype": "fp4"},
            ".expert_dtype: expected fp8: experts of another dtype have no label, found 'fp4'",
        ),
        ({"quant_method": "modelopt"}, f".quant_algo: {ALGOS}, found nothing"),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, f".quant_algo: {ALGOS}, found 'W4A16_AWQ'"),
        (NVFP4 | {"quantized_layers": {"a": {}}}, f".quant_algo: {ALGOS}, found 'NVFP4' with quantized_layers"),
        (
            FP8_BLOCK | {"kv_cache_scheme": {"num_bits": 8, "type": "int"}},
            ".kv_cache_scheme: expected 8-bit float, found {'num_bits': 8, 'type': 'int'}",
        ),
        (NVFP4 | {"kv_cache_quant_algo": "NVFP4"}, ".kv_cache_quant_algo: expected FP8, found 'NVFP4'"),
    ],
)
def test_a_block_without_a_label_is_refused_by_name(block: object, line: str):
    assert refusal(block) == f"quantization_config{line}: model/config.json"


def test_the_dtype_of_experts_may_stand_beside_the_block():
    line = refusal(FP8_BLOCK, expert_dtype="fp4")
    assert line.startswith("quantization_config.expert_dtype: expected fp8: experts of another dtype have no label")


def test_a_sidecar_without_an_algorithm_is_refused():
    line = refusal(None, {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}})
    assert line == f"quantization.quant_algo: {ALGOS}, found nothing: model/hf_quant_config.json"


def test_a_layer_of_more_digits_than_any_model_has_means_no_layer():
    block = FP8_BLOCK | {"ignored_layers": [f"model.layers.{'9' * 5000}.self_attn"]}
    assert labels(block) == ("fp8_block", "fp8_block", "fp8_block")


# --- the FMHA rule ---


@pytest.mark.parametrize(
    ("kv_cache", "gemm", "moe", "base", "label"),
    [
        ("bfloat16", "bfloat16", "bfloat16", "bfloat16", "bfloat16"),
        ("bfloat16", "fp8_block", "fp8_block", "bfloat16", "bfloat16"),
        ("bfloat16", "half", "half", "half", "bfloat16"),
        ("fp8", "bfloat16", "bfloat16", "bfloat16", "bfloat16"),
        ("fp8", "half", "half", "half", "bfloat16"),
        ("fp8", "fp8_block", "fp8_block", "bfloat16", "fp8"),
        ("fp8", "fp8_static", "fp8_static", "bfloat16", "fp8"),
        ("fp8", "fp8", "fp8", "half", "fp8"),
        ("fp8", "nvfp4", "nvfp4", "bfloat16", "fp8"),
        ("fp8", "bfloat16", "nvfp4", "bfloat16", "fp8"),
    ],
)
def test_attention_follows_the_kv_cache_and_the_checkpoint(kv_cache: str, gemm: str, moe: str, base: str, label: str):
    assert fmha_label(kv_cache, Quantization(gemm=gemm, moe=moe, attention=base), base) == label


@pytest.mark.parametrize(
    ("kv_cache", "base", "text"),
    [
        ("half", "half", "a KV cache of bfloat16 or fp8, not half: a float16 KV cache is not planned"),
        ("int8", "bfloat16", "a KV cache of bfloat16 or fp8, not int8: vLLM has no int8 KV cache dtype"),
        ("fp4", "bfloat16", "a KV cache of bfloat16 or fp8, not fp4: no such KV cache label"),
        ("fp8", "float32", "an FP8, NVFP4, bfloat16 or float16 checkpoint under an fp8 KV cache, not float32"),
    ],
)
def test_what_the_fmha_rule_does_not_know_is_an_error(kv_cache: str, base: str, text: str):
    with pytest.raises(ValueError) as error:  # noqa: PT011, the whole text is compared
        fmha_label(kv_cache, Quantization(gemm=base, moe=base, attention=base), base)
    assert str(error.value) == text
