"""What a checkpoint declares of its own precision: labels of its weights and KV cache, and the label of attention.

Read are `quantization_config` of config.json (Hugging Face fp8, ModelOpt, compressed-tensors) and ModelOpt's sidecar
`hf_quant_config.json`. What no table here has is refused by its name: there is no default branch.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import translate
from pathlib import Path
from typing import Any

from schemas.canonical import Strict
from schemas.errors import Refusal

SIDECAR = "hf_quant_config.json"

LOW_PRECISION = ("fp8", "fp8_block", "fp8_static", "nvfp4")
"""Labels that make a checkpoint an FP8 or NVFP4 one."""


class Quantization(Strict):
    """Labels by module class. A class whose layers are quantized in part has the label of the quantized ones.

    `gemm` are all linear layers but the routed experts (`moe`) and the head; `attention` are the attention projections,
    a part of `gemm`, in the base dtype when they are excluded. `method` is absent from an unquantized checkpoint,
    `kv_cache` where the checkpoint declares no scheme.
    """

    method: str | None = None
    gemm: str
    moe: str
    attention: str
    kv_cache: str | None = None


KV_REASONS = {"half": "a float16 KV cache is not planned", "int8": "vLLM has no int8 KV cache dtype"}


def fmha_label(kv_cache_label: str, quantization: Quantization, base_dtype_label: str) -> str:
    """The FMHA label of the published table: one rule for planning and import.

    Under an fp8 KV cache the checkpoint decides, not its attention projections: the attention kernel reads an fp8 cache
    whether or not the projections before it are quantized.

    Raises:
        ValueError: a KV cache label, or a base dtype, that the rule does not know.
    """
    if kv_cache_label == "bfloat16":
        return "bfloat16"
    if kv_cache_label != "fp8":
        reason = KV_REASONS.get(kv_cache_label, "no such KV cache label")
        raise ValueError(f"a KV cache of bfloat16 or fp8, not {kv_cache_label}: {reason}")
    if any(label in LOW_PRECISION for label in (quantization.gemm, quantization.moe)):
        return "fp8"
    if base_dtype_label not in ("bfloat16", "half", "float16"):
        raise ValueError(f"an FP8, NVFP4, bfloat16 or float16 checkpoint under an fp8 KV cache, not {base_dtype_label}")
    return "bfloat16"


# --- which module classes a list of patterns means, by the names that models give to the linear layers of a layer ---

ANY = "999"
"""Stands for the number of a layer or expert: the regex `\\d+` matches it, an enumeration as in `(0|1|2)` does not."""

ROOTS = ("model.", "model.language_model.", "language_model.model.", "")
_MLP = ("gate_proj up_proj down_proj", "gate_up_proj down_proj")
_QKV = ("q_proj k_proj v_proj o_proj", "qkv_proj o_proj")
_MLA = ("q_proj kv_a_proj_with_mqa kv_b_proj o_proj", "q_a_proj q_b_proj kv_a_proj_with_mqa kv_b_proj o_proj")
MODULES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "attention": (("self_attn", "attn", "attention"), (*_QKV, *_MLA)),
    "mlp": (("mlp", "feed_forward"), _MLP),
    "shared": (("mlp.shared_experts", "mlp.shared_expert"), _MLP),
    "experts": ((f"mlp.experts.{ANY}", "mlp.experts", f"block_sparse_moe.experts.{ANY}"), (*_MLP, "w1 w2 w3")),
}
"""Module class -> names of its block in a layer, and the sets of linear layers that such a block may have."""

Layers = dict[str, Sequence[int]]
"""Module class -> the layers that have it."""

ATTENTION_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
SHARED_KEYS = ("n_shared_experts", "num_shared_experts", "shared_expert_intermediate_size")
_LAYER = re.compile(r"layers\\?\.(\d{1,6})(?=\\?\.|\*?$)")  # no number that int() refuses to read
_EXPERT = re.compile(r"experts\\?\.\d+")


def _layers(config: Mapping[str, Any]) -> Layers:
    """The layers that have a module class. A MoE that says so has no dense MLP; shared experts are declared."""
    keys = ("num_hidden_layers", "first_k_dense_replace", "full_attention_interval", "layer_types")
    number, dense, interval, types = (config.get(key) for key in keys)
    layers = range(number if type(number) is int else 0)
    first, rest = (layers[:dense], layers[dense:]) if type(dense) is int and dense >= 0 else (layers, layers)
    found: Layers = {"attention": layers, "experts": rest}
    if isinstance(types, list):
        found["attention"] = [layer for layer, name in enumerate(types) if name in ATTENTION_TYPES]
    elif type(interval) is int and interval > 0:
        found["attention"] = layers[interval - 1 :: interval]
    if dense != 0 and (config.get("decoder_sparse_step"), config.get("mlp_only_layers")) != (1, []):
        found["mlp"] = first
    if any(config.get(key) for key in SHARED_KEYS):
        found["shared"] = rest
    return found


def _regex(pattern: str) -> re.Pattern[str]:
    """A module name or a part of one between dots, a shell wildcard, or a regex after `re:`."""
    if pattern.startswith("re:"):
        return re.compile(pattern[3:])
    return re.compile(translate(pattern) if set("*?[") & set(pattern) else rf"(.*\.)?{re.escape(pattern)}(\..*)?$")


def _meant(patterns: Iterable[str], layers: Layers) -> tuple[set[str], set[str]]:
    """The module classes that `patterns` mean in part, and wholly: one set's linear layers in all `layers` with them.

    Checkpoints list thousands of modules one by one; with `ANY` for their numbers they are a handful of patterns.
    """
    given: dict[str, set[int]] = {}
    for pattern in patterns:
        general = _EXPERT.sub(f"experts.{ANY}", _LAYER.sub(f"layers.{ANY}", pattern))
        given.setdefault(general, set()).update(int(layer) for layer in _LAYER.findall(pattern))
    named = [(_regex(pattern), numbers) for pattern, numbers in given.items()]

    def hits(module: str) -> list[set[int]]:
        names = [f"{root}layers.{ANY}.{module}" for root in ROOTS]
        return [numbers for regex, numbers in named if any(map(regex.match, names))]

    def everywhere(hit: list[set[int]], needed: Sequence[int]) -> bool:
        listed: set[int] = set().union(*hit)
        return any(not numbers for numbers in hit) or (bool(needed) and all(layer in listed for layer in needed))

    part, whole = set(), set()
    for kind, (parents, sets) in MODULES.items() if named else ():
        for found in ([hits(f"{parent}.{leaf}") for leaf in leaves.split()] for parent in parents for leaves in sets):
            part |= {kind} if any(found) else set()
            whole |= {kind} if all(everywhere(hit, layers.get(kind, ())) for hit in found) else set()
    return part, whole


# --- the readers: one per method; module class -> labels of its quantized layers ---

Labels = dict[str, set[str]]

FP8_SCHEMES = (("dynamic", [128, 128], "fp8_block"), ("static", None, "fp8_static"))
"""Activation scheme and weight block of Hugging Face's fp8 -> label."""

WHOLE_ALGOS = {"FP8": "fp8", "NVFP4": "nvfp4"}
"""ModelOpt's algorithm of a whole checkpoint -> label."""

LAYER_ALGOS = {"FP8": "fp8_static", "NVFP4": "nvfp4"}
"""ModelOpt's algorithm of one layer in a map -> label; FP8 is `fp8_static` there (MIXED_PRECISION: sglang#28099)."""

FP8, FP4 = {"num_bits": 8, "type": "float"}, {"num_bits": 4, "type": "float", "strategy": "tensor_group"}
_BLOCK = {"strategy": "block", "block_structure": [128, 128]}
_GROUP = {"strategy": "group", "group_size": 128, "dynamic": True}
SCHEMES: tuple[tuple[str, str, dict[str, Any], dict[str, Any]], ...] = (
    ("fp8_block", "float-quantized", FP8 | _BLOCK, FP8 | _GROUP),
    ("fp8_static", "float-quantized", FP8 | {"strategy": "tensor"}, FP8 | {"strategy": "tensor", "dynamic": False}),
    ("nvfp4", "nvfp4-pack-quantized", FP4 | {"group_size": 16}, FP4 | {"group_size": 16, "dynamic": "local"}),
)
"""Of compressed-tensors: label, format, weights, input activations."""

SHOWN = ("num_bits", "type", "strategy", "block_structure", "group_size", "dynamic")
"""What a refusal shows of a scheme without a label."""

NOT_DECODER = {"lm_head", "visual", "vision_tower", "vision_model"}


def _present(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


@dataclass(frozen=True)
class _Block:
    """One quantization block without its nulls, where it stands, and the text decoder's settings."""

    values: dict[str, Any]
    name: str
    file: Path
    config: Mapping[str, Any]

    def refusal(self, key: str, expected: str, found: object) -> Refusal:
        return Refusal(f"{self.name}.{key}" if key else self.name, expected, found, self.file)

    def patterns(self, key: str, values: object) -> list[str]:
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise self.refusal(key, "a list of module names", repr(values))
        for value in values:
            try:
                re.compile(value[3:] if value.startswith("re:") else "")
            except re.error as error:
                raise self.refusal(key, "a regex after re:", f"{value!r} ({error})") from None
        return values


def _uniform(block: _Block, label: str, *exclusions: str) -> Labels:
    """`label` for every module class that the lists under `exclusions` leave."""
    layers = _layers(block.config)
    excluded = [pattern for key in exclusions for pattern in block.patterns(key, block.values.get(key, []))]
    return {kind: {label} for kind in layers.keys() - _meant(excluded, layers)[1]}


def _fp8(block: _Block) -> Labels:
    for key in ("expert_dtype", "store_dtype"):  # vLLM reads the first from the root too: DeepSeek V4.1
        experts = block.values.get(key) or block.config.get(key) or "fp8"
        if experts != "fp8":
            raise block.refusal(key, "fp8: experts of another dtype have no label", repr(experts))
    found = tuple(block.values.get(key) for key in ("activation_scheme", "weight_block_size"))
    for *scheme, label in FP8_SCHEMES:
        if found == tuple(scheme):
            return _uniform(block, str(label), "modules_to_not_convert", "ignored_layers")
    expected = "dynamic with weight_block_size [128, 128], or static without"
    raise block.refusal("activation_scheme", expected, f"{found[0]!r} with weight_block_size {found[1]!r}")


def _modelopt(block: _Block) -> Labels:
    algo, layer_map = block.values.get("quant_algo"), block.values.get("quantized_layers")
    while isinstance(layer_map, dict) and isinstance(layer_map.get("quantized_layers"), dict):
        layer_map = layer_map["quantized_layers"]
    if str(algo).upper() == "MIXED_PRECISION" or (algo is None and layer_map is not None):
        if isinstance(layer_map, dict) and layer_map:
            return _mapped(block, layer_map)
        readings = "ModelOpt's (an algorithm per layer) or W4AFP8 (int4 experts, fp8 activations; sglang#28099)"
        raise block.refusal("quantized_layers", "a map of layers", f"a bare MIXED_PRECISION, read as {readings}")
    label = WHOLE_ALGOS.get(str(algo).upper())
    if label is None or layer_map is not None:
        expected = f"one of {', '.join(WHOLE_ALGOS)}, or MIXED_PRECISION with quantized_layers"
        found = "nothing" if algo is None else repr(algo) + (" with quantized_layers" if layer_map is not None else "")
        raise block.refusal("quant_algo", expected, found)
    return _uniform(block, label, "exclude_modules", "ignore")


def _mapped(block: _Block, layer_map: dict[str, Any]) -> Labels:
    """A layer that the map does not name is unquantized: its siblings say nothing of it."""
    parents, sets = MODULES["attention"]
    attention = {*parents, *" ".join(sets).split()}
    labels: Labels = {}
    for module, entry in layer_map.items():
        algo = entry.get("quant_algo") if isinstance(entry, dict) else entry
        if str(algo).upper() not in LAYER_ALGOS:
            raise block.refusal(f"quantized_layers.{module}", f"one of {', '.join(LAYER_ALGOS)}", repr(algo))
        parts = set(module.split("."))
        if not parts & NOT_DECODER:
            kind = "experts" if "experts" in parts else "attention" if parts & attention else "mlp"
            labels.setdefault(kind, set()).add(LAYER_ALGOS[str(algo).upper()])
    return labels


def _compressed(block: _Block) -> Labels:
    groups = block.values.get("config_groups")
    if not isinstance(groups, dict) or not groups or not all(isinstance(group, dict) for group in groups.values()):
        raise block.refusal("config_groups", "an object with groups", repr(groups))
    layers = _layers(block.config)
    labels: Labels = {kind: set() for kind in MODULES}
    rest, named = set(), set()
    for name, group in groups.items():
        key = f"config_groups.{name}"
        label = _scheme(block, key, _present(group))
        targets = block.patterns(f"{key}.targets", group.get("targets"))
        part, whole = _meant([target for target in targets if target != "Linear"], layers)
        if "Linear" in targets:
            rest.add(label)
        elif not part:
            raise block.refusal(f"{key}.targets", "Linear, or linear layers of the decoder", repr(targets))
        for kind in part:
            labels[kind].add(label)
        named |= whole
    # A module's own name goes before its type (vLLM, find_matched_target): `Linear` takes what no name takes.
    for kind in MODULES.keys() - named:
        labels[kind] |= rest
    ignored = _meant(block.patterns("ignore", block.values.get("ignore", [])), layers)[1]
    return {kind: labels[kind] for kind in layers.keys() - ignored}


def _scheme(block: _Block, key: str, group: dict[str, Any]) -> str:
    """The label of one config group."""
    form, formats = group.get("format", block.values.get("format")), sorted({row[1] for row in SCHEMES})
    if form not in formats:
        raise block.refusal("format", f"one of {', '.join(formats)}", repr(form))
    weights, inputs = group.get("weights"), group.get("input_activations")
    if not isinstance(weights, dict) or not isinstance(inputs, dict):
        raise block.refusal(key, "weights and input_activations", f"{', '.join(group)} ({form})")
    # The formats are float ones: published files leave out the type of the activations, and `dynamic` when false.
    weights, inputs = ({"type": "float", "dynamic": False} | _present(side) for side in (weights, inputs))
    for label, row_form, row_weights, row_inputs in SCHEMES:
        if form == row_form and row_weights.items() <= weights.items() and row_inputs.items() <= inputs.items():
            return label
    known = (FP8 | {"strategy": "channel"}, FP8 | {"strategy": "token", "dynamic": True})
    preset = "FP8_DYNAMIC: " if known[0].items() <= weights.items() and known[1].items() <= inputs.items() else ""
    shown = [" ".join(str(side[key]) for key in SHOWN if key in side) for side in (weights, inputs)]
    found = f"{preset}weights {shown[0]}, activations {shown[1]}"
    raise block.refusal(key, f"a scheme of {', '.join(row[0] for row in SCHEMES)}", found)


READERS: dict[str, Callable[[_Block], Labels]] = {
    "fp8": _fp8,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "modelopt_mixed": _modelopt,
    "compressed-tensors": _compressed,
}


def _kv_cache(block: _Block) -> str | None:
    scheme, algo = block.values.get("kv_cache_scheme"), block.values.get("kv_cache_quant_algo")
    if scheme is not None and not (isinstance(scheme, dict) and FP8.items() <= scheme.items()):
        raise block.refusal("kv_cache_scheme", "8-bit float", repr(scheme))
    if algo is not None and str(algo).upper() != "FP8":
        raise block.refusal("kv_cache_quant_algo", "FP8", repr(algo))
    return None if scheme is None and algo is None else "fp8"


def _read(block: _Block, base: str) -> Quantization:
    method = block.values.get("quant_method")
    if method is None and block.values.keys() & {"quant_algo", "quantized_layers"}:
        method = "modelopt"
    if method not in tuple(READERS):
        raise block.refusal(
            "quant_method", f"one of {', '.join(READERS)}", "nothing" if method is None else repr(method)
        )
    labels = READERS[str(method)](block)

    def one(what: str, *kinds: str) -> str:
        found = set().union(*(labels.get(kind, set()) for kind in kinds))
        if len(found) > 1:
            raise block.refusal("", f"one label for all {what} layers", " and ".join(sorted(found)))
        return next(iter(found), base)

    return Quantization(
        method=str(method),
        gemm=one("gemm", "attention", "mlp", "shared"),
        moe=one("moe", "experts"),
        attention=one("attention", "attention"),
        kv_cache=_kv_cache(block),
    )


def detect(config: dict[str, Any], sidecar: dict[str, Any] | None, base_dtype_label: str, file: Path) -> Quantization:
    """The labels of a checkpoint, from its text decoder's settings and the optional sidecar beside `file`.

    Raises:
        Refusal: a block without a method, a method, algorithm, format or scheme without a label, a module class with
            two labels, a sidecar that says otherwise than config.json.
    """
    beside = file.with_name(SIDECAR)
    places = (
        ("quantization_config", config.get("quantization_config"), file, None),
        ("quantization", sidecar, beside, "modelopt"),
    )
    found = []
    for name, raw, place, method in places:
        if raw is not None:
            inner = raw.get("quantization") if isinstance(raw, dict) else None
            values = inner if isinstance(inner, dict) else raw
            if not isinstance(values, dict):
                raise Refusal(name, "an object", repr(values), place)
            outer = {"quant_method": raw.get("quant_method") or method}
            found.append(_read(_Block(_present(outer | values), name, place, config), base_dtype_label))
    if not found:
        return Quantization(gemm=base_dtype_label, moe=base_dtype_label, attention=base_dtype_label)
    first, last = found[0], found[-1]
    for label in ("gemm", "moe", "attention"):
        if getattr(first, label) != getattr(last, label):
            expected = f"the {label} of config.json, {getattr(first, label)}"
            raise Refusal("quantization", expected, getattr(last, label), beside)
    return first.model_copy(update={"kv_cache": first.kv_cache or last.kv_cache})
