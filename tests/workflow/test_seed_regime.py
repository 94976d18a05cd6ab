import pytest

from seed_regime import Case, formal_regime, stamp_conflict

WARM = {"enabled": True, "warm_eligible": True, "skip_reason": None}


@pytest.mark.parametrize(
    ("case", "label"),
    [
        (Case("prefill", 0, frozenset(), None), "n/a"),
        (Case("prefill", 128, frozenset({"prefill_real_seed"}), None), "n/a"),
        (Case("decode", 64, frozenset(), None), "legacy"),
        (Case("decode", 64, frozenset({"kvwarm_real_kv"}), WARM), "real_kv"),
        (Case("decode", 64, frozenset({"kvwarm_fake_fallback"}), WARM), "fake_fallback"),
        (Case("decode", 64, frozenset(), WARM | {"skip_reason": "flag_off"}), "fake_fallback"),
        (
            Case("decode", 64, frozenset(), WARM | {"skip_reason": "moe_tp_balanced_by_construction"}),
            "skip:moe_tp_balanced_by_construction",
        ),
        (Case("decode", 64, frozenset(), WARM), "legacy"),
        (Case("prefill", 0, frozenset(), None, config_bound=True), "n/a"),
        (Case("prefill", 128, frozenset({"prefill_real_seed"}), None, config_bound=True), "real_kv"),
        (Case("decode", 64, frozenset({"kvwarm_real_kv"}), WARM, config_bound=True), "real_kv"),
    ],
)
def test_the_first_rule_that_matches_gives_the_label(case, label):
    assert formal_regime(case) == label


def test_a_real_stamp_under_a_skipped_configuration_is_a_contradiction():
    with pytest.raises(ValueError, match="expected no skip_reason, found flag_off"):
        formal_regime(Case("decode", 64, frozenset({"kvwarm_real_kv"}), WARM | {"skip_reason": "flag_off"}))


@pytest.mark.parametrize(
    ("case", "label"),
    [
        (Case("decode", 64, frozenset(), WARM, config_bound=True), "legacy"),
        (Case("decode", 64, frozenset({"kvwarm_fake_fallback"}), WARM, config_bound=True), "fake_fallback"),
        (Case("prefill", 128, frozenset({"prefill_fake_prefix"}), None, config_bound=True), "legacy"),
    ],
)
def test_a_config_bound_row_reads_real_tokens_or_is_refused(case, label):
    with pytest.raises(ValueError, match=f"expected real_kv, found {label}"):
        formal_regime(case)


@pytest.mark.parametrize(
    ("regime", "reasons", "agrees"),
    [
        ("real_kv", ["explicit", "kvwarm_real_kv"], True),
        ("real_kv", ["explicit"], False),
        ("real_kv", ["kvwarm_real_kv", "prefill_real_seed"], False),
        ("real_prefix", ["explicit", "prefill_real_seed"], True),
        ("not_applicable", ["explicit"], True),
        ("not_applicable", ["prefill_real_seed"], False),
        ("skip:flag_off", ["kvwarm_fake_fallback"], False),
    ],
)
def test_a_regime_and_its_stamps_agree(regime, reasons, agrees):
    assert (stamp_conflict(regime, reasons) is None) is agrees
