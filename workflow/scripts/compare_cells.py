"""Whether two runs of a cell may be compared, point by point: what ran, on what and after what, never how fast.

A run is a cell's merged artifact. Two of one cell are comparable where they agree in every field of the tables below.
"""

from collections.abc import Callable, Iterator
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from schemas.canonical import digest, sha256, short
from schemas.merged import MergedArtifact
from schemas.native import BenchmarkMeasurement, IterationGroup
from schemas.plan import FrozenCell
from schemas.points import point_key

Result = Literal["mismatch", "unestablished", "comparable"]
PRECEDENCE: tuple[Result, ...] = ("mismatch", "unestablished", "comparable")
"""The first that any field gives is the point's."""

SHOWN_CHARACTERS = 60
ABSENT = "absent"


class CellRun(NamedTuple):
    """One run of a cell. The merged artifact holds the warm-up evidence of every rank."""

    cell: FrozenCell
    merged: MergedArtifact


class PointRun(NamedTuple):
    """One point of a run; the lists are by rank, `warmups` the digests of the warm-up records before the point."""

    group: IterationGroup
    regimes: list[str | None]
    measurements: list[BenchmarkMeasurement | UnsetType]
    warmups: list[str | None]


class ComparedPoint(NamedTuple):
    result: Result
    reasons: tuple[str, ...]


Run = TypeVar("Run")


class Field(NamedTuple, Generic[Run]):
    """What two runs must agree in, or with `differs` must not. `read` gives None where the artifact does not say.

    `of_cell`: it describes the whole cell, and two cells are expected to differ in it: that leaves a point
    unestablished, where of one cell it is a mismatch.
    """

    name: str
    read: Callable[[Run], Any]
    differs: bool = False
    of_cell: bool = False


def _engine(run: CellRun) -> Any:
    engine = run.merged.engine
    return None if engine is UNSET or any(key.startswith("capture_error") for key in engine) else engine


def _engine_value(block: str, key: str) -> Callable[[CellRun], Any]:
    return lambda run: ((_engine(run) or {}).get(block) or {}).get(key)


PLACES = ("forward_index_start", "forward_index_end")
UNCOMPARED_PROTOCOL = ("execution_evidence", "unobserved")
"""What an artifact says of its evidence, not of what it measured."""


def _protocol(run: CellRun) -> Any:
    if run.merged.measurement_protocol is UNSET:
        return None
    protocol = {key: value for key, value in run.merged.measurement_protocol.items() if key not in UNCOMPARED_PROTOCOL}
    if "producer" in protocol:  # which cell it was is a field of its own
        protocol["producer"] = {key: value for key, value in protocol["producer"].items() if key != "cell_digest"}
    return protocol


def _of_ranks(read: Callable[[BenchmarkMeasurement], Any]) -> Callable[[PointRun], Any]:
    """A value of each rank's measurement; None when any rank does not say."""

    def values(point: PointRun) -> Any:
        found = [None if measurement is UNSET else read(measurement) for measurement in point.measurements]
        return None if not found or any(value is None for value in found) else found

    return values


def _content(point: PointRun) -> Any:
    fields = ("point_type", "batch_size", "total_prefill_tokens", "total_kv_read_tokens", "partition", "rows")
    return {field: getattr(point.group.point, field) for field in fields}


def _prompts(measurement: BenchmarkMeasurement) -> Any:
    """Digests of the recorded repetition's prompts, and which repetition every sample is: it gives their prompts."""
    if measurement.prompts.status != "recorded":
        return None
    repetitions = [raw.benchmark_sample.repetition for raw in measurement.raw_fpms]
    return {
        "requests": measurement.prompts.requests,
        "repetitions": [number for number in repetitions if number is not UNSET],
    }


def _dispatch(measurement: BenchmarkMeasurement) -> Any:
    seen = [raw.benchmark_sample.cudagraph for raw in measurement.raw_fpms]
    return None if any(sample.status != "observed" for sample in seen) else seen


def _preparation(measurement: BenchmarkMeasurement) -> Any:
    preparation = msgspec.structs.asdict(measurement.preparation)
    del preparation["warmup_records_before"]  # with the records themselves
    return preparation


RUN_FIELDS: tuple[Field[CellRun], ...] = (
    Field("run id", lambda run: run.merged.run_id, differs=True),
    Field("cell digest", lambda run: run.cell.digest, of_cell=True),
    Field("backend version", _engine_value("versions", "vllm")),
    Field("async_scheduling", _engine_value("scheduler", "async_scheduling")),
    Field("engine", _engine),
    Field("measurement protocol", _protocol),
    Field("ranks", lambda run: run.merged.dp.get("ranks")),
)

POINT_FIELDS: tuple[Field[PointRun], ...] = (
    Field("point", _content),
    Field("point_key", _of_ranks(lambda measurement: measurement.point_key)),
    Field("kv_seed_regime", lambda point: None if None in point.regimes else point.regimes),
    Field("prompts", _of_ranks(_prompts)),
    Field("expected samples", _of_ranks(lambda measurement: measurement.expected_internal_samples)),
    Field("estimate", _of_ranks(lambda measurement: measurement.estimate)),
    Field("graph dispatch", _of_ranks(_dispatch)),
    Field("preparation", _of_ranks(_preparation), of_cell=True),
    Field("warm-up records before", lambda point: None if None in point.warmups else point.warmups, of_cell=True),
)


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return short(value) if len(value) == 64 else value
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"


def _equal(reference: Any, candidate: Any) -> bool:
    """As JSON: 1, 1.0 and true are three values."""
    return msgspec.json.encode(reference, order="sorted") == msgspec.json.encode(candidate, order="sorted")


def difference(reference: Any, candidate: Any, path: str = "") -> tuple[str, Any, Any]:
    """Path of the first leaf that differs between two plain values that do, and what stands there."""
    if isinstance(reference, dict) and isinstance(candidate, dict):
        for key in sorted(reference.keys() | candidate.keys()):
            one, other = reference.get(key, ABSENT), candidate.get(key, ABSENT)
            if not _equal(one, other):
                return difference(one, other, f"{path}.{key}")
    if isinstance(reference, list) and isinstance(candidate, list) and len(reference) == len(candidate):
        for index, (one, other) in enumerate(zip(reference, candidate, strict=True)):
            if not _equal(one, other):
                return difference(one, other, f"{path}[{index}]")
    return path, reference, candidate


def findings(
    fields: tuple[Field[Run], ...], reference: Run, candidate: Run, one_cell: bool
) -> Iterator[tuple[Result, str]]:
    """What keeps two runs from being comparable, with a reason for each field; nothing when they are."""
    for field in fields:
        one, other = field.read(reference), field.read(candidate)
        if one is None or other is None:
            silent = [name for name, value in (("reference", one), ("candidate", other)) if value is None]
            yield "unestablished", f"{field.name}: not recorded in {' and '.join(silent)}"
        elif field.differs:
            if _equal(one, other):
                yield "mismatch", f"{field.name}: {_shown(other)} in both"
        elif not _equal(one, other):
            path, one, other = difference(msgspec.to_builtins(one), msgspec.to_builtins(other))
            result: Result = "unestablished" if field.of_cell and not one_cell else "mismatch"
            yield result, f"{field.name}{path}: reference {_shown(one)}, candidate {_shown(other)}"


def _warmup_digests(run: CellRun) -> dict[int, list[str]]:
    """Rank -> digest of its first 0, 1, 2 ... warm-up records; without a rank whose records nobody has.

    Their places among the rank's forwards are left out: a rejected repetition moves all later ones, and says nothing of
    what a record's own forwards were.
    """
    evidence = {} if run.merged.rank_warmup_evidence is UNSET else run.merged.rank_warmup_evidence
    digests = {}
    for rank, ledger in evidence.items():
        if ledger.get("status") != "recorded":
            continue
        chain = [sha256(b"")]
        for record in ledger["records"]:
            kept = {key: value for key, value in record.items() if key not in PLACES}
            chain.append(digest([chain[-1], kept]))
        digests[int(rank)] = chain
    return digests


def points_of(run: CellRun) -> dict[int, PointRun]:
    """The points of a run by id, each with what its ranks recorded."""
    digests = _warmup_digests(run)
    regimes: dict[int, list[str | None]] = {}
    for row in run.merged.results:  # by id, then rank
        regimes.setdefault(row.point.benchmark_id, []).append(row.kv_seed_regime)
    points = {}
    for group in run.merged.iteration_groups:
        measurements = [result.fpms[0].benchmark_measurement for result in group.rank_results]
        warmups = []
        for result, measurement in zip(group.rank_results, measurements, strict=True):
            before = None if measurement is UNSET else measurement.preparation.warmup_records_before
            chain = digests.get(result.dp_rank, [])
            warmups.append(chain[before] if before is not None and 0 <= before < len(chain) else None)
        regime = regimes.get(group.benchmark_id, [])
        points[group.benchmark_id] = PointRun(group, regime, measurements, warmups)
    return points


def paired_ids(reference: FrozenCell, candidate: FrozenCell) -> list[int | None]:
    """The id in the reference of every point of the candidate; None of one that it has not.

    Of one cell the points are the same by their place, of two cells by what they are.
    """
    points = candidate.points.points()
    if reference.digest == candidate.digest:
        return list(range(1, len(points) + 1))
    ids: dict[str, int] = {}
    for number, point in enumerate(reference.points.points(), 1):
        ids.setdefault(point_key(reference.identity.phase, point), number)
    return [ids.get(point_key(candidate.identity.phase, point)) for point in points]


def compare(reference: CellRun, candidate: CellRun) -> list[ComparedPoint]:
    """Every point of the candidate against the same point of the reference."""
    one_cell = reference.cell.digest == candidate.cell.digest
    of_runs = list(findings(RUN_FIELDS, reference, candidate, one_cell))
    references, candidates = points_of(reference), points_of(candidate)
    compared = []
    for number, reference_id in enumerate(paired_ids(reference.cell, candidate.cell), 1):
        one, other = references.get(reference_id or 0), candidates.get(number)
        if one is None or other is None:
            silent = "candidate" if one else "reference"
            found: list[tuple[Result, str]] = [("unestablished", f"point: not in {silent}")]
        else:
            found = list(findings(POINT_FIELDS, one, other, one_cell))
        results = {result for result, _ in of_runs + found} | {"comparable"}
        compared.append(
            ComparedPoint(
                result=next(result for result in PRECEDENCE if result in results),
                reasons=tuple(reason for _, reason in of_runs + found),
            )
        )
    return compared
