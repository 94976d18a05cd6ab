"""The mutation proof of the import on the engine's real records; PASSGRID_PROBE_MUTANTS=all takes all leaves of all.

A leaf is bound when nothing else of its type, nothing of another type, and no removal or repetition imports.
"""

import os

import pytest
from probe_mutants import (
    FIXTURES,
    Outcome,
    absent_fields,
    figures,
    launches,
    other_phase,
    pattern,
    places,
    prove,
    record_mutants,
    unexplained,
    unneeded,
)

from schemas.observation import ProbeRecord

from probe_checks import diagnose

WHOLE = ("dense", "hybrid")
"""Records that are tried leaf by leaf; of the others each place has one leaf of its own here."""
ALL = os.environ.get("PASSGRID_PROBE_MUTANTS") == "all"
BOUND = 0.98


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    if ALL:
        return prove(launches(), each=0)
    return [*prove(WHOLE, each=0), *prove(launches().keys() - set(WHOLE), each=1)]


def test_every_real_record_is_tried():
    assert set(launches()) == {file.stem for file in FIXTURES.glob("*.json")}


@pytest.mark.parametrize("name", sorted(file.stem for file in FIXTURES.glob("*.json")))
def test_the_records_import_as_they_are(name: str):
    """Otherwise every mutant would be refused, and the proof would say nothing; also as a campaign of one phase."""
    request, deployment, record, original = launches()[name]
    assert diagnose(request, deployment, [original, other_phase(original)]) == []
    alone = deployment.model_copy(update={"worker_type": record["phase"]})
    assert diagnose(request, alone, [original]) == []


def test_no_mutant_ends_the_import_otherwise_than_with_a_reason(outcomes: list[Outcome]):
    assert [outcome for outcome in outcomes if "crashed" in (outcome.alone, outcome.both)] == []


def test_what_passes_is_in_the_table_with_its_reason(outcomes: list[Outcome]):
    assert unexplained(outcomes) == []


def test_every_entry_of_the_table_is_needed(outcomes: list[Outcome]):
    assert unneeded(outcomes) == []


def test_hardly_a_leaf_is_free(outcomes: list[Outcome]):
    """Beside a second phase's record, and on whole records: a sample has each free place and few of the others."""
    whole = [each for each in figures(outcomes) if each.launch in WHOLE or ALL]
    assert {each.launch for each in whole} >= set(WHOLE)
    for each in whole:
        assert each.leaves == sum(leaf for _, leaf in places(launches()[each.launch].record)) > 100
        assert each.bound >= BOUND * each.leaves, each


def test_a_mutant_of_every_sort_is_made_of_every_leaf():
    """What the proof tries of one integer, and of a field that the record does not have."""
    record = launches()["dense"].record
    place = ("workers", 0, "cache", "num_blocks")
    kinds = {mutant.kind for mutant in record_mutants(record, 0) if mutant.path == place}
    assert kinds >= {"+1", "*2", "negated", "zero", "fraction", "whole float", "bool", "text", "null", "NaN", "removed"}
    added = {pattern(mutant.path) for mutant in absent_fields(record, ProbeRecord, record)}
    assert "workers[].cache.groups[].layer_specs{}.attention_chunk_size" in added
    assert "workers[].settings.recurrent" in added
