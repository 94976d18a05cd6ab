"""Which launches are measured at all: those whose scheduling the planner's rules describe.

Limits, topology, precision, block sizes and cache groups are the cell's and are compared with it. What is asked here
is the same for every cell: settings that a cell does not hold, whose defaults an engine release, a model or the
environment may change, and under which the same point would run otherwise.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from schemas.errors import Refusal

ABSENT = "absent"
"""Found in place of a setting whose part the engine does not have: there is nothing to switch off."""

MODELLED: dict[str, Any] = {
    # A step computes what is known and samples one token a request: nothing is drafted, predicted or denoised.
    "vllm_config.speculative_config": None,
    "vllm_config.diffusion_config": None,
    "num_lookahead_tokens": 0,
    # A cached prefix is hit whole, at the granularity of the profile, and computed nowhere twice: no block dropped for
    # a drafter, no hash that covers tokens after its block, no hit inside a block, no tail replayed after a hit.
    "cache_config.enable_prefix_caching": True,
    "use_eagle_block_drop": False,
    "num_hash_lookahead_tokens": 0,
    "mamba_partial_cache_hit": False,
    "prefix_replay_tokens": 0,
    # Recurrent states are kept at semantic boundaries alone (0.33.0, config/cache.py:275: "0 retains only semantic
    # checkpoints"): the capacity rule counts their blocks so.
    "cache_config.prefix_cache_retention_interval": 0,
    "cache_config.enable_mamba_shared_prefix_checkpoint": False,
    # Keys, values and weights are in the memory of the device: a step fetches none of them from elsewhere.
    "vllm_config.kv_transfer_config": None,
    "vllm_config.ec_transfer_config": None,
    "cache_config.kv_offloading_size": None,
    "vllm_config.offload_config.uva.cpu_offload_gb": 0,
    "vllm_config.offload_config.prefetch.offload_group_size": 0,
    "vllm_config.engram_config.cpu_offload": False,
    # One step at a time, on whole sequences.
    "scheduler_config.async_scheduling": False,
    "parallel_config.pipeline_parallel_size": 1,
    "parallel_config.prefill_context_parallel_size": 1,
    "parallel_config.decode_context_parallel_size": 1,
    # Requests that fit enter together, in order, each with the whole budget.
    "scheduler_config.policy": "fcfs",
    "scheduler_config.enable_chunked_prefill": True,
    "scheduler_config.long_prefill_token_threshold": 0,
    "scheduler_config.max_num_active_seqs": None,
    "scheduler_config.prefill_schedule_interval": 1,
    "scheduler_config.scheduler_reserve_full_isl": True,
    "scheduler_config.watermark": 0.0,
}
"""Attribute of the engine's scheduler, in the engine's own words -> the value that planning and measuring assume."""

ONLY_IN_LATER_RELEASES = {"num_hash_lookahead_tokens": "0.33.0"}
"""Attributes that the first qualified release does not have yet -> the release that brought them."""


def _plain(value: Any) -> Any:
    """A value that a record can hold: what is no plain value by its text."""
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _found(scheduler: Any, path: str) -> Any:
    *parts, name = path.split(".")
    holder = scheduler
    for part in parts:
        holder = getattr(holder, part)
        if holder is None:
            return ABSENT
    if path in ONLY_IN_LATER_RELEASES:
        return _plain(getattr(holder, name, ABSENT))
    return _plain(getattr(holder, name))


def recurrent_block_sizes(scheduler: Any) -> list[int]:
    """Tokens of a block of each recurrent group, also of one that bundles several layers' specs."""
    sizes = []
    for group in scheduler.kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        layers = getattr(spec, "kv_cache_specs", {"": spec}).values()
        if any(type(layer).__name__ == "MambaSpec" for layer in layers):
            sizes.append(spec.block_size)
    return sizes


def launch_facts(scheduler: Any) -> dict[str, Any]:
    """What a started engine's scheduler says of each setting, as plain values."""
    return {
        **{path: _found(scheduler, path) for path in MODELLED},
        "block_size": scheduler.block_size,
        "cache_config.block_size": scheduler.cache_config.block_size,
        "hash_block_size": scheduler.hash_block_size,
        "recurrent_block_sizes": recurrent_block_sizes(scheduler),
    }


def unmodelled(facts: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """(setting, modelled value, found value) of each of `launch_facts` that no rule describes."""
    for path, modelled in MODELLED.items():
        if facts[path] not in (modelled, ABSENT):
            yield path, modelled, facts[path]
    # The align rule knows one block: of the scheduler, of the cache configuration, of every recurrent group, and of
    # the hashes where there is one (producer/align.py).
    if facts["cache_config.block_size"] != facts["block_size"]:
        yield "cache_config.block_size", facts["block_size"], facts["cache_config.block_size"]
    for size in facts["recurrent_block_sizes"]:
        if size != facts["block_size"]:
            yield "recurrent_block_sizes", facts["block_size"], size
        if facts["hash_block_size"] != size:
            yield "hash_block_size", size, facts["hash_block_size"]


def refuse_unmodelled(scheduler: Any, model: Path | str) -> None:
    """Refuse a launch that no rule describes, by name and value, before anything is measured.

    Raises:
        Refusal: naming the first such setting.
    """
    for setting, modelled, found in unmodelled(launch_facts(scheduler)):
        raise Refusal(f"launch {setting}", modelled, found, model)
