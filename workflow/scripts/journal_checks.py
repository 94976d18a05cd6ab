"""What a measured cell says of itself, against its journal: everything that can be derived again is derived again."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import UNSET

from producer.adapters import adapter_of, pins_digest
from producer.artifact import assemble, contract_of, receipt
from producer.contracts import DYNAMO, Contract
from producer.journal import Journal
from producer.partition import RequestShape, request_shapes
from producer.record import check_producer_record
from producer.seeding import execution_order
from producer.session import kv_seed_regime
from producer.tokens import TokenStream
from schemas.canonical import digest, read_bytes, sha256
from schemas.errors import Refusal
from schemas.journal import PointLine, RankPoint
from schemas.native import CellReceipt, RankArtifact, struct_bytes
from schemas.plan import FrozenCell
from schemas.points import Point

from launch_binding import Accepted, binding_findings
from merge_ranks import Ranks
from point_checks import check_point, check_rejections, check_seconds, check_seeds
from rank_checks import close, same
from seed_regime import kvwarm_findings
from session_checks import check_sessions

NOT_DERIVED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError)
"""What a journal raises that is no journal of its cell: its blocks are plain mappings, and anything may be in them."""


class MeasuredCell(NamedTuple):
    """The native files of a cell that we measured, read, and what its launches are bound to."""

    folder: Path
    cell: FrozenCell
    receipt: CellReceipt
    journal: Journal
    ranks: Ranks
    accepted: Accepted


def check_identity(files: MeasuredCell) -> Iterator[str]:
    """The files are this cell's, unchanged since the receipt, measured by the contract that the cell chose."""
    cell, identity = files.cell, files.cell.identity
    if files.folder.name != cell.name:
        yield f"cell name: expected {files.folder.name}, found {cell.name}"
    if identity.points_sha256 != digest(cell.points):
        yield f"points_sha256: expected {identity.points_sha256}, found {digest(cell.points)}"
    for name, expected in files.receipt.files.items():
        found = sha256(read_bytes(files.folder / name, name))
        if found != expected:
            yield f"sha256 of {name}: expected {expected} of the receipt, found {found}"
    adapter = adapter_of(identity.runtime_backend_version, files.folder)
    if identity.pins_sha256 != pins_digest(adapter):
        yield f"pins_sha256: expected {pins_digest(adapter)} of this checkout, found {identity.pins_sha256}"
    for session in files.journal.sessions:
        for difference in check_producer_record(session.producer, cell, adapter):
            yield f"session {session.session} {difference}"


def check_derivation(files: MeasuredCell) -> Iterator[str]:
    """The artifacts and the receipt are what their journal says: the same bytes."""
    digests = {"repetitions.jsonl": sha256(read_bytes(files.folder / "repetitions.jsonl", "repetitions.jsonl"))}
    for rank, (file, artifact) in enumerate(zip(files.ranks.files, files.ranks.artifacts, strict=True)):
        digests[file.name] = files.ranks.sha256[file.name]
        try:
            derived = struct_bytes(assemble(files.cell, files.journal, rank))
        except NOT_DERIVED as error:
            yield f"repetitions.jsonl rank {rank}: {type(error).__name__}: {error}"
            return
        if sha256(derived) != digests[file.name]:
            fields = list(differing(msgspec.json.decode(derived, type=RankArtifact), artifact))
            for field in fields or ["layout"]:
                yield f"{file.name} {field}: expected what repetitions.jsonl holds, found another value"
    try:
        expected = msgspec.json.decode(struct_bytes(receipt(files.cell, files.journal, digests)), type=CellReceipt)
    except NOT_DERIVED as error:
        yield f"repetitions.jsonl: {type(error).__name__}: {error}"
        return
    for field in differing(expected, files.receipt):
        yield f"receipt.json {field}: expected what repetitions.jsonl holds, found another value"


def differing(expected: msgspec.Struct, found: msgspec.Struct) -> Iterator[str]:
    """The fields in which two structs of one type differ."""
    for field in expected.__struct_fields__:
        if not same(getattr(expected, field), getattr(found, field)):
            yield field


def points_of(files: MeasuredCell) -> Iterator[tuple[PointLine, Point, tuple[RequestShape, ...]]]:
    """The lines of the journal in their order, with the points that they are of; without those of none."""
    points = files.cell.points.points()
    for line in files.journal.points:
        if 1 <= line.benchmark_id <= len(points):
            point = points[line.benchmark_id - 1]
            yield line, point, request_shapes(point, files.cell.cache_hit_alignment_tokens)


def label(line: PointLine, rank: int) -> str:
    """A rank's part of a line, in words."""
    return f"benchmark_id={line.benchmark_id}" + (f" rank {rank}" if len(line.ranks) > 1 else "")


def check_seeding(files: MeasuredCell) -> Iterator[str]:
    """Every prefix that a point reads was computed before it by real requests, in the same engine start."""
    budget = files.cell.identity.limits.max_num_tokens
    longest: dict[tuple[int, int, int], int] = {}
    attempts: dict[tuple[int, int], int] = {}
    for line, _, shapes in points_of(files):
        for rank, own in enumerate(line.ranks):
            engine = (line.session, rank)
            yield from check_seeds(label(line, rank), own, shapes, attempts.get(engine, 0), budget)
            for seed in own.seeds:
                attempts[engine] = seed.attempt
                longest[*engine, seed.slot] = max(longest.get((*engine, seed.slot), 0), seed.prefix_tokens)
            for slot, shape in enumerate(shapes):
                if shape.prefix > longest.get((*engine, slot), 0):
                    where = f"benchmark_id={line.benchmark_id} rank {rank} slot {slot}"
                    yield f"{where}: expected a seed of {shape.prefix} tokens before it, found none"


def check_course(files: MeasuredCell) -> Iterator[str]:
    """Points were run in the order of execution; forwards and seconds of each rank go on from line to line."""
    order = execution_order(files.cell.points.points(), files.cell.cache_hit_alignment_tokens)
    expected = [index + 1 for index in order][: len(files.journal.points)]
    found = [line.benchmark_id for line in files.journal.points]
    if expected != found:
        yield f"repetitions.jsonl points: expected the order of execution {expected}, found {found}"
    ends, session = [0] * files.journal.ranks, 0
    for line in files.journal.points:
        for rank, own in enumerate(line.ranks):
            starts = [span.forward_index_start for span in own.warmups]
            starts += [repetition.forward_index for repetition in own.repetitions]
            if min(starts, default=ends[rank]) < ends[rank]:
                yield f"{label(line, rank)} forwards: expected at least {ends[rank]}, found {min(starts)}"
            end = max((repetition.forward_index + 1 for repetition in own.repetitions), default=ends[rank])
            if own.steps != end - ends[rank]:
                wanted = f"{end - ends[rank]} since the point before it"
                yield f"{label(line, rank)} steps: expected {wanted}, found {own.steps}"
            # Rank 0 writes, and says so in its next line of the same engine start.
            writes = rank == 0 and line.session == session
            yield from check_seconds(label(line, rank), own, files.cell.identity.phase == "decode", writes)
            ends[rank] = end
        session = line.session


def check_clocks(files: MeasuredCell) -> Iterator[str]:
    """Points of one engine start ran one after another, by the clock of each rank's process.

    A line is written between its point's end and the next one's beginning, and the next line says how long that took.
    """
    for session in files.journal.sessions:
        lines = [line for line in files.journal.points if line.session == session.session]
        for rank in range(files.journal.ranks):
            ran = [(label(line, rank), line.ranks[rank]) for line in lines if line.ranks[rank].repetitions]
            for (_, before), (where, own) in pairwise(ran):
                yield from room_between(f"{where} seconds.writing and .warmup", before, own, 0.0)
            for (_, before), (where, own), (_, after) in zip(ran, ran[1:], ran[2:], strict=False):
                spent = own.seconds.get("wall", 0.0) + own.seconds.get("writing", 0.0)
                yield from room_between(f"{where} seconds.wall and .writing", before, after, spent)


def room_between(where: str, before: RankPoint, after: RankPoint, spent: float) -> Iterator[str]:
    """The measurements of two points leave room for the warm-up of the later one, its line, and what was `spent`."""
    room = after.repetitions[0].start_monotonic - before.repetitions[-1].end_monotonic
    needed = spent + after.seconds.get("writing", 0.0) + after.seconds.get("warmup", 0.0)
    if needed > room and not close(needed, room):
        yield f"{where}: expected at most {room} between the measurements around them, found {needed}"


def check_points(files: MeasuredCell, contract: Contract) -> Iterator[str]:
    """Every point of every rank, and what its ranks must have in common."""
    cell = files.cell
    streams = [TokenStream(cell.identity.token_seed, cell.vocab_size, rank) for rank in range(files.journal.ranks)]
    points = len(cell.points.points())
    for line in files.journal.points:
        if not 1 <= line.benchmark_id <= points:
            yield f"benchmark_id={line.benchmark_id}: expected 1..{points}"
    for line, point, shapes in sorted(points_of(files), key=lambda of: of[0].benchmark_id):
        where = f"benchmark_id={line.benchmark_id}"
        if line.kv_seed_regime != kv_seed_regime(point):
            yield f"{where} kv_seed_regime: expected {kv_seed_regime(point)}, found {line.kv_seed_regime}"
        yield from check_rejections(where, line.ranks, point, shapes)
        for rank, (stream, own) in enumerate(zip(streams, line.ranks, strict=True)):
            yield from check_point(cell, contract, stream, label(line, rank), own, point, shapes)


def check_measured(files: MeasuredCell) -> Iterator[str]:
    """All checks of a measured cell; its points only under a contract that this checkout has."""
    yield from check_identity(files)
    yield from check_sessions(files.cell, files.journal)
    yield from binding_findings(files.cell, files.accepted, files.journal)
    block, identity = files.ranks.artifacts[0].kvwarm, files.cell.identity
    yield from kvwarm_findings(None if block is UNSET else block, identity.phase, identity.parallel_strategy)
    for check in (check_derivation, check_course, check_clocks, check_seeding):
        yield from check(files)
    try:
        contract = contract_of(files.cell, files.folder)
    except Refusal as refusal:
        yield str(refusal)
        return
    if contract == DYNAMO:
        yield f"contract: expected that of a measured cell, found {contract.name}"
        return
    yield from check_points(files, contract)
