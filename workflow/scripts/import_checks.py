"""What must hold of an imported cell: it is what was asked for, and its artifacts witness each other."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from producer.artifact import contract_of
from producer.contracts import DYNAMO
from schemas.canonical import digest
from schemas.errors import Refusal
from schemas.native import NativePoint, RankArtifact
from schemas.plan import FrozenCell
from schemas.points import DecodePoint, Point, partition_block, rows_block

import dynamo_evidence

Coordinate = tuple[str, int, int, int, str]
"""Phase, requests, new tokens, tokens read, and the digest of how the totals are split."""


def recorded(point: NativePoint) -> Coordinate:
    split = digest([point.partition, point.rows])
    return point.point_type, point.batch_size, point.total_prefill_tokens, point.total_kv_read_tokens, split


def expected(point: Point) -> Coordinate:
    """Where a point is recorded. Plans have no context of one token, which Dynamo would record as two."""
    split = digest([partition_block(point), rows_block(point)])
    if isinstance(point, DecodePoint):
        return "decode", point.batch_size, 0, point.total_kv_read_tokens, split
    return "prefill", point.batch_size, point.total_prefill_tokens, point.total_kv_read_tokens, split


def check_coverage(cell: FrozenCell, artifact: RankArtifact) -> Iterator[str]:
    """The cell's points, each once; one that was measured at other tokens than asked for is stamped so."""
    asked = Counter(expected(point) for point in cell.points.points())
    found: Counter[Coordinate] = Counter()
    for row in artifact.results:
        point = row.point
        where = recorded(point)
        if "giant_fake_off_by_batch" in point.sample_reasons:
            where = (*where[:3], where[3] + point.batch_size, where[4])
        found[where] += 1
    for sign, differing in (("missing", asked - found), ("not asked for", found - asked)):
        for where, count in sorted(differing.items()):
            phase, batch, new, read, _ = where
            yield f"points: {count} {sign}: {phase}, batch {batch}, {new} new tokens, {read} read"


def check_imported(cell: FrozenCell, artifacts: Sequence[RankArtifact], folder: Path) -> Iterator[str]:
    """All checks of an imported cell."""
    try:
        contract = contract_of(cell, folder)
    except Refusal as refusal:
        yield str(refusal)
        return
    if contract != DYNAMO:
        yield f"contract: expected {DYNAMO.name}, found {contract.name}: imported artifacts prove no other"
    yield from check_coverage(cell, artifacts[0])
    yield from dynamo_evidence.failures(cell, artifacts)


def gaps_of_imported(cell: FrozenCell, artifacts: Sequence[RankArtifact]) -> Iterator[str]:
    """What the artifacts do not establish; reported, never a reason to refuse."""
    yield from dynamo_evidence.gaps(cell, artifacts)
