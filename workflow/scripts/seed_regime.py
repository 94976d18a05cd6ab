"""Seed regimes: how the content of a point was made, by the producer and for the published table.

Native regime and stamps of a row must agree; the formal label is chosen by the first rule that matches.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

NATIVE_STAMPS = {
    "real_prefix": "prefill_real_seed",
    "fake_prefix": "prefill_fake_prefix",
    "real_kv": "kvwarm_real_kv",
    "fake_fallback": "kvwarm_fake_fallback",
}
"""Native regime -> the one stamp that its rows carry; every other regime carries none of these."""

BALANCED_MOE = "moe_tp_balanced_by_construction"


class Case(NamedTuple):
    """What the classification looks at: phase, tokens read, stamps of the row, and the artifact's kvwarm block."""

    phase: str
    kv_read_tokens: int
    stamps: frozenset[str]
    kvwarm: dict[str, Any] | None

    @property
    def skip_reason(self) -> str | None:
        return (self.kvwarm or {}).get("skip_reason")


class Rule(NamedTuple):
    when: Callable[[Case], bool]
    label: str


FORMAL_RULES = (
    Rule(lambda case: case.phase == "prefill", "n/a"),
    Rule(lambda case: case.kvwarm is None, "legacy"),
    Rule(lambda case: case.skip_reason == BALANCED_MOE, f"skip:{BALANCED_MOE}"),
    Rule(lambda case: "kvwarm_real_kv" in case.stamps, "real_kv"),
    Rule(lambda case: "kvwarm_fake_fallback" in case.stamps, "fake_fallback"),
    Rule(lambda case: case.skip_reason is not None, "fake_fallback"),
    Rule(lambda case: True, "legacy"),
)
"""The labels of a published row without a config-bound identity; the first match wins."""


def stamp_conflict(native_regime: str, sample_reasons: list[str]) -> str | None:
    """Why a row's native regime and its stamps contradict each other, or None."""
    expected = {NATIVE_STAMPS[native_regime]} if native_regime in NATIVE_STAMPS else set()
    found = set(sample_reasons) & set(NATIVE_STAMPS.values())
    if expected == found:
        return None
    return f"kv_seed_regime {native_regime}: expected stamps {sorted(expected)}, found {sorted(found)}"


def formal_regime(case: Case) -> str:
    """The label of a published row.

    Raises:
        ValueError: a point stamped as real although the whole configuration was skipped.
    """
    if "kvwarm_real_kv" in case.stamps and case.skip_reason is not None:
        raise ValueError(f"stamp kvwarm_real_kv: expected no skip_reason, found {case.skip_reason}")
    return next(rule.label for rule in FORMAL_RULES if rule.when(case))
