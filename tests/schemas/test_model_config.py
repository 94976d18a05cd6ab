import json
import time
from pathlib import Path
from typing import Any

import pytest

from schemas.errors import Refusal
from schemas.model_config import read_model_config
from schemas.quantization import Quantization

DENSE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "torch_dtype": "bfloat16",
}

FP8_BLOCK = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}

PLACES = "nothing in thinker_config.text_config, thinker_config, text_config, llm_config, language_config, the root"


def folder_with(tmp_path: Path, config: object, sidecar: object = None) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config, indent=3))
    if sidecar is not None:
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(sidecar, indent=3))
    return tmp_path


def nested(place: str, settings: dict[str, Any]) -> dict[str, Any]:
    """`settings` at a dotted place of a config."""
    for key in reversed(place.split(".")):
        settings = {key: settings}
    return settings


def refusal(tmp_path: Path, config: object, sidecar: object = None) -> str:
    with pytest.raises(Refusal) as refused:
        read_model_config(folder_with(tmp_path, config, sidecar))
    return str(refused.value).removesuffix(f": {tmp_path}/config.json")


def test_formatting_and_key_order_do_not_change_the_digest(tmp_path: Path):
    first = read_model_config(folder_with(tmp_path, DENSE)).sha256
    second = read_model_config(folder_with(tmp_path, dict(reversed(DENSE.items())))).sha256
    assert first == second


@pytest.mark.parametrize(
    ("name", "experts", "head_dim"),
    [("gemma3-tiny", 0, 64), ("qwen3-8b", 0, 128), ("qwen3-next-tiny", 4, 64), ("qwen3-tiny", 0, 64)],
)
def test_the_committed_models_are_dense_or_moe_as_they_say(name: str, experts: int, head_dim: int):
    found = read_model_config(Path(__file__).parents[2] / "config/models" / name)
    assert (found.num_experts, found.head_dim, found.quantization.method) == (experts, head_dim, None)


# --- the text decoder, wherever it stands ---


@pytest.mark.parametrize(
    "place", ["text_config", "llm_config", "language_config", "thinker_config", "thinker_config.text_config"]
)
def test_the_text_decoder_is_found_wherever_it_stands_and_goes_before_the_root(tmp_path: Path, place: str):
    settings = {"vocab_size": 200, "max_position_embeddings": 32, "num_experts": 8, "head_dim": 16, "dtype": "float16"}
    found = read_model_config(folder_with(tmp_path, DENSE | nested(place, settings)))
    assert (found.vocab_size, found.max_position_embeddings, found.num_experts) == (200, 32, 8)
    assert (found.head_dim, found.dtype) == (16, "half")


@pytest.mark.parametrize("key", ["vocab_size", "max_position_embeddings"])
def test_a_size_found_nowhere_is_refused_with_the_places_looked_at(tmp_path: Path, key: str):
    config = DENSE | {key: None, "thinker_config": {"text_config": {"num_attention_heads": 28}}}
    assert refusal(tmp_path, config) == f"{key}: expected a positive integer, found {PLACES}"


def test_a_dtype_found_nowhere_is_refused_with_the_places_looked_at(tmp_path: Path):
    config = DENSE | {"torch_dtype": None}
    assert refusal(tmp_path, config) == f"torch_dtype: expected one of bfloat16, float16, half, found {PLACES}"


def test_null_and_zero_mean_absent(tmp_path: Path):
    nulls = {"text_config": None, "llm_config": None, "n_routed_experts": None, "num_experts": 0, "model_type": None}
    found = read_model_config(folder_with(tmp_path, DENSE | nulls))
    assert (found.num_experts, found.vocab_size, found.model_type) == (0, 100, "")


def test_a_nested_null_or_zero_does_not_hide_the_root(tmp_path: Path):
    config = DENSE | {"text_config": {"vocab_size": None, "max_position_embeddings": 0, "torch_dtype": None}}
    found = read_model_config(folder_with(tmp_path, config))
    assert (found.vocab_size, found.max_position_embeddings, found.dtype) == (100, 64, "bfloat16")


def test_a_window_for_each_layer_is_tolerated(tmp_path: Path):
    config = DENSE | {"text_config": {"num_hidden_layers": 4, "sliding_window": [4096, None, None, None]}}
    assert read_model_config(folder_with(tmp_path, config)).vocab_size == 100


# --- sizes ---


@pytest.mark.parametrize("value", [0, None])
@pytest.mark.parametrize("place", ["text_config", "llm_config"])
def test_a_head_size_of_zero_or_null_is_absent(tmp_path: Path, place: str, value: int | None):
    config = DENSE | nested(place, {"head_dim": value})
    assert read_model_config(folder_with(tmp_path, config)).head_dim is None


@pytest.mark.parametrize("hidden_size", [1792, 4096])
def test_a_head_size_is_never_derived(tmp_path: Path, hidden_size: int):
    config = DENSE | {"text_config": None, "head_dim": None, "hidden_size": hidden_size, "num_attention_heads": 24}
    assert read_model_config(folder_with(tmp_path, config)).head_dim is None


@pytest.mark.parametrize("key", ["vocab_size", "max_position_embeddings", "head_dim", "num_experts"])
@pytest.mark.parametrize(
    ("value", "found"), [(True, "True"), (False, "False"), ("64", "'64'"), (64.0, "64.0"), (-1, "-1")]
)
def test_a_size_is_a_positive_integer(tmp_path: Path, key: str, value: object, found: str):
    assert refusal(tmp_path, DENSE | {key: value}) == f"{key}: expected a positive integer, found {found}"


# --- experts ---


@pytest.mark.parametrize("key", ["num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"])
@pytest.mark.parametrize("place", ["text_config", "llm_config", "thinker_config.text_config"])
def test_experts_are_found_wherever_they_stand(tmp_path: Path, place: str, key: str):
    assert read_model_config(folder_with(tmp_path, DENSE | nested(place, {key: 8}))).num_experts == 8


@pytest.mark.parametrize(
    ("experts", "number"),
    [
        ({"moe_num_experts": [64, 64], "moe_k": 6}, 64),
        ({"moe_num_experts": [64, 32]}, 64),
        ({"moe_num_experts": [None, 16, 0]}, 16),
        ({"moe_num_experts": []}, 0),
        (
            {
                "block_configs": [
                    {"block_type": "moe", "n_routed_experts": 64},
                    {"block_type": "moe", "n_routed_experts": 128},
                ]
            },
            128,
        ),
        ({"block_configs": [{"ffn": {"moe": {"num_local_experts": 8}}}, {"ffn": {"moe": None}}, None]}, 8),
        ({"ffn_config": {"moe_num_experts": 16}}, 16),
        ({"vision_config": {"num_experts": 4}}, 0),
    ],
)
def test_the_largest_count_of_experts_is_read(tmp_path: Path, experts: dict[str, Any], number: int):
    assert read_model_config(folder_with(tmp_path, DENSE | experts)).num_experts == number


def test_a_listed_count_is_as_strict_as_a_lone_one(tmp_path: Path):
    config = DENSE | {"moe_num_experts": [64, True]}
    assert refusal(tmp_path, config) == "moe_num_experts: expected a positive integer, found True"


# --- dtype ---


@pytest.mark.parametrize(
    ("change", "label"),
    [
        ({"torch_dtype": None, "dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "bfloat16", "text_config": {}}, "bfloat16"),
        ({"torch_dtype": "bfloat16", "text_config": {"dtype": "float16"}}, "half"),
        ({"torch_dtype": "bfloat16", "text_config": {"torch_dtype": "float16"}}, "half"),
        ({"torch_dtype": "float16"}, "half"),
    ],
)
def test_dtype_is_found_under_either_name_nested_before_root(tmp_path: Path, change: dict[str, Any], label: str):
    assert read_model_config(folder_with(tmp_path, DENSE | change)).dtype == label


@pytest.mark.parametrize(
    ("dtype", "found"), [("float32", "'float32'"), ("auto", "'auto'"), (["bfloat16"], "['bfloat16']")]
)
def test_a_dtype_without_a_label_is_refused(tmp_path: Path, dtype: object, found: str):
    config = DENSE | {"torch_dtype": dtype}
    assert refusal(tmp_path, config) == f"torch_dtype: expected one of bfloat16, float16, half, found {found}"


# --- quantization ---


def test_a_null_block_is_no_quantization(tmp_path: Path):
    found = read_model_config(folder_with(tmp_path, DENSE | {"quantization_config": None}))
    assert found.quantization == Quantization(gemm="bfloat16", moe="bfloat16", attention="bfloat16")
    assert found.sidecar_sha256 is None


def test_a_block_without_a_method_is_refused(tmp_path: Path):
    line = refusal(tmp_path, DENSE | {"quantization_config": {"version": "0.6"}})
    assert line.startswith("quantization_config.quant_method: expected one of fp8, modelopt")
    assert line.endswith("found nothing")


@pytest.mark.parametrize("place", ["text_config", "thinker_config.text_config"])
def test_a_nested_block_counts_and_reads_the_layers_of_the_text_decoder(tmp_path: Path, place: str):
    excluded = ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    settings = {"num_hidden_layers": 2, "quantization_config": FP8_BLOCK | {"modules_to_not_convert": excluded}}
    found = read_model_config(folder_with(tmp_path, DENSE | {"num_hidden_layers": 9} | nested(place, settings)))
    assert found.dtype == "bfloat16"
    assert found.quantization == Quantization(
        method="fp8", gemm="fp8_block", moe="fp8_block", attention="bfloat16", kv_cache=None
    )


def test_the_same_block_may_stand_twice_but_not_two(tmp_path: Path):
    twice = DENSE | {"quantization_config": FP8_BLOCK, "text_config": {"quantization_config": FP8_BLOCK}}
    assert read_model_config(folder_with(tmp_path, twice)).quantization.gemm == "fp8_block"
    two = twice | {"text_config": {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}}}
    expected = "quantization_config: expected one block for the text decoder, found blocks that differ"
    assert refusal(tmp_path, two) == expected


def test_the_sidecar_is_read_and_has_a_digest_of_its_own(tmp_path: Path):
    plain = read_model_config(folder_with(tmp_path, DENSE))
    found = read_model_config(folder_with(tmp_path, DENSE, {"quantization": {"quant_algo": "FP8"}}))
    assert found.quantization == Quantization(method="modelopt", gemm="fp8", moe="fp8", attention="fp8")
    assert found.sha256 == plain.sha256
    # sha256 of {"quantization":{"quant_algo":"FP8"}}, by sha256sum
    assert found.sidecar_sha256 == "6fe0cc8392325bf0a7cbc0711e78ea1bc33e37ca9e442450718c5ad520a5bf54"


def test_a_sidecar_that_is_no_object_is_refused(tmp_path: Path):
    line = refusal(tmp_path, DENSE, [])
    assert line == f"quantization sidecar: expected an object, found list: {tmp_path}/hf_quant_config.json"


# --- the file ---


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ([], "model config: expected an object, found list"),
        (DENSE | {"architectures": None}, "architectures: expected a list with a name, found None"),
        (DENSE | {"architectures": []}, "architectures: expected a list with a name, found []"),
    ],
)
def test_what_is_no_model_is_refused(tmp_path: Path, config: object, line: str):
    assert refusal(tmp_path, config) == line


def test_a_folder_without_config_is_refused(tmp_path: Path):
    with pytest.raises(Refusal, match=r"model: expected a folder with a config.json, found none"):
        read_model_config(tmp_path)


def test_hundreds_of_configs_are_read_within_a_second(tmp_path: Path):
    excluded = [f"model.layers.{layer}.self_attn.{leaf}_proj" for layer in range(64) for leaf in "qkvo"]
    block = FP8_BLOCK | {"modules_to_not_convert": excluded}
    folder = folder_with(tmp_path, DENSE | {"num_hidden_layers": 64, "quantization_config": block})
    start = time.process_time()
    found = {read_model_config(folder).quantization.attention for _ in range(100)}
    assert found == {"bfloat16"}
    assert time.process_time() - start < 1
