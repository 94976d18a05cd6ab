"""Which of a launch's settings are as the planner assumes them, by one rule for probes and for measured sessions."""

from collections.abc import Iterator, Mapping
from typing import Any

from producer.launch_checks import ABSENT, MODELLED, ONLY_IN_LATER_RELEASES, unmodelled

GIGABYTES = "vllm_config.offload_config.uva.cpu_offload_gb"
"""The one number of `MODELLED` that releases hold as an integer or a float."""

OPTIONAL_PART = "vllm_config.engram_config."
"""Below the one configuration that an engine may not have (0.32.0 and 0.33.0, config/vllm.py: `| None`)."""

Doubt = tuple[str, Any, Any]
"""Setting, expected and found value."""


def is_earlier(version: str, release: str) -> bool:
    """Whether a qualified version is before a release."""
    return [int(number) for number in version.split(".")] < [int(number) for number in release.split(".")]


def setting_doubts(version: str, launch: Mapping[str, Any]) -> Iterator[Doubt]:
    """Each setting of `MODELLED` that is not as a release must have it, by value and type: True is no 1."""
    for setting, modelled in MODELLED.items():
        found = launch[setting]
        release = ONLY_IN_LATER_RELEASES.get(setting)
        if release is not None and is_earlier(version, release):
            if found != ABSENT:
                yield setting, f"{ABSENT} in {version}", found
            continue
        types = (int, float) if setting == GIGABYTES else (type(modelled),)
        absent = found == ABSENT and setting.startswith(OPTIONAL_PART)
        if not absent and (found != modelled or type(found) not in types):
            yield setting, modelled, found


def block_doubts(launch: Mapping[str, Any]) -> Iterator[Doubt]:
    """Blocks of one launch that are not one block."""
    return (doubt for doubt in unmodelled(launch) if doubt[0] not in MODELLED)
