"""Intake of a checkpoint's config.json and its sidecar: what planning needs to know before an engine has seen it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from schemas.canonical import Strict, digest, is_file, read_json
from schemas.errors import Refusal
from schemas.footprint import Footprint, footprint
from schemas.quantization import SIDECAR, Quantization, detect

TEXT_PLACES = (
    ("thinker_config", "text_config"),
    ("thinker_config",),
    ("text_config",),
    ("llm_config",),
    ("language_config",),
    (),
)
"""Where a config keeps its text decoder, the first place with a value wins; `()` is the root, the last resort."""

EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
EXPERT_BLOCKS = ("block_configs", "ffn_config")
"""Parts of a text decoder that hold expert counts of their own: an overlooked count makes a MoE dense (aisim#778)."""

DTYPE_KEYS = ("dtype", "torch_dtype")
DTYPE_LABELS = {"bfloat16": "bfloat16", "float16": "half", "half": "half"}
"""torch dtype of a checkpoint -> precision label of the published table."""


class ModelConfig(Strict):
    """The facts of one config.json.

    `sha256` covers its canonical JSON, `sidecar_sha256` that of hf_quant_config.json where there is one: reformatting
    a file changes nothing. `dtype` is the base dtype, the label of whatever `quantization` leaves alone. `num_experts`
    is the largest count of any layer, 0 for a dense model. `head_dim` is what the file declares, never derived: hidden
    size over heads need not divide (1792 / 24), and where it does, models differ from it; the probe observes it.
    """

    sha256: str
    sidecar_sha256: str | None = None
    architecture: str
    model_type: str
    vocab_size: int
    max_position_embeddings: int
    num_experts: int
    head_dim: int | None = None
    dtype: str
    quantization: Quantization
    footprint: Footprint | None = None


def _places(root: dict[str, Any]) -> list[dict[str, Any]]:
    """The text decoder's settings, by `TEXT_PLACES`, without nulls: a null says no more than a missing key."""
    places = []
    for path in TEXT_PLACES:
        place: Any = root
        for key in path:
            place = place.get(key) if isinstance(place, dict) else None
        if isinstance(place, dict):
            places.append({key: value for key, value in place.items() if value is not None})
    return places


def _looked_at() -> str:
    return f"nothing in {', '.join('.'.join(path) or 'the root' for path in TEXT_PLACES)}"


def _count(key: str, value: object, file: Path) -> int:
    """`value` as a count; null is 0. A bool is no count."""
    if value is None:
        return 0
    if type(value) is not int or value < 0:
        raise Refusal(key, "a positive integer", repr(value), file)
    return value


def _size(places: list[dict[str, Any]], key: str, file: Path) -> int | None:
    """The first positive integer under `key`: 0 means absent (aisimulate#475)."""
    counts = (_count(key, place.get(key), file) for place in places)
    return next((count for count in counts if count), None)


def _required_size(places: list[dict[str, Any]], key: str, file: Path) -> int:
    size = _size(places, key, file)
    if size is None:
        raise Refusal(key, "a positive integer", _looked_at(), file)
    return size


def _expert_counts(settings: object, file: Path) -> Iterator[int]:
    """Every expert count at any depth of `settings`; a count may be a list, one for each kind of expert or layer."""
    if isinstance(settings, list):
        for part in settings:
            yield from _expert_counts(part, file)
    elif isinstance(settings, dict):
        for key, value in settings.items():
            if key in EXPERT_KEYS:
                yield from (_count(key, count, file) for count in (value if isinstance(value, list) else [value]))
            else:
                yield from _expert_counts(value, file)


def _num_experts(places: list[dict[str, Any]], file: Path) -> int:
    """The largest count found: layers without experts must not hide those with."""
    keys = (*EXPERT_KEYS, *EXPERT_BLOCKS)
    parts = [{key: place[key]} for place in places for key in keys if key in place]
    return max(_expert_counts(parts, file), default=0)


def _dtype(places: list[dict[str, Any]], file: Path) -> str:
    """The base dtype's label, under either name, nested before root."""
    found = next((place[key] for place in places for key in DTYPE_KEYS if key in place), None)
    label = DTYPE_LABELS.get(found) if isinstance(found, str) else None
    if label is None:
        shown = _looked_at() if found is None else repr(found)
        raise Refusal("torch_dtype", f"one of {', '.join(sorted(DTYPE_LABELS))}", shown, file)
    return label


def _merged(places: list[dict[str, Any]]) -> dict[str, Any]:
    """The text decoder's settings as one mapping: nested before root."""
    settings: dict[str, Any] = {}
    for place in reversed(places):
        settings.update(place)
    return settings


def _quantization(places: list[dict[str, Any]], sidecar: Any, base: str, file: Path) -> Quantization:
    blocks = [place["quantization_config"] for place in places if "quantization_config" in place]
    if any(block != blocks[0] for block in blocks):
        raise Refusal("quantization_config", "one block for the text decoder", "blocks that differ", file)
    return detect(_merged(places), sidecar, base, file)


def _read_object(file: Path, what: str) -> dict[str, Any]:
    found = read_json(file, what)
    if not isinstance(found, dict):
        raise Refusal(what, "an object", type(found).__name__, file)
    return found


def text_settings(folder: Path) -> dict[str, Any]:
    """The text decoder's settings in `folder`/config.json as one mapping: nested before root, without nulls."""
    return _merged(_places(_read_object(folder / "config.json", "model config")))


def read_model_config(folder: Path) -> ModelConfig:
    """`folder`/config.json and, where there is one, ModelOpt's `folder`/hf_quant_config.json.

    Raises:
        Refusal: no such file, not JSON, no architecture, no vocabulary or context size, a size that is none, a dtype or
            a quantization without a label.
    """
    file, beside = folder / "config.json", folder / SIDECAR
    if not is_file(file):
        raise Refusal("model", "a folder with a config.json", "none", folder)
    root = _read_object(file, "model config")
    sidecar = _read_object(beside, "quantization sidecar") if is_file(beside) else None

    architectures = root.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise Refusal("architectures", "a list with a name", repr(architectures), file)
    places = _places(root)
    dtype = _dtype(places, file)
    return ModelConfig(
        sha256=digest(root),
        sidecar_sha256=None if sidecar is None else digest(sidecar),
        architecture=architectures[0],
        model_type=str(root.get("model_type") or ""),
        vocab_size=_required_size(places, "vocab_size", file),
        max_position_embeddings=_required_size(places, "max_position_embeddings", file),
        num_experts=_num_experts(places, file),
        head_dim=_size(places, "head_dim", file),
        dtype=dtype,
        quantization=_quantization(places, sidecar, dtype, file),
        footprint=footprint(_merged(places)),
    )
