"""The mutation proof on a fixed sample: one mutant of each path and sort of change, and each table entry's own."""

from itertools import islice
from pathlib import Path

import pytest
from conftest import cell_folder
from mutants import mutants
from mutation import (
    MINIMUM,
    Row,
    Target,
    document_of,
    imported_targets,
    judge,
    kind_of,
    run,
    sample_targets,
    share,
    unexplained,
)
from mutation_benches import JOURNAL, MeasuredBench
from mutation_table import ACCEPTED, OPEN, Accepted

TRIES = 80
"""Mutants of an entry and target that are tried before it counts as one that nothing needs."""

pytestmark = pytest.mark.demo


@pytest.fixture(scope="module")
def targets(smoke: Path, parallel: Path) -> list[Target]:
    return sample_targets(smoke / "cells", cell_folder(parallel, "decode-data"))


@pytest.fixture(scope="module")
def rows(targets: list[Target]) -> list[Row]:
    return run(targets, each=1)


def test_what_passes_is_in_a_table_with_its_reason(rows: list[Row]):
    assert unexplained(rows) == []


def test_hardly_anything_passes_that_was_forged_in_one_file(rows: list[Row]):
    """And of what does, each is in the table of what no second file witnesses."""
    for file in ("benchmark*.json", "merged.json", JOURNAL):
        refused, everything = share(row for row in rows if (row.file, row.forgery) == (file, "renewed"))
        assert refused >= MINIMUM * everything > 100


def passes(entry: Accepted, target: Target, workplace: Path) -> bool:
    """Whether one of an entry's first mutants of a target passes."""
    found = (mutant for mutant in mutants(document_of(target, workplace)) if entry.concerns(mutant))
    for mutant in islice(sorted(found, key=lambda mutant: mutant.rank), TRIES):
        outcome = judge(target, workplace, mutant).outcome
        row = Row(entry.file, entry.forgery, mutant.pattern, mutant.sort, outcome, 1, (mutant.kind,), "")
        if row.passed and entry.covers(row):
            return True
    return False


def test_every_entry_of_the_tables_is_needed(targets: list[Target], rows: list[Row], tmp_path: Path):
    every = [*targets, *(target for target in imported_targets() if target not in targets)]
    unneeded = [
        entry.paths
        for entry in (*ACCEPTED, *OPEN)
        if not any(row.passed and entry.covers(row) for row in rows)
        and not any(
            passes(entry, target, tmp_path)
            for target in every
            if (kind_of(target.file), target.forgery) == (entry.file, entry.forgery)
        )
    ]
    assert unneeded == []


@pytest.fixture
def bench(parallel: Path, tmp_path: Path) -> MeasuredBench:
    return MeasuredBench(cell_folder(parallel, "decode-data"), tmp_path)


FILES = ("cell.json", JOURNAL, "benchmark.json", "benchmark_dp1.json", "receipt.json", "merged.json", "evidence.json")


@pytest.mark.parametrize("file", FILES)
def test_a_file_that_is_missing_empty_or_torn_is_refused(bench: MeasuredBench, file: str):
    whole = bench.files[file]
    for data in (None, b"", whole[: len(whole) // 2]):
        assert bench.judge_files({file: data}).outcome == "refused", data


def test_files_of_two_ranks_that_are_swapped_or_the_same_are_refused(bench: MeasuredBench):
    first, second = bench.files["benchmark.json"], bench.files["benchmark_dp1.json"]
    for data in ((second, first), (first, first), (second, second)):
        judged = bench.judge_files(dict(zip(("benchmark.json", "benchmark_dp1.json"), data, strict=True)))
        assert judged.outcome == "refused"


@pytest.mark.parametrize("file", FILES)
def test_a_file_of_another_cell_is_refused(bench: MeasuredBench, parallel: Path, file: str):
    other = cell_folder(parallel, "prefill-data") / file
    assert bench.judge_files({file: other.read_bytes()}).outcome == "refused"
