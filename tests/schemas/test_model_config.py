import json
from pathlib import Path

import pytest

from schemas.errors import Refusal
from schemas.model_config import read_model_config

DENSE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "torch_dtype": "bfloat16",
}


def folder_with(tmp_path: Path, config: object) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config, indent=3))
    return tmp_path


def test_formatting_and_key_order_do_not_change_the_digest(tmp_path: Path):
    first = read_model_config(folder_with(tmp_path, DENSE)).sha256
    second = read_model_config(folder_with(tmp_path, dict(reversed(DENSE.items())))).sha256
    assert first == second


@pytest.mark.parametrize("place", ["text_config", "llm_config"])
def test_experts_are_found_wherever_they_stand(tmp_path: Path, place: str):
    config = DENSE | {place: {"num_experts": 8}}
    assert read_model_config(folder_with(tmp_path, config)).num_experts == 8


def test_null_and_zero_mean_absent(tmp_path: Path):
    config = DENSE | {"text_config": None, "num_experts": 0, "n_routed_experts": None}
    assert read_model_config(folder_with(tmp_path, config)).num_experts == 0


def test_dtype_is_found_under_either_name(tmp_path: Path):
    config = {**DENSE, "torch_dtype": None, "dtype": "bfloat16"}
    assert read_model_config(folder_with(tmp_path, config)).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"architectures": None}, "architectures"),
        ({"vocab_size": True}, "vocab_size"),
        ({"vocab_size": None}, "vocab_size"),
        ({"torch_dtype": "float8"}, "torch_dtype"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_field(tmp_path: Path, change, field):
    with pytest.raises(Refusal) as refusal:
        read_model_config(folder_with(tmp_path, DENSE | change))
    assert refusal.value.field == field


def test_a_folder_without_config_is_refused(tmp_path: Path):
    with pytest.raises(Refusal, match=r"model: expected a folder with a config.json, found none"):
        read_model_config(tmp_path)
