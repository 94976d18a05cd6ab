"""The mutation proof: mutants of real files go through the judges, and what these let pass is counted.

python tests/mutation.py              all mutants of all cells, and the tables of docs/mutation.md anew
python tests/mutation.py --each 2     of each path and sort of change the first two (in a fixed order)
"""

import argparse
import functools
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "workflow" / "scripts"), str(ROOT / "tests")]

from mutants import Mutant, Sort, mutants  # noqa: E402
from mutation_benches import JOURNAL, Forgery, ImportedBench, Judged, MeasuredBench, Outcome  # noqa: E402
from mutation_table import ACCEPTED, OPEN, Accepted  # noqa: E402
from native_samples import ONE_PHASE, one_phase, sample  # noqa: E402

from schemas.layout import rank_file  # noqa: E402

REPORT = ROOT / "docs" / "mutation.md"
BEGIN, END = "<!-- measured: make mutate -->", "<!-- end -->"
DYNAMO = "Dynamo's artifact"
SAMPLES = (*ONE_PHASE, *(f"{name}:{phase}" for name in ("d17_full_moe_agg",) for phase in ("prefill", "decode")))
PARTS = 16
"""Pieces of one target, for the pool."""

DIGESTED = {JOURNAL, "merged.json", *map(rank_file, range(2))}
"""Files whose digest stands in another."""

PLAIN = 200
"""Mutants of a file whose digest the forger leaves alone."""

MINIMUM = 0.99
"""Part of the mutants that must be refused or change the verdict: of forged files and of Dynamo's artifacts."""


class Target(NamedTuple):
    """One file of one cell, and how far its forger goes; an imported artifact is named by its sample."""

    source: str
    file: str
    forgery: Forgery


class Row(NamedTuple):
    """Mutants of one path pattern and sort that came to one outcome; the words of one of them."""

    file: str
    forgery: Forgery
    pattern: str
    sort: Sort
    outcome: Outcome
    mutants: int
    kinds: tuple[str, ...]
    words: str

    @property
    def passed(self) -> bool:
        """Whether the judges let them pass for what they are not, or broke."""
        return self.outcome in ("survived", "rows", "crashed")


def measured_targets(cell: Path) -> Iterator[Target]:
    """The files of a measured cell; those of further ranks count as artifacts."""
    artifacts = sorted(file.name for file in cell.glob("benchmark*.json"))
    for file in ("cell.json", "receipt.json", *artifacts, "merged.json", "evidence.json", JOURNAL):
        yield Target(str(cell), file, "plain")
        if file in DIGESTED:
            yield Target(str(cell), file, "renewed")
    yield Target(str(cell), JOURNAL, "derived")


def imported_targets(samples: Iterable[str] = SAMPLES) -> list[Target]:
    return [Target(name, DYNAMO, "derived") for name in samples]


@functools.cache
def bench_of(source: str, workplace: Path) -> MeasuredBench | ImportedBench:
    folder = workplace / f"{os.getpid()}-{Path(source).name.replace(':', '-')}"
    if "/" in source:
        return MeasuredBench(Path(source), folder)
    name, _, phase = source.partition(":")
    return ImportedBench(one_phase(name, phase) if phase else sample(name), folder)


def chosen(found: Iterable[Mutant], each: int) -> list[Mutant]:
    """All mutants, or of each pattern and sort the first few, in an order that no place has a say in."""
    if not each:
        return list(found)
    groups: dict[tuple[str, str], list[Mutant]] = {}
    for mutant in found:
        groups.setdefault((mutant.pattern, mutant.sort), []).append(mutant)
    return [mutant for group in groups.values() for mutant in sorted(group, key=lambda each: each.rank)[:each]]


def wanted(target: Target, mutant: Mutant) -> bool:
    """Whether a mutant is one: a chain that the forger renews is none, and a journal is lines, whatever they hold."""
    if target.file != JOURNAL:
        return True
    renewed = target.forgery != "plain" and mutant.path[-1:] == ("previous_sha256",)
    return not renewed and (bool(mutant.path) or isinstance(mutant.document, list))


def judge(target: Target, workplace: Path, mutant: Mutant) -> Judged:
    bench = bench_of(target.source, workplace)
    if isinstance(bench, ImportedBench):
        return bench.judge(mutant.document)
    return bench.judge(target.file, target.forgery, mutant.document)


def document_of(target: Target, workplace: Path) -> object:
    bench = bench_of(target.source, workplace)
    return bench.artifact if isinstance(bench, ImportedBench) else bench.document(target.file)


def judge_part(target: Target, workplace: Path, part: int, parts: int, each: int) -> list[Row]:
    """Every `parts`-th of the chosen mutants of a target, judged."""
    found = (mutant for mutant in mutants(document_of(target, workplace)) if wanted(target, mutant))
    counts: Counter[tuple[str, Sort, Outcome]] = Counter()
    kinds: dict[tuple[str, Sort, Outcome], set[str]] = {}
    words: dict[tuple[str, Sort, Outcome], str] = {}
    judged_ones = chosen(found, each)
    if target.forgery == "plain" and target.file in DIGESTED:  # a digest catches them, whatever they are
        judged_ones = sorted(judged_ones, key=lambda mutant: mutant.rank)[:PLAIN]
    for mutant in judged_ones[part::parts]:
        judged = judge(target, workplace, mutant)
        key = mutant.pattern, mutant.sort, judged.outcome
        counts[key] += 1
        kinds.setdefault(key, set()).add(mutant.kind)
        words.setdefault(key, judged.words)
    return [
        Row(kind_of(target.file), target.forgery, *key, count, tuple(sorted(kinds[key])), words[key])
        for key, count in counts.items()
    ]


def kind_of(file: str) -> str:
    return "benchmark*.json" if file.startswith("benchmark") else file


def added(rows: Iterable[Row]) -> list[Row]:
    """Rows of one pattern, sort and outcome as one."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(row[:5], []).append(row)
    return [
        group[0]._replace(
            mutants=sum(row.mutants for row in group),
            kinds=tuple(sorted({kind for row in group for kind in row.kinds})),
        )
        for group in groups.values()
    ]


def run(targets: Sequence[Target], each: int, talk: bool = False) -> list[Row]:
    """All targets, on two processes; a sampled one is cheaper to judge than to cut in pieces."""
    parts = 2 if each else PARTS
    memory = Path("/dev/shm")
    with (
        tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as workplace,
        ProcessPoolExecutor(2) as pool,
    ):
        jobs = {
            pool.submit(judge_part, target, Path(workplace), part, parts, each): target
            for target in targets
            for part in range(parts)
        }
        rows: list[Row] = []
        began = time.monotonic()
        for number, job in enumerate(as_completed(jobs), start=1):
            rows = added([*rows, *job.result()])
            if talk and (number % parts == 0 or number == len(jobs)):
                done = sum(row.mutants for row in rows)
                seconds = time.monotonic() - began
                print(f"{number} of {len(jobs)} parts, {done} mutants, {seconds:.0f} s", file=sys.stderr, flush=True)
    return sorted(rows)


def unexplained(rows: Iterable[Row]) -> list[str]:
    """What passed the judges and stands in no table, a line each."""
    return [
        f"{row.file} {row.forgery} {row.pattern} ({row.sort}: {', '.join(row.kinds)}): {row.outcome} {row.words}"
        for row in rows
        if row.passed and not any(entry.covers(row) for entry in (*ACCEPTED, *OPEN))
    ]


def unneeded(rows: Sequence[Row]) -> list[Accepted]:
    """Entries of the tables that no mutant needs."""
    return [entry for entry in (*ACCEPTED, *OPEN) if not any(row.passed and entry.covers(row) for row in rows)]


def share(rows: Iterable[Row]) -> tuple[int, int]:
    """Mutants that were refused or changed the verdict, and all of them."""
    rows = list(rows)
    return sum(row.mutants for row in rows if not row.passed), sum(row.mutants for row in rows)


def figures(rows: Sequence[Row]) -> Iterator[str]:
    """A line for each kind of file and forgery."""
    yield "| file | forgery | mutants | value | type | structure | refused or another verdict | crashed |"
    yield "|---|---|---:|---:|---:|---:|---:|---:|"
    for file, forgery in sorted({(row.file, row.forgery) for row in rows}):
        of = [row for row in rows if (row.file, row.forgery) == (file, forgery)]
        caught, everything = share(of)
        crashed = sum(row.mutants for row in of if row.outcome == "crashed")
        parts = []
        for sort in ("value", "type", "structure"):
            some, total = share(row for row in of if row.sort == sort)
            parts.append(f"{100 * some / total:.2f} %" if total else "")
        whole = f"{100 * caught / everything:.2f} %"
        yield f"| {file} | {forgery} | {everything} | {' | '.join(parts)} | {whole} | {crashed} |"


def explanations(rows: Sequence[Row], entries: Iterable[Accepted]) -> Iterator[str]:
    """A line for each entry of a table that a mutant needs."""
    yield "| file | forgery | path | mutants that pass | why |"
    yield "|---|---|---|---:|---|"
    for entry in entries:
        count = sum(row.mutants for row in rows if row.passed and entry.covers(row))
        paths = "<br>".join(f"`{path}`" for path in entry.paths)
        yield f"| {entry.file} | {entry.forgery} | {paths} | {count} | {entry.reason} |"


def cells() -> list[Path]:
    """The measured cells: the demo's smoke cells, and the two ranks of the parallel campaign."""
    smoke = sorted((ROOT / "results/cpu-demo/smoke/cells").glob("*-*"))
    return [*smoke, *sorted((ROOT / "results/cpu-parallel/cells").glob("decode-data-*"))]


def sample_targets(smoke: Path, two_ranks: Path) -> list[Target]:
    """Each kind of file and forgery, of both phases, a recurrent layout and two ranks among them."""
    (decode,), (prefill,) = smoke.glob("decode-dense-*"), smoke.glob("prefill-hybrid-*")
    return [
        Target(str(decode), "cell.json", "plain"),
        Target(str(prefill), "receipt.json", "plain"),
        Target(str(prefill), "evidence.json", "plain"),
        Target(str(decode), "benchmark.json", "plain"),
        Target(str(decode), "benchmark.json", "renewed"),
        Target(str(two_ranks), "benchmark_dp1.json", "renewed"),
        Target(str(prefill), "merged.json", "plain"),
        Target(str(prefill), "merged.json", "renewed"),
        Target(str(decode), JOURNAL, "plain"),
        Target(str(decode), JOURNAL, "renewed"),
        Target(str(prefill), JOURNAL, "derived"),
        Target(str(two_ranks), JOURNAL, "derived"),
        *imported_targets(["d17_moe_swa_native_decode", "d161_dense_decode_median", "d17_rows_v3_realseed_prefill"]),
    ]


def write_report(text: str) -> None:
    """The measured part of the document."""
    page = REPORT.read_text()
    before, rest = page.split(BEGIN, 1)
    REPORT.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END, 1)[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--each", type=int, default=0, help="mutants of each path and sort; 0: all")
    parser.add_argument("--sample", action="store_true", help="what the tests judge")
    parser.add_argument("--only", default="", help="targets with this text alone; writes nothing")
    parser.add_argument("--show", action="store_true", help="print what passes, path by path; write nothing")
    arguments = parser.parse_args()
    if len(cells()) != 7:
        sys.exit("the demo's smoke cells and the parallel campaign must be measured: make mutate does it")
    targets = [target for cell in cells() for target in measured_targets(cell)] + imported_targets()
    if arguments.sample:
        arguments.each, targets = 1, sample_targets(cells()[0].parent, cells()[-1])
    targets = [target for target in targets if arguments.only in " ".join(target)]
    rows = run(targets, arguments.each, talk=True)
    print("\n".join(figures(rows)))
    for line in unexplained(rows):
        print(f"in no table: {line}")
    idle = [] if arguments.each else unneeded(rows)  # a sample does not try every one
    for entry in idle:
        print(f"needed by no mutant: {entry.file} {entry.forgery} {', '.join(entry.paths)}")
    if arguments.show or arguments.only:
        return
    which = f"{len(targets)} files, {f'{arguments.each} of each path and sort' if arguments.each else 'all mutants'}:"
    tables = [which, "\n".join(figures(rows)), "## What passes, and why", "\n".join(explanations(rows, ACCEPTED))]
    if OPEN:
        tables += ["## What passes and could be checked", "\n".join(explanations(rows, OPEN))]
    write_report("\n\n".join(tables))
    if unexplained(rows) or idle:
        sys.exit(1)


if __name__ == "__main__":
    main()
