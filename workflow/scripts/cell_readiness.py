"""Whether one cell of a plan is measured, verified, and the plan's own, from the files in its folder."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from producer.attempts import read_attempts
from schemas.canonical import parse, read_bytes, read_model, sha256
from schemas.errors import Refusal
from schemas.evidence import CellEvidence, CellReadiness, Coverage, EvidenceState, LastAttempt, ReadinessState
from schemas.plan import CellEntry, FrozenCell
from schemas.profile import Profile

from runtime_compatibility import ABSENT, compare, look_up

UNREADABLE = (Refusal, OSError, ValueError, TypeError, RecursionError, msgspec.MsgspecError)
"""What reading a damaged file can raise."""

JUDGED = ("cell.json", "evidence.json", "merged.json")
BEGUN = ("attempts.jsonl", "repetitions.jsonl", "benchmark.json", "receipt.json")
"""One of these, and somebody has tried to measure the cell."""

STOPPED = 128
"""Exit codes above it name a signal: somebody ended the attempt, and the next one goes on."""

FAKE = "fake_fallback"


class RankHead(msgspec.Struct, frozen=True):
    """A rank artifact, as far as it says that it is one."""

    artifact_type: str
    run_id: str


class MergedHead(msgspec.Struct, frozen=True):
    """`merged.json`, as far as readiness asks: rows and groups are counted, not decoded."""

    run_id: str
    grid_digest: str
    cell_digest: str
    results: list[msgspec.Raw]
    iteration_groups: list[msgspec.Raw]
    limits: dict[str, Any]
    capacity: dict[str, Any]
    engine: dict[str, Any] | UnsetType = UNSET
    kvwarm: dict[str, Any] | UnsetType | None = UNSET

    @property
    def runtime(self) -> dict[str, Any]:
        engine = {} if self.engine is UNSET else {"engine": self.engine}
        return {"limits": self.limits, "capacity": self.capacity} | engine


class Merged(NamedTuple):
    head: MergedHead
    sha256: str


T = TypeVar("T")


class CellFolder:
    """Reads the files of a cell; what cannot be read becomes a line in `unreadable`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.unreadable: list[str] = []

    def has(self, name: str) -> bool:
        try:
            (self.folder / name).stat()
        except OSError:
            return False
        return True

    def read(self, name: str, how: Callable[[Path], T]) -> T | None:
        """What `how` makes of a file; None of one that is not there, or cannot be read."""
        if not self.has(name):
            return None
        try:
            return how(self.folder / name)
        except UNREADABLE as error:
            words = str(error) if isinstance(error, Refusal) else f"{name}: {type(error).__name__}: {error}"
            self.unreadable.append(f"cannot be read: {' '.join(words.split())}")
            return None

    def reads_a_rank(self) -> bool:
        """Whether some rank artifact of the folder can be read."""
        for file in sorted(self.folder.glob("benchmark*.json")):
            try:
                if msgspec.json.decode(file.read_bytes(), type=RankHead).artifact_type == "rank":
                    return True
            except UNREADABLE:
                continue
        return False


def begun(folder: Path) -> bool:
    """Whether anybody has tried to measure the cell."""
    return any(CellFolder(folder).has(name) for name in BEGUN)


def read_last_attempt(file: Path) -> LastAttempt | None:
    """The last attempt of `attempts.jsonl`; None when it has none."""
    attempts = read_attempts(file)
    if not attempts:
        return None
    known = {field: attempts[-1].get(field) for field in ("started_at", "ended_at", "code", "reason")}
    return parse(LastAttempt, known | {"attempts": len(attempts)}, file)


def read_merged(file: Path) -> Merged:
    data = read_bytes(file, "merged artifact")
    try:
        return Merged(msgspec.json.decode(data, type=MergedHead), sha256(data))
    except msgspec.MsgspecError as error:
        raise Refusal("merged artifact", "a MergedArtifact", error, file) from None


def eligible_points(evidence: CellEvidence) -> int:
    return evidence.points - evidence.formal_regime_counts.get(FAKE, 0)


def check_verdict(entry: CellEntry, cell: FrozenCell, evidence: CellEvidence, merged: Merged) -> Iterator[str]:
    """The verdict is of this cell and of this merged file, it has not failed, and its counts add up."""
    for failure in evidence.failures:
        yield f"{entry.name}: {failure}"
    head, points, ranks = merged.head, entry.points, cell.identity.topology.dp
    rows = Counter(evidence.formal_regimes)
    counted = {label: ranks * count for label, count in evidence.formal_regime_counts.items()}
    for field, expected, found in (
        ("cell_digest", entry.digest, evidence.cell_digest),
        ("phase", entry.phase, evidence.phase),
        ("points", points, evidence.points),
        ("merged_sha256", merged.sha256, evidence.merged_sha256),
        ("state", "failed" if evidence.failures else "recorded or unestablished", _word(evidence.state)),
        ("run_id", head.run_id, evidence.run_id),
        ("grid_digest", head.grid_digest, evidence.grid_digest),
        ("cell_digest of merged.json", entry.digest, head.cell_digest),
        ("points of merged.json", points, len(head.iteration_groups)),
        ("rows of merged.json", points * ranks, len(head.results)),
        ("cell_digest of cell.json", entry.digest, cell.digest),
        ("deployment of cell.json", entry.deployment, cell.deployment),
        ("points of cell.json", points, len(cell.points.points())),
        ("formal_regimes", points * ranks, len(evidence.formal_regimes)),
        ("formal_regime_counts", dict(sorted(rows.items())), dict(sorted(counted.items()))),
        ("native_regime_counts", points, sum(evidence.native_regime_counts.values())),
    ):
        if expected != found:
            yield f"{entry.name} {field}: expected {expected}, found {found}"


def _word(state: EvidenceState) -> str:
    return "failed" if state == "failed" else "recorded or unestablished"


def check_content(entry: CellEntry, evidence: CellEvidence, merged: Merged) -> Iterator[str]:
    """What the points read as their cache: decode says how it was warmed, and not all of it is fake."""
    if entry.phase == "decode" and not merged.head.kvwarm:
        yield f"{entry.name}: decode without a kvwarm block"
    if eligible_points(evidence) <= 0:
        yield f"{entry.name}: no point is eligible for direct use"


def unmeasured(attempt: LastAttempt) -> tuple[ReadinessState, str]:
    """What the last attempt at a cell without an artifact says: a failure blocks, anything else may go on."""
    which = f"attempt {attempt.attempts}, begun {attempt.started_at},"
    reason = f": {attempt.reason}" if attempt.reason else ""
    if attempt.code is None:
        return "incomplete", f"{which} has not ended: it runs, or was killed"
    if attempt.code > STOPPED:
        return "incomplete", f"{which} was stopped, and nothing is measured{reason}"
    return "blocked", f"{which} ended with exit code {attempt.code}, and nothing is measured{reason}"


def assess_cell(entry: CellEntry, folder: Path, profile: Profile | None) -> CellReadiness:
    """One cell against its entry in the plan, and against the accepted profile where that is known.

    Reads, and raises nothing: what cannot be read is a blocker.
    """
    files = CellFolder(folder)
    attempt = files.read("attempts.jsonl", read_last_attempt)
    cell = files.read("cell.json", lambda file: read_model(FrozenCell, file, "frozen cell"))
    evidence = files.read("evidence.json", lambda file: read_model(CellEvidence, file, "evidence"))
    merged = files.read("merged.json", read_merged)
    compatibility = None if merged is None or profile is None else compare(profile, merged.head.runtime)

    status: ReadinessState = "ready"
    blockers: list[str] = []
    coverage: Coverage = "unverified"
    if missing := [name for name in JUDGED if not files.has(name)]:
        status, blockers = "incomplete", [f"{entry.name}: {', '.join(missing)} missing"]
        if attempt is not None and not files.has("benchmark.json"):
            status, words = unmeasured(attempt)
            blockers.append(f"{entry.name}: {words}")
    if files.unreadable:
        status = "blocked" if status == "blocked" or files.reads_a_rank() else "incomplete"
        blockers += [f"{entry.name}: {line}" for line in files.unreadable]
    if cell is not None and evidence is not None and merged is not None:
        verdict = list(check_verdict(entry, cell, evidence, merged))
        found = [*verdict, *check_content(entry, evidence, merged)]
        if compatibility is not None:
            found += [f"{entry.name} {mismatch}" for mismatch in compatibility.mismatches]
        if not verdict:
            coverage = "partial" if evidence.formal_regime_counts.get(FAKE, 0) else "sampled_points_only"
        if found:
            status, blockers = "blocked", blockers + found
    return CellReadiness(
        name=entry.name,
        cell_digest=entry.digest,
        status=status,
        blockers=tuple(blockers),
        coverage=coverage,
        attempt=attempt,
        runtime_compatibility=compatibility,
        **({} if evidence is None else _of_evidence(evidence)),
        **({} if merged is None else _of_merged(merged.head)),
    )


def _of_evidence(evidence: CellEvidence) -> dict[str, Any]:
    return {
        "native_regime_counts": evidence.native_regime_counts,
        "formal_regime_counts": evidence.formal_regime_counts,
        "direct_eligible_points": eligible_points(evidence),
        "gaps": evidence.gaps,
    }


def _of_merged(head: MergedHead) -> dict[str, Any]:
    version = look_up(head.runtime, "engine.versions.vllm")
    return {
        "run_id": head.run_id,
        "grid_digest": head.grid_digest,
        "kvwarm": head.kvwarm or None,
        "observed_backend_version": version if isinstance(version, str) and version != ABSENT else None,
    }
