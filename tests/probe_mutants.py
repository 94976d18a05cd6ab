"""The mutation proof of the import: each leaf of a real probe record is changed, and what the import lets pass is free.

python tests/probe_mutants.py              all mutants of all real records, and the table of docs/mutation.md anew
python tests/probe_mutants.py --each 1     of each place of a record one leaf
python tests/probe_mutants.py --show       print what passes, leaf by leaf; write nothing
"""

import argparse
import contextlib
import functools
import json
import math
import sys
import time
import types
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "workflow" / "scripts"), str(ROOT / "tests")]

from mutants import NAMED, Mutant, mutants, pattern, replaced  # noqa: E402
from mutants import Path as Place  # noqa: E402

from producer.resolving import read_campaign, resolve  # noqa: E402
from schemas.canonical import canonical_bytes, parse  # noqa: E402
from schemas.errors import Refusal  # noqa: E402
from schemas.observation import ProbeRecord  # noqa: E402
from schemas.points import PHASES  # noqa: E402
from schemas.request import Request, ResolvedDeployment  # noqa: E402

from probe_checks import diagnose  # noqa: E402

FIXTURES = ROOT / "tests" / "fixtures" / "probes"
CAMPAIGNS = (
    ROOT / "config/campaigns/cpu-demo.yaml",
    ROOT / "config/campaigns/cpu-parallel.yaml",
    ROOT / "tests/campaigns/campaigns/cpu-probes.yaml",
)
REPORT = ROOT / "docs" / "mutation.md"
BEGIN, END = "<!-- measured: python tests/probe_mutants.py -->", "<!-- end of probe records -->"

Verdict = Literal["unread", "refused", "same", "passed", "crashed"]
"""`unread`: the schema refuses it. `same`: it reads another spelling of the same record."""
ADDED = "added"


PASSED = ("passed", "crashed")
PARTS = 8
"""Pieces of a record's mutants, for the pool."""


class Launch(NamedTuple):
    """A real record of a launch, as plain values and read, and what was asked for."""

    request: Request
    deployment: ResolvedDeployment
    record: dict[str, Any]
    original: ProbeRecord


class Outcome(NamedTuple):
    """What the import makes of one mutant: `alone` where no second phase is there, `both` beside an intact one."""

    launch: str
    place: Place
    kind: str
    alone: Verdict
    both: Verdict

    @property
    def pattern(self) -> str:
        return pattern(self.place)


class Figures(NamedTuple):
    """Of one record: its leaves, and how many of them are bound."""

    launch: str
    mutants: int
    leaves: int
    bound: int
    bound_alone: int


class Free(NamedTuple):
    """Places that nothing else in the records stands for, and why. `beside` says whether a second phase's record does:
    then the place is free in a campaign of one phase alone."""

    patterns: tuple[str, ...]
    beside: bool
    reason: str

    def covers(self, outcome: Outcome) -> bool:
        witnessed = self.beside and outcome.both in PASSED
        return outcome.alone != "crashed" and outcome.pattern in self.patterns and not witnessed


FREE: tuple[Free, ...] = (
    Free(
        ("workers", "workers[]", "schedulers", "schedulers[]"),
        False,
        "The order of the processes: each says which rank it is.",
    ),
    Free(
        ("workers[].cache.tensor_allocations", "workers[].cache.tensor_allocations[]"),
        True,
        "The order of the allocations: each names its layers.",
    ),
    Free(
        ("workers[].cache.layer_classes{}",),
        True,
        "What the engine made of the model, which the campaign has a digest of. Convolutions alone are told by it.",
    ),
    Free(
        ("workers[].cache.kernel_block_size_tokens[]",),
        True,
        "Null says what the group's own block says: no block is split.",
    ),
    Free(
        ("workers[].settings.attention_backends", "workers[].settings.attention_backends[]"),
        True,
        "The engine's choice for this device: no campaign names one.",
    ),
    Free(
        ("workers[].model.weights_bytes",),
        True,
        "More bytes than the config accounts for, while they fit: nothing else counts them.",
    ),
    Free(
        ("workers[].hardware.total_memory_bytes",),
        False,
        "Memory of a machine with a CPU engine: each has its own, and no file says how much. A GPU's is compared.",
    ),
)
"""Whatever else passes fails the proof, and so does an entry that nothing needs."""


@functools.cache
def launches() -> dict[str, Launch]:
    """The real records, by deployment."""
    found = {}
    with contextlib.chdir(ROOT):
        for file in CAMPAIGNS:
            request = resolve(read_campaign(file), file)
            for name, deployment in request.deployments.items():
                record = json.loads((FIXTURES / f"{name}.json").read_text())
                found[name] = Launch(request, deployment, record, parse(ProbeRecord, record, name))
    return found


def places(value: Any, place: Place = ()) -> Iterator[tuple[Place, bool]]:
    """Every place of a document, and whether it is a leaf: a value that holds no other."""
    parts = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    yield place, not parts
    for part, each in parts:
        yield from places(each, (*place, part))


def at(document: Any, place: Place) -> Any:
    return functools.reduce(lambda value, part: value[part], place, document)


def whole_floats(document: Any) -> Iterator[Mutant]:
    """Each integer as a float of the same value: the same number to JSON, and none to the schema."""
    for place, _ in places(document):
        if type(value := at(document, place)) is int:
            yield Mutant(place, "type", "whole float", replaced(document, place, float(value)))


SENTINELS = ("absent", "unresolved", "auto", "none")
"""Texts by which an observer or an engine says that there is no value, or that it is somebody else's choice."""


def sentinels(document: Any) -> Iterator[Mutant]:
    """Each leaf as a text that stands for no value: where one is expected, it is none."""
    for place, is_leaf in places(document):
        if not is_leaf or not place:
            continue
        value = at(document, place)
        for text in SENTINELS:
            if value != text:
                yield Mutant(place, "value", text, replaced(document, place, text))


VALUES = (1, 0.5, True, False, "x", [], [1], ["x"], [[1]], {}, {"x": 1})
"""For a field that a record does not have: some are of its type."""


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models that a field's values may be, or hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) in (Union, types.UnionType, tuple, dict) or hasattr(annotation, "__metadata__"):
        for argument in get_args(annotation):
            yield from _models(argument)


def _objects(value: Any, place: Place) -> Iterator[tuple[Place, dict[str, Any]]]:
    """The outermost objects of a value that are no mapping of names."""
    if isinstance(value, dict) and place[-1] not in NAMED:
        yield place, value
        return
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for part, each in parts:
        yield from _objects(each, (*place, part))


def absent_fields(document: Any, model: type[BaseModel], value: dict[str, Any], place: Place = ()) -> Iterator[Mutant]:
    """Each field that a record of the schema may have and this one has not, with a value."""
    for name, field in model.model_fields.items():
        if name not in value:
            for number, each in enumerate(VALUES):
                changed = replaced(document, place, value | {name: each})
                yield Mutant((*place, name), "structure", f"{ADDED} {number}", changed)
            continue
        for inner in _models(field.annotation):
            for below, each in _objects(value[name], (*place, name)):
                yield from absent_fields(document, inner, each, below)


def record_mutants(record: dict[str, Any], each: int) -> Iterator[Mutant]:
    """All mutants of a record, or those of the first few places of each pattern, in a fixed order."""
    if not each:
        chosen: Collection[Place] | None = None
    else:
        groups: dict[str, list[Place]] = {}
        for place, _ in places(record):
            groups.setdefault(pattern(place), []).append(place)
        chosen = {place for group in groups.values() for place in sorted(group, key=_rank)[:each]}
    yield from mutants(record, lambda place: chosen is None or place in chosen)
    for mutant in (*whole_floats(record), *sentinels(record)):
        if chosen is None or mutant.path in chosen:
            yield mutant
    for mutant in absent_fields(record, ProbeRecord, record):
        if chosen is None or mutant.path[:-1] in chosen:
            yield mutant


def _rank(place: Place) -> str:
    return sha256(str(place).encode()).hexdigest()


def other_phase(record: ProbeRecord) -> ProbeRecord:
    """An intact record of the other phase's launch."""
    attempt = "0" * len(record.attempt_id)

    def own(processes: Iterable[Any]) -> tuple[Any, ...]:
        return tuple(process.model_copy(update={"attempt_id": attempt}) for process in processes)

    return record.model_copy(
        update={
            "phase": next(phase for phase in PHASES if phase != record.phase),
            "attempt_id": attempt,
            "workers": own(record.workers),
            "schedulers": own(record.schedulers),
        }
    )


def judge(name: str, mutant: Mutant) -> Outcome:
    """What reading and the import say of a mutant."""
    request, deployment, _, original = launches()[name]
    document = mutant.document
    if mutant.kind == "NaN":
        document = replaced(document, mutant.path, math.nan)
    own = Outcome(name, mutant.path, mutant.kind, "unread", "unread")
    try:
        changed = parse(ProbeRecord, document, "mutant")
    except Refusal:
        return own
    if canonical_bytes(changed) == canonical_bytes(original):
        return own._replace(alone="same", both="same")
    one_phase = deployment.model_copy(update={"worker_type": original.phase})
    try:
        if diagnose(request, one_phase, [changed]):
            # And so it is beside another record: each record's findings are made on its own.
            return own._replace(alone="refused", both="refused")
        beside = diagnose(request, deployment, [changed, other_phase(original)])
    except Exception:
        return own._replace(alone="crashed", both="crashed")
    return own._replace(alone="passed", both="refused" if beside else "passed")


def judge_part(name: str, each: int, part: int, parts: int) -> list[Outcome]:
    """Every `parts`-th of the chosen mutants of a record, judged. What the schema does not take is no added field."""
    found = list(record_mutants(launches()[name].record, each))[part::parts]
    outcomes = [judge(name, mutant) for mutant in found]
    return [each for each in outcomes if not (each.kind.startswith(ADDED) and each.alone == "unread")]


def prove(names: Iterable[str], each: int) -> list[Outcome]:
    """All outcomes of the records, on two processes."""
    jobs = [(name, each, part, PARTS) for name in names for part in range(PARTS)]
    with ProcessPoolExecutor(2) as pool:
        return [outcome for outcomes in pool.map(judge_part, *zip(*jobs, strict=True)) for outcome in outcomes]


def figures(outcomes: Iterable[Outcome]) -> Iterator[Figures]:
    """A line for each record."""
    records: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        records.setdefault(outcome.launch, []).append(outcome)
    for name, found in records.items():
        leaves = {place for place, is_leaf in places(launches()[name].record) if is_leaf}
        tried = leaves & {outcome.place for outcome in found}
        free = {outcome.place for outcome in found if outcome.both in PASSED}
        alone = {outcome.place for outcome in found if outcome.alone in PASSED}
        yield Figures(name, len(found), len(tried), len(tried - free), len(tried - alone))


def unexplained(outcomes: Iterable[Outcome]) -> list[str]:
    """What passes and stands in no table, a line for each place."""
    kinds: dict[tuple[str, str, str], list[str]] = {}
    for outcome in outcomes:
        if outcome.alone in PASSED and not any(entry.covers(outcome) for entry in FREE):
            where = "both" if outcome.both in PASSED else "alone"
            kinds.setdefault((outcome.pattern, outcome.both, where), []).append(f"{outcome.launch}: {outcome.kind}")
    return [f"{' '.join(key)} ({', '.join(dict.fromkeys(found))})" for key, found in sorted(kinds.items())]


def unneeded(outcomes: Collection[Outcome]) -> list[Free]:
    """Entries of the table that no mutant needs."""
    return [entry for entry in FREE if not any(each.alone in PASSED and entry.covers(each) for each in outcomes)]


def table(outcomes: Collection[Outcome]) -> Iterator[str]:
    yield "| record | mutants | leaves | bound | of one phase alone |"
    yield "|---|---:|---:|---:|---:|"
    for line in figures(outcomes):
        shares = (f"{100 * bound / line.leaves:.2f} %" for bound in (line.bound, line.bound_alone))
        yield f"| {line.launch} | {line.mutants} | {line.leaves} | {' | '.join(shares)} |"


def explanations() -> Iterator[str]:
    yield "| place | free | why |"
    yield "|---|---|---|"
    for entry in FREE:
        where = "in a campaign of one phase" if entry.beside else "always"
        yield f"| {'<br>'.join(f'`{each}`' for each in entry.patterns)} | {where} | {entry.reason} |"


def write_report(outcomes: Collection[Outcome], each: int) -> None:
    """The measured part of the document."""
    page = REPORT.read_text()
    before, rest = page.split(BEGIN, 1)
    which = f"{each} of each place" if each else "all mutants"
    text = "\n\n".join([f"{len(outcomes)} mutants ({which}):", "\n".join(table(outcomes)), "\n".join(explanations())])
    REPORT.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END, 1)[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="*", help="deployments; default: all")
    parser.add_argument("--each", type=int, default=0, help="leaves of each place; 0: all")
    parser.add_argument("--show", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    began = time.monotonic()
    outcomes = prove(arguments.records or launches(), arguments.each)
    seconds = time.monotonic() - began
    print("\n".join(table(outcomes)))
    print(f"{len(outcomes)} mutants, {seconds:.0f} s")
    for line in unexplained(outcomes):
        print(f"in no table: {line}")
    idle = [] if arguments.each or arguments.records else unneeded(outcomes)
    for entry in idle:
        print(f"needed by no mutant: {', '.join(entry.patterns)}")
    if not (arguments.show or arguments.records):
        write_report(outcomes, arguments.each)
    if unexplained(outcomes) or idle:
        sys.exit(1)


if __name__ == "__main__":
    main()
