"""The dense policy `dense_full_attention_v1`: which decode rows over synthetic KV count as measured.

Attention over a dense model's full cache takes the same time whatever the cache holds, so Dynamo does not warm such a
model up. That it did not is no evidence by itself: cell, model config and every rank's engine have to show the model.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from producer.adapters import UNIFORM_SPEC
from schemas.canonical import digest, is_file, read_json
from schemas.model_config import EXPERT_KEYS
from schemas.plan import CellIdentity, FrozenCell

DENSE_SKIP = "dense_model_content_insensitive"
"""Dynamo's reason to skip the warm-up of a dense model."""
DENSE_LABEL = f"skip:{DENSE_SKIP}"
"""The label of rows that the policy lets in."""
STRATEGIES = ("single", "tp")
FULL_ATTENTION = "FullAttentionSpec"
FULL_LAYERS = "full_attention"
"""What a config's `layer_types` calls a layer of full attention."""
OTHER_ATTENTION_KEYS = ("kv_lora_rank", "index_topk", "linear_num_key_heads", "ssm_state_size", "mamba_d_state")
"""Keys of a config whose attention is latent, sparse or recurrent: its time need not be a dense cache's."""
ABSENT = "absent"
"""In place of a value whose key is missing: not the same as a null."""


class Evidence(NamedTuple):
    """What the policy looks at: the cell, the model's config.json, the `kvwarm` block that all ranks agree on, and the
    `engine` block of every rank, by rank."""

    cell: FrozenCell
    config: Mapping[str, Any] | None
    kvwarm: Mapping[str, Any] | None
    engines: Sequence[Mapping[str, Any] | None]


class Condition(NamedTuple):
    """One condition of the policy, by name."""

    name: str
    expected: Any
    found: Any
    holds: bool


def equal(name: str, expected: Any, found: Any) -> Condition:
    """That two values are equal, and of one type: True is not 1."""
    return Condition(name, expected, found, type(expected) is type(found) and bool(expected == found))


def unmet(evidence: Evidence) -> list[str]:
    """Why the policy does not hold, a line for each condition; empty where it holds."""
    return [f"{c.name}: expected {c.expected}, found {c.found}" for c in conditions(evidence) if not c.holds]


def conditions(evidence: Evidence) -> Iterator[Condition]:
    """All conditions of the policy. A block that is missing is one unmet condition, not many."""
    cell, config, kvwarm, engines = evidence
    yield equal("phase", "decode", cell.identity.phase)
    yield from _of_warm_up(kvwarm)
    yield from _of_topology(cell.identity)
    yield from _of_config(config)
    yield equal("engines", cell.identity.topology.dp, len(engines))
    for rank, engine in enumerate(engines):
        for condition in _of_engine(cell, config, rank, engine):
            yield condition._replace(name=f"rank {rank} engine{condition.name}")


def _of_warm_up(kvwarm: Mapping[str, Any] | None) -> Iterator[Condition]:
    """The warm-up was on, and skipped for the one reason."""
    if kvwarm is None:
        yield equal("kvwarm", "a block", ABSENT)
        return
    yield equal("kvwarm.enabled", True, kvwarm.get("enabled", ABSENT))
    yield equal("kvwarm.warm_eligible", False, kvwarm.get("warm_eligible", ABSENT))
    yield equal("kvwarm.skip_reason", DENSE_SKIP, kvwarm.get("skip_reason", ABSENT))


def _of_topology(identity: CellIdentity) -> Iterator[Condition]:
    """The model on one GPU, or its tensors split over some."""
    strategy = identity.parallel_strategy
    yield Condition("parallel_strategy", " or ".join(STRATEGIES), strategy, strategy in STRATEGIES)
    for axis in ("pp", "dp", "moe_tp", "moe_ep", "cp"):
        yield equal(f"topology.{axis}", 1, getattr(identity.topology, axis))


def _of_config(config: Mapping[str, Any] | None) -> Iterator[Condition]:
    """The checkpoint's own config speaks of no experts, and of no attention but full."""
    if config is None:
        yield equal("model config", "the config.json that the cell's identity names", ABSENT)
        return
    settings = list(_settings(config))
    other = [path for path, key, _ in settings if key in OTHER_ATTENTION_KEYS]
    for path, key, value in settings:
        if key == "layer_types":
            kinds = {str(kind) for kind in (value if isinstance(value, list) else [value])}
            other += [f"{path} {kind}" for kind in sorted(kinds - {FULL_LAYERS})]
    yield equal("config experts", [], [path for path, key, _ in settings if key in EXPERT_KEYS])
    yield equal("config attention", [], other)


def _settings(config: object, path: str = "") -> Iterator[tuple[str, str, Any]]:
    """Path, key and value of every setting at any depth of a config, but for nulls, which say no more than no key.

    Experts may stand in a nested text config or in the blocks of a list of layers; overlooked ones make an MoE dense
    (aisim#778).
    """
    if isinstance(config, list):
        for index, part in enumerate(config):
            yield from _settings(part, f"{path}[{index}]")
    elif isinstance(config, dict):
        for key, value in config.items():
            if value is None:
                continue
            where = f"{path}.{key}" if path else str(key)
            yield where, str(key), value
            yield from _settings(value, where)


def _of_engine(
    cell: FrozenCell, config: Mapping[str, Any] | None, rank: int, engine: Mapping[str, Any] | None
) -> Iterator[Condition]:
    """A rank's engine ran this model, in this release and topology, over a cache of full attention alone."""
    if engine is None:
        yield equal("", "a block", ABSENT)
        return
    model, versions, parallel = (part(engine, name) for name in ("model", "versions", "parallel"))
    yield equal(".capture_error", None, engine.get("capture_error"))
    named = model.get("model", ABSENT)
    yield Condition(".model.model", f"{cell.model}, or it in another folder", named, same_model(cell.model, named))
    for field in ("model_type", "architectures"):
        declared = None if config is None else config.get(field)
        yield equal(f".model.{field}", declared or "that of the model config", model.get(field, ABSENT))
    yield equal(".versions.vllm", cell.identity.runtime_backend_version, versions.get("vllm", ABSENT))
    for field, expected in (
        ("tensor_parallel_size", cell.identity.topology.tp),
        ("pipeline_parallel_size", 1),
        ("data_parallel_size", 1),
        ("data_parallel_rank", rank),
        ("prefill_context_parallel_size", 1),
        ("decode_context_parallel_size", 1),
        ("enable_expert_parallel", False),
    ):
        yield equal(f".parallel.{field}", expected, parallel.get(field, ABSENT))
    yield from _of_specs(".kv_cache.groups", part(engine, "kv_cache").get("groups"), uniform=True)


def same_model(planned: str, found: object) -> bool:
    """Whether an engine's model is the plan's: its path, or a relative one below the folder that the launch ran in."""
    if not isinstance(found, str):
        return False
    ours, theirs = PurePosixPath(planned), PurePosixPath(found)
    return ours == theirs or (not ours.is_absolute() and theirs.parts[-len(ours.parts) :] == ours.parts)


def _of_specs(name: str, specs: object, uniform: bool) -> Iterator[Condition]:
    """At least one spec, each of full attention without a window; `uniform`: or a group of such."""
    found = specs if isinstance(specs, list) else []
    yield Condition(name, "a list with a spec", specs, bool(found))
    for index, spec in enumerate(found):
        where = f"{name}[{index}]"
        if not isinstance(spec, dict):
            yield equal(where, "an object", type(spec).__name__)
        elif uniform and spec.get("type") == UNIFORM_SPEC:
            yield from _of_specs(f"{where}.specs", spec.get("specs"), uniform=False)
        else:
            yield equal(f"{where}.type", FULL_ATTENTION, spec.get("type", ABSENT))
            yield equal(f"{where}.sliding_window", None, spec.get("sliding_window", ABSENT))
            yield equal(f"{where}.attention_chunk_size", None, spec.get("attention_chunk_size", ABSENT))
            yield equal(f"{where}.non_causal", False, spec.get("non_causal", ABSENT))


def part(engine: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A part of an engine block; empty where it is missing or no mapping."""
    found = engine.get(name)
    return found if isinstance(found, dict) else {}


def objects(found: object) -> list[Mapping[str, Any]]:
    """The objects of a list; none where it is missing or no list."""
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def read_config(cell: FrozenCell) -> dict[str, Any] | None:
    """The config.json of a cell's model; None when there is none, or another one than the cell's identity names.

    Raises:
        Refusal: the file is no JSON.
    """
    file = Path(cell.model) / "config.json"
    if not is_file(file):
        return None
    config = read_json(file, "model config")
    return config if isinstance(config, dict) and digest(config) == cell.identity.model_config_sha256 else None
