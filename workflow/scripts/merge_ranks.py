"""Merge the rank artifacts of a cell: all ranks agree, the slowest rank's time counts."""

import argparse
import mmap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from producer.contracts import DYNAMO
from schemas.canonical import read_model, sha256, write_atomic
from schemas.errors import Refusal, run
from schemas.imported import read_receipt
from schemas.merged import MergedArtifact, merged_bytes
from schemas.native import Coverage, RankArtifact, Row
from schemas.plan import FrozenCell

from rank_checks import (
    check_agreement,
    check_complete,
    check_groups,
    check_regimes,
    check_rows,
    engine_of_all,
)


class FurtherRank(RankArtifact, frozen=True, kw_only=True):
    """The artifact of a rank beside rank 0: the groups, which repeat every rank's records, are left as they stand."""

    iteration_groups: msgspec.Raw  # type: ignore[assignment]


class Groups(msgspec.Struct, frozen=True):
    """The groups of an artifact as they stand in its file; nothing else of it is decoded."""

    iteration_groups: msgspec.Raw


T = TypeVar("T", bound=msgspec.Struct)


def decode(data: bytes, cls: type[T], file: Path) -> T:
    """An artifact, or as much of it as `cls` has.

    Raises:
        Refusal: the field that is not as it should be.
    """
    try:
        return msgspec.json.decode(data, type=cls)
    except msgspec.MsgspecError as error:
        raise Refusal("rank artifact", "a RankArtifact", error, file) from None


def same_bytes(one: msgspec.Raw, other: msgspec.Raw) -> bool:
    """Whether two parts of files are equal, without a copy of either: eight bytes at a time, then the rest."""
    a, b = memoryview(one), memoryview(other)
    whole = len(a) // 8 * 8
    return len(a) == len(b) and a[:whole].cast("Q") == b[:whole].cast("Q") and a[whole:] == b[whole:]


class Ranks:
    """The artifacts of a cell in rank order, each file decoded once, and groups that all files repeat too."""

    def __init__(self, files: Sequence[Path], contents: Iterable[bytes]) -> None:
        self.files, self.sha256 = list(files), dict[str, str]()
        self.artifacts: list[RankArtifact] = []
        groups = msgspec.Raw()
        for file, data in zip(files, contents, strict=True):
            self.sha256[file.name] = sha256(data)
            if not self.artifacts:
                self.artifacts.append(decode(data, RankArtifact, file))
                groups = decode(data, Groups, file).iteration_groups if len(files) > 1 else msgspec.Raw()
                continue
            further = decode(data, FurtherRank, file)
            if same_bytes(further.iteration_groups, groups):
                fields = msgspec.structs.asdict(further)
                self.artifacts.append(RankArtifact(**fields | {"iteration_groups": self.artifacts[0].iteration_groups}))
            else:
                self.artifacts.append(decode(data, RankArtifact, file))

    @classmethod
    def read(cls, files: Sequence[Path]) -> Self:
        return cls(files, (mapped(file) for file in files))


def mapped(file: Path) -> Any:
    """The bytes of a file, mapped: of hundreds of MiB none are copied to be hashed and decoded."""
    try:
        with file.open("rb") as opened:
            return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # a file of no bytes cannot be mapped
        raise Refusal("rank artifact", "a readable file", error, file) from None


def findings(ranks: Ranks) -> Iterator[Refusal]:
    """Everything that stands against a merge, worst first for each file."""
    first, reference = ranks.files[0], ranks.artifacts[0]
    for file, artifact in zip(ranks.files, ranks.artifacts, strict=True):
        yield from check_complete(artifact, file)
    for file, artifact in zip(ranks.files[1:], ranks.artifacts[1:], strict=True):
        yield from check_agreement(artifact, reference, file, first)
    yield from check_groups(reference, first)
    for file, artifact in zip(ranks.files, ranks.artifacts, strict=True):
        yield from check_rows(artifact, reference.iteration_groups, file)
    yield from check_regimes(ranks.artifacts, first)


def merge(ranks: Ranks, cell_digest: str) -> MergedArtifact:
    """Rank 0's artifact with the rows of all ranks by id, then rank; `findings` has nothing against it."""
    reference, world = ranks.artifacts[0], list(range(len(ranks.artifacts)))
    slowest = max(
        (artifact.timing for artifact in ranks.artifacts), key=lambda timing: timing.benchmark_elapsed_seconds
    )
    count = len(world)
    output = str(reference.config.get("output_path") or ranks.files[0].name)
    engine, protocol = reference.engine, reference.measurement_protocol
    ledgers: dict[str, Any] | UnsetType = UNSET
    if protocol is not UNSET:  # Dynamo 1.6.1 has neither, and leaves rank 0's engine as it is
        engine = engine if engine is UNSET else engine_of_all(engine)
        ledgers = {str(rank): artifact.warmup_evidence for rank, artifact in enumerate(ranks.artifacts)}
    return MergedArtifact(
        schema_version=reference.schema_version,
        kvwarm=reference.kvwarm,
        artifact_type="merged",
        status="complete",
        valid=True,
        usable=True,
        stop_reason=None,
        timing_valid=True,
        run_id=reference.run_id,
        grid_digest=str(reference.grid_digest),
        timing=msgspec.structs.replace(
            slowest,
            rank_benchmark_elapsed_seconds={
                str(rank): artifact.timing.benchmark_elapsed_seconds for rank, artifact in enumerate(ranks.artifacts)
            },
        ),
        dp={"ranks": world, "source_ranks": world, "managed_size": count, "global_size": count},
        synchronization=reference.synchronization,
        coverage=Coverage(
            expected_points=reference.coverage.expected_points * count,
            completed_points=reference.coverage.completed_points * count,
            skipped_points=0,
        ),
        config=reference.config,
        limits=reference.limits,
        recurrent_state=reference.recurrent_state,
        measurement_protocol=protocol,
        measurement_policy=reference.measurement_policy,
        synthetic_prompts=reference.synthetic_prompts,
        capacity=reference.capacity,
        cudagraph=reference.cudagraph,
        engine=engine,
        results=_flatten(ranks.artifacts),
        iteration_groups=reference.iteration_groups,
        skipped_points=[],
        missing_phases=[],
        error=None,
        rank_files=[str(artifact.config.get("output_path") or "") for artifact in ranks.artifacts],
        merged_output_path=_beside(output, "_merged"),
        # Dynamo 1.7 asks its workers once more after the merge; our artifacts have it all in their engine block.
        worker_probe_path=_beside(output, "_merged_worker_probe")
        if protocol is not UNSET and "producer" not in protocol
        else UNSET,
        rank_warmup_evidence=ledgers,
        cell_digest=cell_digest,
        source_sha256=ranks.sha256,
    )


def _beside(output_path: str, suffix: str) -> str:
    path = Path(output_path)
    return str(path.with_name(f"{path.stem}{suffix}{path.suffix}"))


def _flatten(artifacts: Sequence[RankArtifact]) -> list[Row]:
    """Rows by id, then rank."""
    by_id = sorted(zip(*(artifact.results for artifact in artifacts), strict=True), key=_benchmark_id)
    return [
        msgspec.structs.replace(row, point=msgspec.structs.replace(row.point, dp_rank=rank))
        for rows in by_id
        for rank, row in enumerate(rows)
    ]


def _benchmark_id(rows: tuple[Row, ...]) -> int:
    return rows[0].point.benchmark_id


def cell_findings(cell: FrozenCell, receipt_file: Path, files: dict[str, str], ranks: Ranks) -> Iterator[Refusal]:
    """The files are the receipt's, and the cell's: its phase, its ranks."""
    for file in ranks.files:
        if files.get(file.name) != ranks.sha256[file.name]:
            yield Refusal(f"sha256 of {file.name}", files.get(file.name, "none"), ranks.sha256[file.name], receipt_file)
    world, found = list(range(cell.identity.topology.dp)), [artifact.dp.rank for artifact in ranks.artifacts]
    if found != world:
        yield Refusal("dp ranks", world, found, ranks.files[0].parent)
    for file, artifact in zip(ranks.files, ranks.artifacts, strict=True):
        if artifact.dp.size != cell.identity.topology.dp:
            yield Refusal("dp.size", cell.identity.topology.dp, artifact.dp.size, file)
        if artifact.config.get("mode") != cell.identity.phase:
            yield Refusal("config.mode", cell.identity.phase, artifact.config.get("mode"), file)
        ledger = artifact.warmup_evidence
        if cell.identity.contract != DYNAMO.name and (ledger is UNSET or ledger.get("status") != "recorded"):
            has = None if ledger is UNSET else ledger.get("status")
            yield Refusal("warmup_evidence.status", "recorded", has, file)
        phases = {row.point.point_type for row in artifact.results}
        if phases != {cell.identity.phase}:
            yield Refusal("results: point_type", cell.identity.phase, sorted(phases), file)
    if len(ranks.artifacts[0].iteration_groups) != len(cell.points.points()):
        points = len(ranks.artifacts[0].iteration_groups)
        yield Refusal("number of points", len(cell.points.points()), points, ranks.files[0])


def merge_files(cell: FrozenCell, receipt_file: Path, files: Sequence[Path]) -> MergedArtifact:
    """Read, compare with the receipt's digests, and merge.

    Raises:
        Refusal: a rank that is missing, incomplete, or disagrees; names the field and the file.
    """
    receipt = read_receipt(receipt_file)
    if receipt.cell_digest != cell.digest:
        raise Refusal("cell_digest", cell.digest, receipt.cell_digest, receipt_file)
    ranks = Ranks.read(files)
    for refusal in (*cell_findings(cell, receipt_file, receipt.files, ranks), *findings(ranks)):
        raise refusal
    return merge(ranks, cell.digest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cell", type=Path, required=True)
    parser.add_argument("--receipt", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("ranks", type=Path, nargs="+")
    arguments = parser.parse_args()
    cell = read_model(FrozenCell, arguments.cell, "frozen cell")
    write_atomic(arguments.output, merged_bytes(merge_files(cell, arguments.receipt, arguments.ranks)))


if __name__ == "__main__":
    run(main)
