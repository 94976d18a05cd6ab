"""Native regimes against stamps, phases and warm-up; the label of every row (the seed regimes' two tables)."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seed_regime import Case, formal_regime, grouped_cache, kvwarm_findings, regime_conflicts, stamp_conflict

WARM = {"enabled": True, "warm_eligible": True, "skip_reason": None}
DENSE = "skip:dense_model_content_insensitive"
DENSE_SKIP = {"enabled": True, "warm_eligible": False, "skip_reason": "dense_model_content_insensitive"}
MOE_SKIP = DENSE_SKIP | {"skip_reason": "moe_tp_balanced_by_construction"}
OFF = {"enabled": False, "warm_eligible": False, "skip_reason": "flag_off"}
REAL, FALLBACK = frozenset({"explicit", "kvwarm_real_kv"}), frozenset({"explicit", "kvwarm_fake_fallback"})
PREFIX, FAKE_PREFIX = frozenset({"prefill_real_seed"}), frozenset({"prefill_fake_prefix"})
NONE = frozenset({"explicit"})


def decode(stamps: frozenset[str], kvwarm: dict[str, Any] | None, native: str | None = None, **more: bool) -> Case:
    return Case("decode", 64, stamps, kvwarm, native_regime=native, **more)


def prefill(read: int, stamps: frozenset[str], native: str | None = None, **more: bool) -> Case:
    return Case("prefill", read, stamps, None, native_regime=native, **more)


@pytest.mark.parametrize(
    ("case", "label"),
    [
        # 1: prefill, without a config-bound identity or without a cached prefix
        (prefill(0, NONE, "not_applicable"), "n/a"),
        (prefill(128, PREFIX, "real_prefix"), "n/a"),
        (prefill(128, FAKE_PREFIX, "fake_prefix"), "n/a"),
        (prefill(0, PREFIX, "real_prefix", config_bound=True), "n/a"),
        # a config-bound cached prefill by its own seed, whatever the block says
        (prefill(128, PREFIX, "real_prefix", config_bound=True), "real_kv"),
        (prefill(128, PREFIX, "real_prefix", config_bound=True)._replace(kvwarm=DENSE_SKIP), "real_kv"),
        # 2: no block
        (decode(NONE, None), "legacy"),
        (decode(FALLBACK, None, dense_policy=True), "legacy"),
        (decode(REAL, None), "legacy"),
        # 3: balanced experts
        (decode(NONE, MOE_SKIP, "skip:moe_tp_balanced_by_construction"), "skip:moe_tp_balanced_by_construction"),
        (decode(FALLBACK, MOE_SKIP, "fake_fallback"), "skip:moe_tp_balanced_by_construction"),
        # 4: stamped as real
        (decode(REAL, WARM, "real_kv"), "real_kv"),
        (decode(REAL, WARM, None), "real_kv"),
        (decode(REAL, WARM, "real_kv", config_bound=True), "real_kv"),
        # 5: the row's own dense skip
        (decode(NONE, DENSE_SKIP, DENSE, dense_policy=True), DENSE),
        (decode(NONE, DENSE_SKIP, DENSE), "fake_fallback"),
        # 6: the older format's stamp
        (decode(FALLBACK, DENSE_SKIP, "fake_fallback", dense_policy=True), DENSE),
        (decode(FALLBACK, DENSE_SKIP, None, dense_policy=True), DENSE),
        (decode(FALLBACK, DENSE_SKIP, "fake_fallback"), "fake_fallback"),
        (decode(FALLBACK, WARM, "fake_fallback"), "fake_fallback"),
        # 7: a reason of the whole configuration, which qualifies no row by itself
        (decode(NONE, DENSE_SKIP, None, dense_policy=True), "fake_fallback"),
        (decode(NONE, OFF, "legacy"), "fake_fallback"),
        (decode(NONE, OFF | {"skip_reason": "peer_ineligible"}, "skip:peer_ineligible"), "fake_fallback"),
        (decode(NONE, DENSE_SKIP | {"skip_reason": None}, "skip:None"), "fake_fallback"),
        # 8: otherwise
        (decode(NONE, WARM), "legacy"),
        (decode(NONE, WARM, "unstamped"), "legacy"),
        # newer than the table: real attention over a state of random numbers is no real content
        (decode(REAL, WARM, "real_attention_kv_random_kda"), "fake_fallback"),
        (decode(FALLBACK, WARM, "fake_attention_kv_random_kda"), "fake_fallback"),
    ],
)
def test_the_first_rule_that_matches_gives_the_label(case: Case, label: str):
    assert formal_regime(case) == label


@pytest.mark.parametrize(
    "case",
    [
        decode(NONE, DENSE_SKIP, DENSE, dense_policy=True),
        decode(FALLBACK, DENSE_SKIP, "fake_fallback", dense_policy=True),
    ],
)
def test_a_table_from_before_the_dense_policy_keeps_its_labels(case: Case):
    assert formal_regime(case) == DENSE
    assert formal_regime(case, dense_synthetic_kv=False) == "fake_fallback"


@pytest.mark.parametrize(
    ("case", "complaint"),
    [
        (decode(REAL, OFF), "stamp kvwarm_real_kv: expected no skip_reason, found flag_off"),
        (decode(REAL, MOE_SKIP), "stamp kvwarm_real_kv: expected no skip_reason, found moe_tp_balanced_by"),
        (decode(REAL | FALLBACK, WARM), "stamps: expected one of kvwarm_real_kv and kvwarm_fake_fallback, found both"),
        (prefill(128, FAKE_PREFIX, "fake_prefix", grouped_cache=True), "expected real_prefix, found fake_prefix"),
        (prefill(128, PREFIX, None, grouped_cache=True), "expected real_prefix, found None"),
        (decode(NONE, WARM, config_bound=True), "expected real_kv, found legacy"),
        (decode(FALLBACK, WARM, config_bound=True), "expected real_kv, found fake_fallback"),
        (decode(NONE, DENSE_SKIP, DENSE, config_bound=True, dense_policy=True), f"expected real_kv, found {DENSE}"),
        (
            decode(REAL, WARM, "real_attention_kv_random_kda", config_bound=True),
            "expected real_kv, found fake_fallback",
        ),
        (decode(REAL, None, config_bound=True), "expected real_kv, found legacy"),
        (prefill(128, FAKE_PREFIX, "fake_prefix", config_bound=True), "expected real_kv, found legacy"),
        (prefill(128, NONE, "not_applicable", config_bound=True), "expected real_kv, found legacy"),
    ],
)
def test_a_contradiction_has_no_label(case: Case, complaint: str):
    with pytest.raises(ValueError, match=complaint):
        formal_regime(case)


def test_a_prefix_of_real_tokens_may_be_read_from_a_grouped_cache():
    assert formal_regime(prefill(128, PREFIX, "real_prefix", grouped_cache=True)) == "n/a"
    assert formal_regime(prefill(0, NONE, "not_applicable", grouped_cache=True)) == "n/a"


STAMPED = {
    "real_prefix": "prefill_real_seed",
    "fake_prefix": "prefill_fake_prefix",
    "real_kv": "kvwarm_real_kv",
    "fake_fallback": "kvwarm_fake_fallback",
    "real_attention_kv_random_kda": "kvwarm_real_kv",
    "fake_attention_kv_random_kda": "kvwarm_fake_fallback",
}
UNSTAMPED = (
    "not_applicable",
    "legacy",
    "unstamped",
    "skip:flag_off",
    "skip:None",
    DENSE,
    "skip:dataset_unavailable: 404",
)
SEED_STAMPS = ("prefill_real_seed", "prefill_fake_prefix", "kvwarm_real_kv", "kvwarm_fake_fallback")


@pytest.mark.parametrize("regime", [*STAMPED, *UNSTAMPED])
def test_a_regime_has_its_one_stamp_and_no_other(regime: str):
    wanted = {STAMPED[regime]} if regime in STAMPED else set()
    for size in range(5):
        for stamps in itertools.combinations(SEED_STAMPS, size):
            conflict = stamp_conflict(regime, ["explicit", *stamps, "context_clamped"])
            assert (conflict is None) is (set(stamps) == wanted), (regime, stamps)


def test_a_stamp_stands_once():
    assert stamp_conflict("real_kv", ["kvwarm_real_kv", "kvwarm_real_kv"]) is not None


def test_a_historical_row_has_no_regime_and_is_not_checked():
    assert stamp_conflict(None, ["kvwarm_fake_fallback"]) is None
    assert list(regime_conflicts(decode(FALLBACK, DENSE_SKIP))) == []


@pytest.mark.parametrize("regime", ["", "skip:", "real", "Real_kv", "merged", "skip"])
def test_a_regime_that_nobody_knows_is_named(regime: str):
    assert stamp_conflict(regime, []) == f"kv_seed_regime: expected a native regime, found {regime!r}"


PREFILL_REGIMES = ("not_applicable", "real_prefix", "fake_prefix")


@pytest.mark.parametrize("regime", [*STAMPED, *UNSTAMPED])
def test_a_regime_belongs_to_its_phase(regime: str):
    own, other = ("prefill", "decode") if regime in PREFILL_REGIMES else ("decode", "prefill")
    case = Case(own, 64, frozenset(), None, native_regime=regime)
    wrong = f"kv_seed_regime {regime}: expected a {own} row, found {other}"
    assert wrong not in regime_conflicts(case)
    assert not [line for line in regime_conflicts(case) if "row, found" in line]
    assert wrong in regime_conflicts(case._replace(phase=other))


def test_of_a_regime_that_nobody_knows_nothing_else_is_asked():
    assert list(regime_conflicts(decode(NONE, WARM, "something new"))) == []


def test_a_fake_prefix_has_tokens_that_are_read():
    assert list(regime_conflicts(prefill(0, FAKE_PREFIX, "fake_prefix"))) == [
        "kv_seed_regime fake_prefix: expected a row that reads a prefix, found 0 tokens read"
    ]
    assert list(regime_conflicts(prefill(0, PREFIX, "real_prefix"))) == []


@pytest.mark.parametrize(
    ("regime", "kvwarm", "lines"),
    [
        ("real_kv", WARM, []),
        ("real_kv", DENSE_SKIP, ["kvwarm.warm_eligible True, found False"]),
        ("real_kv", WARM | {"warm_eligible": 1}, ["kvwarm.warm_eligible True, found 1"]),
        ("real_attention_kv_random_kda", DENSE_SKIP, ["kvwarm.warm_eligible True, found False"]),
        ("fake_fallback", WARM, []),
        ("fake_fallback", DENSE_SKIP, []),
        (DENSE, DENSE_SKIP, []),
        (DENSE, None, ["a kvwarm block with its reason, found none"]),
        (DENSE, OFF, ["kvwarm.skip_reason dense_model_content_insensitive, found flag_off"]),
        (
            DENSE,
            WARM,
            [
                "kvwarm.warm_eligible False, found True",
                "kvwarm.skip_reason dense_model_content_insensitive, found None",
            ],
        ),
        ("skip:None", DENSE_SKIP | {"skip_reason": None}, []),
        ("skip:None", DENSE_SKIP, ["kvwarm.skip_reason None, found dense_model_content_insensitive"]),
        ("legacy", OFF, []),
        ("legacy", WARM, ["kvwarm.enabled False, found True"]),
        ("legacy", None, []),
        ("unstamped", WARM, []),
        ("unstamped", OFF, ["kvwarm.enabled True, found False", "kvwarm.warm_eligible True, found False"]),
    ],
)
def test_a_regime_agrees_with_the_warm_up(regime: str, kvwarm: dict[str, Any] | None, lines: list[str]):
    found = list(regime_conflicts(Case("decode", 64, frozenset(), kvwarm, native_regime=regime)))
    assert found == [f"kv_seed_regime {regime}: expected {line}" for line in lines]


@pytest.mark.parametrize(
    ("kvwarm", "strategy", "lines"),
    [
        (WARM, "single", []),
        (WARM, "tep", []),
        (DENSE_SKIP, "tp", []),
        (None, "single", []),
        (None, "tep", ["kvwarm: expected a block of a decode cell of strategy tep, found none"]),
        (None, "dep", ["kvwarm: expected a block of a decode cell of strategy dep, found none"]),
        (None, "pure_tp", ["kvwarm: expected a block of a decode cell of strategy pure_tp, found none"]),
        (
            MOE_SKIP,
            "pure_tp",
            ["kvwarm.warm_eligible: expected true of strategy pure_tp, found false (moe_tp_balanced_by_construction)"],
        ),
        (
            OFF,
            "dep",
            [
                "kvwarm.enabled: expected true of strategy dep, found false (flag_off)",
                "kvwarm.warm_eligible: expected true of strategy dep, found false (flag_off)",
            ],
        ),
        (WARM | {"enabled": 1}, "single", ["kvwarm.enabled: expected true or false, found 1"]),
        (WARM | {"enabled": "true"}, "tep", ["kvwarm.enabled: expected true or false, found 'true'"]),
        (WARM | {"warm_eligible": None}, "single", ["kvwarm.warm_eligible: expected true or false, found None"]),
        (
            {},
            "single",
            [
                "kvwarm.enabled: expected true or false, found None",
                "kvwarm.warm_eligible: expected true or false, found None",
            ],
        ),
        (
            WARM | {"skip_reason": "flag_off"},
            "single",
            ["kvwarm.skip_reason: expected null of an eligible warm-up, found 'flag_off'"],
        ),
        (
            WARM | {"skip_reason": ""},
            "single",
            ["kvwarm.skip_reason: expected null of an eligible warm-up, found ''"],
        ),
        (
            DENSE_SKIP | {"skip_reason": None},
            "single",
            ["kvwarm.skip_reason: expected the reason of a skipped warm-up, found None"],
        ),
        (
            DENSE_SKIP | {"skip_reason": ""},
            "single",
            ["kvwarm.skip_reason: expected the reason of a skipped warm-up, found ''"],
        ),
        (
            WARM | {"enabled": False},
            "single",
            ["kvwarm.warm_eligible: expected false of a warm-up that is off, found true"],
        ),
    ],
)
def test_the_contract_of_a_decode_warm_up(kvwarm: dict[str, Any] | None, strategy: str, lines: list[str]):
    assert list(kvwarm_findings(kvwarm, "decode", strategy)) == lines
    assert list(kvwarm_findings(kvwarm, "prefill", strategy)) == []


FULL = {"type": "FullAttentionSpec", "sliding_window": None, "attention_chunk_size": None, "non_causal": False}


@pytest.mark.parametrize(
    ("groups", "grouped"),
    [
        ([FULL], False),
        ([{"type": "FullAttentionSpec"}], False),
        ([{"type": "MLAAttentionSpec"}], False),
        ([{"type": "UniformTypeKVCacheSpecs", "specs": [FULL, FULL]}], False),
        ([{"type": "UniformTypeKVCacheSpecs"}], False),
        ([FULL, {"type": "SlidingWindowSpec", "sliding_window": 512}], True),
        ([FULL | {"sliding_window": 512}], True),
        ([FULL | {"attention_chunk_size": 8192}], True),
        ([{"type": "UniformTypeKVCacheSpecs", "specs": [FULL, {"type": "MambaSpec"}]}], True),
        ([FULL, {"type": "MambaSpec"}], True),
        (None, False),
    ],
)
def test_a_grouped_cache_has_groups_that_do_not_keep_every_token(groups: list[dict[str, Any]] | None, grouped: bool):
    assert grouped_cache({"kv_cache": {"groups": groups}}) is grouped


# Properties over every case that the rules can tell apart, and some that they cannot.

NATIVE = [None, *STAMPED, *UNSTAMPED, "skip:moe_tp_balanced_by_construction", "something new"]
BLOCKS = st.none() | st.fixed_dictionaries(
    {
        "enabled": st.booleans(),
        "warm_eligible": st.booleans(),
        "skip_reason": st.sampled_from(
            [None, "flag_off", "dense_model_content_insensitive", "moe_tp_balanced_by_construction", "dataset_empty"]
        ),
    }
)
CASES = st.builds(
    Case,
    phase=st.sampled_from(["prefill", "decode"]),
    kv_read_tokens=st.sampled_from([0, 1, 128]),
    stamps=st.frozensets(st.sampled_from([*SEED_STAMPS, "explicit"])),
    kvwarm=BLOCKS,
    config_bound=st.booleans(),
    native_regime=st.sampled_from(NATIVE),
    dense_policy=st.booleans(),
    grouped_cache=st.booleans(),
)
LABELS = {"n/a", "legacy", "real_kv", "fake_fallback", "skip:moe_tp_balanced_by_construction", DENSE}


def label_of(case: Case, **how: bool) -> str | None:
    try:
        return formal_regime(case, **how)
    except ValueError:
        return None


@given(CASES)
def test_every_case_has_one_label_or_is_refused(case: Case):
    assert label_of(case) in LABELS | {None}
    assert label_of(case) == label_of(case)


@given(CASES)
def test_nothing_is_real_without_a_real_stamp(case: Case):
    if label_of(case) == "real_kv":
        assert {"kvwarm_real_kv", "prefill_real_seed"} & case.stamps


@given(CASES)
def test_nothing_is_dense_unless_the_policy_holds_and_the_row_says_so(case: Case):
    if label_of(case) == DENSE:
        assert case.dense_policy
        assert case.phase == "decode"
        assert "kvwarm_fake_fallback" in case.stamps or case.native_regime == DENSE
        assert not case.config_bound


@given(CASES)
def test_the_dense_policy_changes_fallbacks_alone(case: Case):
    without, holds = label_of(case._replace(dense_policy=False)), label_of(case._replace(dense_policy=True))
    assert holds == without or (without, holds) == ("fake_fallback", DENSE)
    assert label_of(case, dense_synthetic_kv=False) == without


@given(CASES)
def test_a_config_bound_row_that_reads_a_cache_is_real_or_refused(case: Case):
    if case.config_bound and (case.phase == "decode" or case.kv_read_tokens):
        assert label_of(case) in ("real_kv", None)


@given(CASES)
def test_a_prefill_of_another_model_is_not_applicable_or_refused(case: Case):
    if case.phase == "prefill" and not case.config_bound:
        assert label_of(case) in ("n/a", None)
