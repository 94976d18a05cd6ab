"""Seed regimes: how the content of a point was made, by its producer's words and as the label of the published table.

A row has a native regime and stamps (`sample_reasons`), its artifact a `kvwarm` block. They must not contradict one
another; the label is then chosen by the first rule that matches.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec import UNSET

from producer.adapters import UNIFORM_SPEC
from schemas.merged import MergedArtifact
from schemas.native import REGIME_STAMPS
from schemas.plan import FrozenCell

from dense_policy import DENSE_LABEL, DENSE_SKIP, Evidence, equal, objects, part, unmet

BALANCED_MOE = "moe_tp_balanced_by_construction"
SKIP = "skip:"
"""Prefix of the native regimes that name a reason."""
STAMPS = frozenset(REGIME_STAMPS.values())
MUST_WARM = ("tep", "dep", "pure_tp")
"""Strategies under which decode depends on what the cache holds: experts are chosen by it."""


class NativeRegime(NamedTuple):
    """What comes with a native regime: the phase, the one stamp or none, and the values of the `kvwarm` block."""

    phase: str
    stamp: str | None
    kvwarm: Mapping[str, Any] = {}


ELIGIBLE = {"warm_eligible": True}
NATIVE_REGIMES = {
    "not_applicable": NativeRegime("prefill", None),
    "real_prefix": NativeRegime("prefill", REGIME_STAMPS["real_prefix"]),
    "fake_prefix": NativeRegime("prefill", REGIME_STAMPS["fake_prefix"]),
    "real_kv": NativeRegime("decode", REGIME_STAMPS["real_kv"], ELIGIBLE),
    "fake_fallback": NativeRegime("decode", REGIME_STAMPS["fake_fallback"]),
    "real_attention_kv_random_kda": NativeRegime("decode", REGIME_STAMPS["real_kv"], ELIGIBLE),
    "fake_attention_kv_random_kda": NativeRegime("decode", REGIME_STAMPS["fake_fallback"]),
    "legacy": NativeRegime("decode", None, {"enabled": False}),
    "unstamped": NativeRegime("decode", None, {"enabled": True} | ELIGIBLE),
}
"""The native regimes of Dynamo 1.6.1 and 1.7, beside `skip:<reason>`. A row without one is historical."""
RANDOM_KDA = ("real_attention_kv_random_kda", "fake_attention_kv_random_kda")


def known_regime(name: str) -> NativeRegime | None:
    """What comes with a native regime, None for one that nobody knows."""
    reason = name.removeprefix(SKIP)
    if reason in (name, ""):
        return NATIVE_REGIMES.get(name)
    # Dynamo writes its null as a word where no reason was ever set.
    return NativeRegime("decode", None, {"warm_eligible": False, "skip_reason": None if reason == "None" else reason})


class Case(NamedTuple):
    """What the classification looks at: phase, tokens read, stamps (or all sample reasons) and native regime of the
    row, the artifact's `kvwarm` block, whether consumers bind the cell's rows to a model config, whether the cell
    fulfils the dense policy, and whether its cache has groups that do not keep every token."""

    phase: str
    kv_read_tokens: int
    stamps: Collection[str]
    kvwarm: Mapping[str, Any] | None
    config_bound: bool = False
    native_regime: str | None = None
    dense_policy: bool = False
    grouped_cache: bool = False

    @property
    def skip_reason(self) -> Any:
        return (self.kvwarm or {}).get("skip_reason")

    @property
    def real_stamp(self) -> bool:
        return "kvwarm_real_kv" in self.stamps

    @property
    def fallback_stamp(self) -> bool:
        return "kvwarm_fake_fallback" in self.stamps

    @property
    def native_dense_skip(self) -> bool:
        """The newer of the two formats: a dense skip of its own in the row, and no stamp."""
        return self.native_regime == DENSE_LABEL and not STAMPS & set(self.stamps)


class Rule(NamedTuple):
    why: str
    when: Callable[[Case], bool]
    label: str


FORMAL_RULES = (
    Rule(
        "prefill that reads no cache, or whose rows no consumer binds to a model config",
        lambda case: case.phase == "prefill" and not (case.config_bound and case.kv_read_tokens),
        "n/a",
    ),
    Rule(
        "cached prefill of a config-bound model over a real prefix: loaders accept no other label there",
        lambda case: case.phase == "prefill" and "prefill_real_seed" in case.stamps and not case.real_stamp,
        "real_kv",
    ),
    Rule("no kvwarm block", lambda case: case.kvwarm is None, "legacy"),
    Rule("experts are balanced by construction", lambda case: case.skip_reason == BALANCED_MOE, SKIP + BALANCED_MOE),
    Rule("recurrent state of random numbers", lambda case: case.native_regime in RANDOM_KDA, "fake_fallback"),
    Rule("stamped as real", lambda case: case.real_stamp, "real_kv"),
    Rule("dense skip, shown", lambda case: case.native_dense_skip and case.dense_policy, DENSE_LABEL),
    Rule("stamped as fallback, dense skip shown", lambda case: case.fallback_stamp and case.dense_policy, DENSE_LABEL),
    Rule("stamped as fallback", lambda case: case.fallback_stamp, "fake_fallback"),
    Rule("the whole configuration was skipped", lambda case: case.skip_reason is not None, "fake_fallback"),
    Rule("the row was skipped", lambda case: (case.native_regime or "").startswith(SKIP), "fake_fallback"),
    Rule("nothing is known of it", lambda case: True, "legacy"),
)
"""The labels of a published row; the first match wins.

So of Dynamo's newer regimes `unstamped` is legacy, `legacy` is fake_fallback by its block's flag_off, and `skip:None`,
`skip:peer_ineligible` and both of random KDA state are fake_fallback.
"""


def stamp_conflict(native_regime: str | None, sample_reasons: Collection[str]) -> str | None:
    """Why a row's native regime and its stamps contradict each other, or None. Historical rows have no regime."""
    if native_regime is None:
        return None
    native = known_regime(native_regime)
    if native is None:
        return f"kv_seed_regime: expected a native regime, found {native_regime!r}"
    expected = [] if native.stamp is None else [native.stamp]
    found = sorted(reason for reason in sample_reasons if reason in STAMPS)
    if expected == found:
        return None
    return f"kv_seed_regime {native_regime}: expected stamps {expected}, found {found}"


def regime_conflicts(case: Case) -> Iterator[str]:
    """Where a row's native regime contradicts its phase, its tokens or the `kvwarm` block of its artifact."""
    name, block = case.native_regime or "", case.kvwarm
    native = known_regime(name)
    if native is None:
        return
    if native.phase != case.phase:
        yield f"kv_seed_regime {name}: expected a {native.phase} row, found {case.phase}"
    if name == "fake_prefix" and not case.kv_read_tokens:
        yield f"kv_seed_regime {name}: expected a row that reads a prefix, found 0 tokens read"
    if block is None:
        if name.startswith(SKIP):
            yield f"kv_seed_regime {name}: expected a kvwarm block with its reason, found none"
        return
    for field, expected in native.kvwarm.items():
        if not equal("", expected, block.get(field)).holds:
            yield f"kv_seed_regime {name}: expected kvwarm.{field} {expected}, found {block.get(field)}"


def kvwarm_findings(kvwarm: Mapping[str, Any] | None, phase: str, strategy: str) -> Iterator[str]:
    """What of the `kvwarm` block of a decode artifact contradicts itself or the strategy; of a prefill nothing is
    asked."""
    if phase != "decode":
        return
    if kvwarm is None:
        if strategy in MUST_WARM:
            yield f"kvwarm: expected a block of a decode cell of strategy {strategy}, found none"
        return
    enabled, eligible, reason = (kvwarm.get(field) for field in ("enabled", "warm_eligible", "skip_reason"))
    for field, flag in (("enabled", enabled), ("warm_eligible", eligible)):
        if type(flag) is not bool:
            yield f"kvwarm.{field}: expected true or false, found {flag!r}"
        elif strategy in MUST_WARM and not flag:
            yield f"kvwarm.{field}: expected true of strategy {strategy}, found false ({reason})"
    if eligible is True and reason is not None:
        yield f"kvwarm.skip_reason: expected null of an eligible warm-up, found {reason!r}"
    if eligible is True and enabled is False:
        yield "kvwarm.warm_eligible: expected false of a warm-up that is off, found true"
    if eligible is False and not (isinstance(reason, str) and reason):
        yield f"kvwarm.skip_reason: expected the reason of a skipped warm-up, found {reason!r}"


def formal_regime(case: Case, dense_synthetic_kv: bool = True) -> str:
    """The label of a published row. Tables from before the dense policy are read again without `dense_synthetic_kv`.

    Raises:
        ValueError: a point stamped as real and as fallback, or as real although the whole configuration was skipped; a
            prefix that no real tokens made, read from groups that do not keep every token; a config-bound row that
            reads a cache which no real tokens filled.
    """
    if case.real_stamp and case.fallback_stamp:
        raise ValueError("stamps: expected one of kvwarm_real_kv and kvwarm_fake_fallback, found both")
    if case.real_stamp and case.skip_reason is not None:
        raise ValueError(f"stamp kvwarm_real_kv: expected no skip_reason, found {case.skip_reason}")
    cached_prefill = case.phase == "prefill" and case.kv_read_tokens > 0
    if cached_prefill and case.grouped_cache and case.native_regime != "real_prefix":
        raise ValueError(f"kv_seed_regime over a grouped cache: expected real_prefix, found {case.native_regime}")
    case = case._replace(dense_policy=case.dense_policy and dense_synthetic_kv)
    label = next(rule.label for rule in FORMAL_RULES if rule.when(case))
    if case.config_bound and (case.phase == "decode" or case.kv_read_tokens) and label != "real_kv":
        raise ValueError(f"kv_seed_regime of a config-bound row: expected real_kv, found {label}")
    return label


EVERY_TOKEN = ("FullAttentionSpec", "MLAAttentionSpec", UNIFORM_SPEC)
"""vLLM's specs of groups that keep every token, as long as they have no window."""
WINDOWS = ("sliding_window", "attention_chunk_size")


def grouped_cache(engine: Mapping[str, Any]) -> bool:
    """Whether an engine's cache has a group that does not keep every token: a window, a chunk or a state."""
    return any(spec.get("type") not in EVERY_TOKEN or any(spec.get(key) for key in WINDOWS) for spec in _specs(engine))


def _specs(engine: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The specs of all groups, and those of the layers in a uniform group."""
    for group in objects(part(engine, "kv_cache").get("groups")):
        yield group
        yield from objects(group.get("specs"))


class Classification(NamedTuple):
    """The labels of a merged file's rows without contradiction; the contradictions; why the dense policy does not hold,
    where a row would need it."""

    labels: list[str]
    conflicts: list[str]
    unmet: list[str]


def classify(
    cell: FrozenCell,
    merged: MergedArtifact,
    engines: Sequence[Mapping[str, Any] | None],
    config: Mapping[str, Any] | None,
) -> Classification:
    """Formal label of each row of a merged file, whose ranks agree on regimes and `kvwarm`; `engines` is by rank."""
    identity = cell.identity
    kvwarm = None if merged.kvwarm is UNSET else merged.kvwarm
    why_not = unmet(Evidence(cell, config, kvwarm, engines))
    grouped = any(engine is not None and grouped_cache(engine) for engine in engines)
    conflicts: list[str] = []
    labels, needed = list[str](), False
    for row in merged.results:
        case = Case(
            phase=row.point.point_type,
            kv_read_tokens=row.point.total_kv_read_tokens,
            stamps=row.point.sample_reasons,
            kvwarm=kvwarm,
            config_bound=identity.execution_identity is not None,
            native_regime=row.kv_seed_regime,
            dense_policy=not why_not,
            grouped_cache=grouped,
        )
        where = f"benchmark_id={row.point.benchmark_id}"
        conflicts += [f"{where} {conflict}" for conflict in regime_conflicts(case)]
        try:
            labels.append(formal_regime(case))
        except ValueError as error:
            conflicts.append(f"{where} {error}")
        needed = needed or case.native_dense_skip or (case.fallback_stamp and case.skip_reason == DENSE_SKIP)
    return Classification(labels, conflicts, why_not if needed else [])
