"""Whether a cell ran on what the accepted profile describes: the runtime, its limits, and the KV cache."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec

from producer.adapters import UNIFORM_SPEC
from producer.record import RECURRENT
from schemas.evidence import CellReadiness, CompatibilityState, RuntimeCompatibility
from schemas.plan import deployment_of
from schemas.profile import Profile, ProfileGroup

ABSENT: Final = "absent"

FIELDS = (
    ("runtime_backend_version", "engine.versions.vllm"),
    ("device_name", "engine.device_name"),
    ("max_num_tokens", "limits.max_num_scheduled_tokens"),
    ("max_batch_size", "limits.max_num_running_reqs"),
    ("max_model_len", "limits.max_model_len"),
    ("block_size", "limits.block_size"),
    ("hash_block_size", "engine.serving_config.launch.hash_block_size"),
    ("enable_prefix_caching", "engine.kv_cache.enable_prefix_caching"),
)
"""Field of a profile -> where an artifact says the same."""

GROUP_FIELDS = (("spec_type", "type"), ("block_size_tokens", "block_size"), ("sliding_window", "sliding_window"))
"""Field of a profile's cache group -> the artifact's name of it. Bytes of a page are in no artifact."""


class Finding(msgspec.Struct, frozen=True):
    """A field that differs, or that the artifact does not have (`found` is `ABSENT`)."""

    field: str
    expected: Any
    found: Any

    def __str__(self) -> str:
        return f"runtime {self.field}: expected {self.expected} of the accepted profile, found {self.found}"


def look_up(blocks: Any, place: str) -> Any:
    """The value at a dotted place of nested mappings, or `ABSENT`."""
    for key in place.split("."):
        if not isinstance(blocks, Mapping) or key not in blocks:
            return ABSENT
        blocks = blocks[key]
    return blocks


def group_findings(place: str, expected: ProfileGroup, found: Any, mamba_cache_mode: str) -> Iterator[Finding]:
    for name, theirs in GROUP_FIELDS:
        want, have = getattr(expected, name), look_up(found, theirs)
        if want is None and have == ABSENT:
            continue  # a class without windows has none
        # Of layers in a wrapper a profile names the class, an artifact the wrapper alone.
        yield Finding(f"{place}.{theirs}", want, ABSENT if have == UNIFORM_SPEC else have)
    if expected.spec_type == RECURRENT:
        yield Finding(f"{place}.mamba_cache_mode", mamba_cache_mode, look_up(found, "mamba_cache_mode"))


def fields_beside(profile: Profile, artifact: Mapping[str, Any]) -> Iterator[Finding]:
    """Every field that both can have, as the profile and the artifact have it, equal or not."""
    for name, place in FIELDS:
        yield Finding(place, getattr(profile, name), look_up(artifact, place))
    groups = look_up(artifact, "engine.kv_cache.groups")
    if not isinstance(groups, list):
        yield Finding("engine.kv_cache.groups", f"{len(profile.groups)} groups", ABSENT)
        return
    yield Finding("number of engine.kv_cache.groups", len(profile.groups), len(groups))
    for index, (expected, found) in enumerate(zip(profile.groups, groups, strict=False)):
        yield from group_findings(f"engine.kv_cache.groups[{index}]", expected, found, profile.mamba_cache_mode)


def free_blocks(artifact: Mapping[str, Any]) -> int | None:
    """Blocks that requests can have, the fewest of any rank; without that, rank 0's without the null block.

    vLLM keeps one block out of its pool (0.32.0, v1/core/block_pool.py: `null_block`).
    """
    usable = look_up(artifact, "capacity.common.usable_blocks_without_watermark")
    if type(usable) is int:
        return usable
    blocks = look_up(artifact, "limits.num_gpu_blocks")
    return blocks - 1 if type(blocks) is int else None


def compare(profile: Profile, artifact: Mapping[str, Any]) -> RuntimeCompatibility:
    """The blocks `limits`, `capacity` and `engine` of an artifact against the profile that its plan was made with."""
    found = list(fields_beside(profile, artifact))
    mismatches = [str(each) for each in found if each.found != ABSENT and _differ(each)]
    unestablished = [each.field for each in found if each.found == ABSENT]
    observed = free_blocks(artifact)
    if observed is None:
        unestablished.append("capacity.common.usable_blocks_without_watermark")
    elif observed < profile.free_blocks:
        mismatches.append(str(Finding("free blocks", f"at least {profile.free_blocks}", observed)))
    return RuntimeCompatibility(
        status=_state(mismatches, unestablished),
        mismatches=tuple(mismatches),
        unestablished=tuple(unestablished),
        accepted_free_blocks=profile.free_blocks,
        observed_free_blocks=observed,
    )


def _differ(finding: Finding) -> bool:
    """A bool is no int."""
    return type(finding.expected) is not type(finding.found) or finding.expected != finding.found


def _state(mismatches: Iterable[str], unestablished: Iterable[str]) -> CompatibilityState:
    return "mismatch" if any(mismatches) else "unestablished" if any(unestablished) else "compatible"


def by_deployment(cells: Iterable[CellReadiness]) -> dict[str, RuntimeCompatibility]:
    """The phases of each deployment together: every finding once, and the fewest blocks."""
    phases: dict[str, list[RuntimeCompatibility]] = {}
    for cell in cells:
        if cell.runtime_compatibility is not None:
            phases.setdefault(deployment_of(cell.name), []).append(cell.runtime_compatibility)
    return {name: _joined(found) for name, found in sorted(phases.items())}


def _joined(found: list[RuntimeCompatibility]) -> RuntimeCompatibility:
    mismatches = dict.fromkeys(line for each in found for line in each.mismatches)
    unestablished = dict.fromkeys(field for each in found for field in each.unestablished)
    observed = [each.observed_free_blocks for each in found if each.observed_free_blocks is not None]
    return RuntimeCompatibility(
        status=_state(mismatches, unestablished),
        mismatches=tuple(mismatches),
        unestablished=tuple(unestablished),
        accepted_free_blocks=found[0].accepted_free_blocks,
        observed_free_blocks=min(observed, default=None),
    )
