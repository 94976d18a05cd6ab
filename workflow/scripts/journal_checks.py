"""What a measured cell says of itself, against its journal: everything that can be derived again is derived again."""

import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import pvariance
from typing import NamedTuple

import msgspec

from producer.adapters import adapter_of, pins_digest
from producer.artifact import assemble, contract_of, receipt
from producer.contracts import DYNAMO, Contract
from producer.journal import Journal
from producer.partition import RequestShape, request_shapes
from producer.record import check_producer_record
from producer.session import kv_seed_regime, prompts_of, repetition_requests
from producer.tokens import TokenStream
from schemas.canonical import digest, read_bytes, sha256
from schemas.errors import Refusal
from schemas.journal import RankPoint
from schemas.native import CellReceipt, RankArtifact, ScheduledRequests, struct_bytes
from schemas.plan import FrozenCell
from schemas.points import DecodePoint, Point

from merge_ranks import Ranks
from rank_checks import same
from session_checks import check_sessions

NOT_DERIVED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError)
"""What a journal raises that is no journal of its cell: its blocks are plain mappings, and anything may be in them."""


class MeasuredCell(NamedTuple):
    """The native files of a cell that we measured, read."""

    folder: Path
    cell: FrozenCell
    receipt: CellReceipt
    journal: Journal
    ranks: Ranks


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


def counts(requests: list[tuple[int, int, int]]) -> ScheduledRequests:
    """What the engine's scheduler counts in a step of requests (prompt, computed before, scheduled in it)."""
    prefill = [(prompt, computed, scheduled) for prompt, computed, scheduled in requests if computed < prompt]
    contexts = [computed for prompt, computed, _ in requests if computed >= prompt]
    return ScheduledRequests(
        num_prefill_requests=len(prefill),
        sum_prefill_tokens=sum(scheduled for _, _, scheduled in prefill),
        var_prefill_length=float(pvariance(prompt for prompt, _, _ in prefill)) if prefill else 0.0,
        sum_prefill_kv_tokens=sum(computed for _, computed, _ in prefill),
        num_decode_requests=len(contexts),
        sum_decode_kv_tokens=sum(contexts),
        var_decode_kv_tokens=float(pvariance(contexts)) if contexts else 0.0,
    )


def differences(expected: ScheduledRequests, found: ScheduledRequests) -> str:
    """The counts that differ, in words; variances to the last bits that their way of adding up leaves open."""
    return ", ".join(
        f"{field} expected {want}, found {have}"
        for field in expected.__struct_fields__
        if not math.isclose(want := getattr(expected, field), have := getattr(found, field), rel_tol=1e-9)
    )


def check_repetitions(where: str, line: RankPoint, point: Point, shapes: tuple[RequestShape, ...]) -> Iterator[str]:
    """Every step that is recorded, not only the kept one: the point's counts, in order, none twice."""
    decode = isinstance(point, DecodePoint)
    first = counts([(shape.prompt, shape.prefix, shape.new_tokens) for shape in shapes])
    # Decode: the prompt is one token short of the context, and the second step after it reads the whole context.
    measured = counts([(shape.prompt, shape.prompt + 1, 1) for shape in shapes]) if decode else first
    length = 3 if decode else 1
    basis = "inter_output" if decode else "schedule_to_output"
    forwards: list[tuple[int, int, str]] = []
    for span in line.warmups:
        forwards.append((span.forward_index_start, span.forward_index_end, f"{span.kind} span"))
        if span.kind != "eager_shape":
            continue
        if span.forward_index_end - span.forward_index_start != length:
            found_length = span.forward_index_end - span.forward_index_start
            yield f"{where} warm-up: expected {length} forwards, found {found_length}"
        for name, expected, found in (("first", first, span.first), ("last", measured, span.last)):
            if difference := differences(expected, found):
                yield f"{where} warm-up {name} step: {difference}"
    warm = max((span.forward_index_end for span in line.warmups if span.kind == "eager_shape"), default=0)
    last_end = 0.0
    for repetition in line.repetitions:
        name = f"{where} repetition {repetition.ordinal}"
        forwards.append((repetition.forward_index + 1 - length, repetition.forward_index + 1, name))
        if difference := differences(measured, repetition.scheduled_requests):
            yield f"{name} scheduled_requests: {difference}"
        if repetition.basis != basis:
            yield f"{name} basis: expected {basis}, found {repetition.basis}"
        if repetition.forward_index < warm:
            yield f"{name} forward_index: expected at least {warm}, found {repetition.forward_index}"
        if not last_end <= repetition.start_monotonic < repetition.end_monotonic < math.inf:
            found_interval = (repetition.start_monotonic, repetition.end_monotonic)
            yield f"{name} interval: expected to rise from {last_end}, found {found_interval}"
        elif not 0 <= repetition.overhead_seconds <= repetition.end_monotonic - repetition.start_monotonic:
            yield f"{name} overhead_seconds: expected a part of the interval, found {repetition.overhead_seconds}"
        last_end = repetition.end_monotonic
    indices = [repetition.forward_index for repetition in line.repetitions]
    if indices != sorted(indices):
        yield f"{where} forward_index: expected to rise, found {indices}"
    for (start, end, name), (next_start, _, next_name) in pairwise(sorted(forwards)):
        if not start < end <= next_start:
            yield f"{where} forwards: expected {name} [{start}, {end}) to end before {next_name} at {next_start}"


def check_seeding(files: MeasuredCell) -> Iterator[str]:
    """Every prefix that a point reads was computed before it by real requests, in the same engine start."""
    points = files.cell.points.points()
    longest: dict[tuple[int, int, int], int] = {}
    for line in files.journal.points:
        if not 1 <= line.benchmark_id <= len(points):
            continue
        shapes = request_shapes(points[line.benchmark_id - 1], files.cell.cache_hit_alignment_tokens)
        for rank, point in enumerate(line.ranks):
            for seed in point.seeds:
                if seed.cached_tokens + seed.computed_tokens != seed.prefix_tokens + 1:
                    ran = f"{seed.cached_tokens} cached and {seed.computed_tokens} computed"
                    wanted = f"{seed.prefix_tokens} tokens and one more"
                    yield f"benchmark_id={line.benchmark_id} seed of slot {seed.slot}: expected {wanted}, found {ran}"
                key = (line.session, rank, seed.slot)
                longest[key] = max(longest.get(key, 0), seed.prefix_tokens)
            for slot, shape in enumerate(shapes):
                if shape.prefix > longest.get((line.session, rank, slot), 0):
                    where = f"benchmark_id={line.benchmark_id} rank {rank} slot {slot}"
                    yield f"{where}: expected a seed of {shape.prefix} tokens before it, found none"


def check_point(
    cell: FrozenCell, contract: Contract, stream: TokenStream, where: str, line: RankPoint, point: Point
) -> Iterator[str]:
    """One rank's point ran as often as its contract says, with the prompts that its specification gives."""
    measurement = contract.measurement
    shapes = request_shapes(point, cell.cache_hit_alignment_tokens)
    warmups = sum(span.kind == "eager_shape" for span in line.warmups)
    for name, found, expected in (
        ("measurements", len(line.repetitions), measurement.measurement_repeats),
        ("warm-ups", len(line.warmup_ordinals), measurement.warmup_repeats),
        ("recorded warm-up spans", warmups, measurement.warmup_repeats),
    ):
        if found != expected:
            yield f"{where} {name}: expected {expected}, found {found}"
    if len(line.rejections) > contract.max_rejections:
        yield f"{where} rejections: expected at most {contract.max_rejections}, found {len(line.rejections)}"
    ordinals = [*line.warmup_ordinals, *(r.ordinal for r in line.repetitions)]
    ordinals += [rejection.ordinal for rejection in line.rejections]
    if sorted(ordinals) != list(range(len(ordinals))):
        yield f"{where} ordinals: expected each of 0..{len(ordinals) - 1} once, found {sorted(ordinals)}"
    yield from check_repetitions(where, line, point, shapes)
    for index, repetition in enumerate(line.repetitions):
        requests = repetition_requests(stream, cell.identity.phase, point, shapes, repetition.ordinal)
        derived = prompts_of(requests)
        if derived.sha256 != repetition.prompts_sha256:
            yield f"{where} repetition {repetition.ordinal}: prompts are not those of the specification"
        if index == 1 and derived != line.prompts:
            yield f"{where}: recorded prompts are not those of measurement 1"


def check_points(files: MeasuredCell, contract: Contract) -> Iterator[str]:
    """Every point of every rank, and what its ranks must have in common."""
    cell = files.cell
    points = cell.points.points()
    streams = [TokenStream(cell.identity.token_seed, cell.vocab_size, rank) for rank in range(files.journal.ranks)]
    for line in sorted(files.journal.points, key=lambda line: line.benchmark_id):
        where = f"benchmark_id={line.benchmark_id}"
        if not 1 <= line.benchmark_id <= len(points):
            yield f"{where}: expected 1..{len(points)}"
            continue
        point = points[line.benchmark_id - 1]
        if line.kv_seed_regime != kv_seed_regime(point):
            yield f"{where} kv_seed_regime: expected {kv_seed_regime(point)}, found {line.kv_seed_regime}"
        used = [[repetition.ordinal for repetition in rank.repetitions] for rank in line.ranks]
        if any(ordinals != used[0] for ordinals in used):
            yield f"{where} ordinals: expected the same repetitions on every rank, found {used}"
        for rank, (stream, own) in enumerate(zip(streams, line.ranks, strict=True)):
            which = where if len(streams) == 1 else f"{where} rank {rank}"
            yield from check_point(cell, contract, stream, which, own, point)


def check_engine(files: MeasuredCell) -> Iterator[str]:
    """The engine of every rank says of itself what the cell says of it."""
    yield from check_sessions(files.cell, files.journal)


def check_measured(files: MeasuredCell) -> Iterator[str]:
    """All checks of a measured cell; its points only under a contract that this checkout has."""
    for check in (check_identity, check_engine, check_derivation, check_seeding):
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
