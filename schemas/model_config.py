"""Intake of a checkpoint's config.json: what planning needs to know before an engine has seen the model."""

from pathlib import Path
from typing import Any

from schemas.canonical import Strict, digest, read_json
from schemas.errors import Refusal

TEXT_CONFIGS = ("text_config", "llm_config")
"""Where a multimodal config keeps its text decoder, after the root."""

EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")

DTYPE_LABELS = {"bfloat16": "bfloat16", "float16": "half", "half": "half"}
"""torch dtype of a checkpoint -> precision label of the published table."""


class ModelConfig(Strict):
    """The facts of one config.json. `sha256` covers its canonical JSON: reformatting the file changes nothing."""

    sha256: str
    architecture: str
    model_type: str
    vocab_size: int
    max_position_embeddings: int
    num_experts: int
    dtype: str


def _integer(places: list[dict[str, Any]], keys: tuple[str, ...], file: Path) -> int | None:
    """The first positive integer under one of `keys`; null and 0 mean absent, anything else is refused."""
    for place in places:
        for key in keys:
            value = place.get(key)
            if value is None or (value == 0 and not isinstance(value, bool)):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise Refusal(key, "a positive integer", repr(value), file)
            return value
    return None


def read_model_config(folder: Path) -> ModelConfig:
    """`folder`/config.json.

    Raises:
        Refusal: no such file, not JSON, no architecture, no vocabulary or context size, a quantized checkpoint.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise Refusal("model", "a folder with a config.json", "none", folder)
    root = read_json(file, "model config")
    if not isinstance(root, dict):
        raise Refusal("model config", "an object", type(root).__name__, file)
    places = [place for place in (*(root.get(key) for key in TEXT_CONFIGS), root) if isinstance(place, dict)]

    architectures = root.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise Refusal("architectures", "a list with a name", repr(architectures), file)
    if any(place.get("quantization_config") is not None for place in places):
        raise Refusal("quantization_config", "none: quantized checkpoints are not planned yet", "a block", file)
    dtype = next((place[key] for place in places for key in ("dtype", "torch_dtype") if place.get(key)), None)
    if dtype not in DTYPE_LABELS:
        raise Refusal("torch_dtype", f"one of {', '.join(sorted(DTYPE_LABELS))}", repr(dtype), file)
    vocab_size = _integer(places, ("vocab_size",), file)
    if vocab_size is None:
        raise Refusal("vocab_size", "a positive integer", "nothing", file)
    positions = _integer(places, ("max_position_embeddings",), file)
    if positions is None:
        raise Refusal("max_position_embeddings", "a positive integer", "nothing", file)
    return ModelConfig(
        sha256=digest(root),
        architecture=architectures[0],
        model_type=str(root.get("model_type", "")),
        vocab_size=vocab_size,
        max_position_embeddings=positions,
        num_experts=_integer(places, EXPERT_KEYS, file) or 0,
        dtype=DTYPE_LABELS[dtype],
    )
