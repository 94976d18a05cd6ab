"""Seed regimes: how the content of a point was made, by the producer and for the published table.

Native regime and stamps of a row must agree; the formal label is chosen by the first rule that matches.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from schemas.native import REGIME_STAMPS

BALANCED_MOE = "moe_tp_balanced_by_construction"


class Case(NamedTuple):
    """What the classification looks at: phase, tokens read, stamps of the row, the artifact's kvwarm block, and
    whether the cell has an execution identity that consumers bind to a model config."""

    phase: str
    kv_read_tokens: int
    stamps: frozenset[str]
    kvwarm: dict[str, Any] | None
    config_bound: bool = False

    @property
    def skip_reason(self) -> str | None:
        return (self.kvwarm or {}).get("skip_reason")


class Rule(NamedTuple):
    when: Callable[[Case], bool]
    label: str


FORMAL_RULES = (
    Rule(lambda case: case.phase == "prefill" and not (case.config_bound and case.kv_read_tokens), "n/a"),
    # A cached prefill of a config-bound model is recognised by its own seed: loaders accept no other label there.
    Rule(lambda case: case.phase == "prefill" and "prefill_real_seed" in case.stamps, "real_kv"),
    Rule(lambda case: case.kvwarm is None, "legacy"),
    Rule(lambda case: case.skip_reason == BALANCED_MOE, f"skip:{BALANCED_MOE}"),
    Rule(lambda case: "kvwarm_real_kv" in case.stamps, "real_kv"),
    Rule(lambda case: "kvwarm_fake_fallback" in case.stamps, "fake_fallback"),
    Rule(lambda case: case.skip_reason is not None, "fake_fallback"),
    Rule(lambda case: True, "legacy"),
)
"""The labels of a published row; the first match wins."""


def stamp_conflict(native_regime: str, sample_reasons: list[str]) -> str | None:
    """Why a row's native regime and its stamps contradict each other, or None."""
    expected = {REGIME_STAMPS[native_regime]} if native_regime in REGIME_STAMPS else set()
    found = set(sample_reasons) & set(REGIME_STAMPS.values())
    if expected == found:
        return None
    return f"kv_seed_regime {native_regime}: expected stamps {sorted(expected)}, found {sorted(found)}"


def formal_regime(case: Case) -> str:
    """The label of a published row.

    Raises:
        ValueError: a point stamped as real although the whole configuration was skipped, or a config-bound row that
            reads a cache which no real tokens filled.
    """
    if "kvwarm_real_kv" in case.stamps and case.skip_reason is not None:
        raise ValueError(f"stamp kvwarm_real_kv: expected no skip_reason, found {case.skip_reason}")
    label = next(rule.label for rule in FORMAL_RULES if rule.when(case))
    if case.config_bound and (case.phase == "decode" or case.kv_read_tokens) and label != "real_kv":
        raise ValueError(f"kv_seed_regime of a config-bound row: expected real_kv, found {label}")
    return label
