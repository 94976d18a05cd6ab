"""The journal of a cell: a finished point is on disk before the next one starts."""

import fcntl
import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from schemas.canonical import sha256
from schemas.errors import Held, Refusal
from schemas.journal import (
    RANK_SESSIONS_AGREE,
    SESSIONS_AGREE,
    Line,
    PointLine,
    RankSession,
    SessionLine,
    decode_line,
    encode_line,
)


class Journal(NamedTuple):
    """The lines of a journal, and the sha256 of each point's line by benchmark id."""

    sessions: tuple[SessionLine, ...] = ()
    points: tuple[PointLine, ...] = ()
    line_sha256: dict[int, str] = {}
    last_sha256: str = sha256(b"")

    @property
    def finished(self) -> frozenset[int]:
        return frozenset(line.benchmark_id for line in self.points)

    @property
    def ranks(self) -> int:
        """Data-parallel ranks that measured."""
        return len(self.sessions[0].ranks) if self.sessions else 0

    def next_forward_index(self, rank: int) -> int:
        """One past the last forward that any finished point counted on a rank."""
        ends = [repetition.forward_index for line in self.points for repetition in line.ranks[rank].repetitions]
        return max(ends, default=-1) + 1


def parse_journal(data: bytes, cell_digest: str, file: Path) -> Journal:
    """The lines of `data`. A torn last line (no newline) is dropped: its point was not finished.

    Raises:
        Refusal: a line that is no journal line, of another cell or another engine, out of the chain, or a point that
            stands twice.
    """
    lines = data.split(b"\n")
    previous = sha256(b"")
    sessions: list[SessionLine] = []
    points: dict[int, PointLine] = {}
    digests: dict[int, str] = {}
    for number, raw in enumerate(lines[:-1], start=1):
        try:
            line = decode_line(raw)
        except msgspec.MsgspecError as error:
            raise Refusal(f"journal line {number}", "a session or a point", error, file) from None
        if line.previous_sha256 != previous:
            raise Refusal(f"journal line {number} previous_sha256", previous, line.previous_sha256, file)
        previous = sha256(raw)
        if isinstance(line, SessionLine):
            if line.cell_digest != cell_digest:
                raise Refusal(f"journal line {number} cell_digest", cell_digest, line.cell_digest, file)
            sessions.append(line)
            check_sessions(sessions, file)
            continue
        if not sessions or line.session != sessions[-1].session:
            found = f"a point of session {line.session}"
            raise Refusal(f"journal line {number}", "a point of the session before it", found, file)
        if line.benchmark_id in points:
            raise Refusal(f"journal line {number} benchmark_id", "each point once", line.benchmark_id, file)
        if len(line.ranks) != len(sessions[0].ranks):
            raise Refusal(f"journal line {number} ranks", len(sessions[0].ranks), len(line.ranks), file)
        points[line.benchmark_id] = line
        digests[line.benchmark_id] = previous
    return Journal(tuple(sessions), tuple(points.values()), digests, previous)


def compared(rank: RankSession, field: str) -> Any:
    """A field of a session as sessions are compared: threads that no cell fixes may differ by machine."""
    value = getattr(rank, field)
    return {key: part for key, part in value.items() if key != "threads"} if field == "engine" else value


def check_sessions(sessions: list[SessionLine], file: Path) -> None:
    """The last session is of the same engine as the first, and counted on."""
    first, last = sessions[0], sessions[-1]
    if last.session != len(sessions):
        raise Refusal("journal session", len(sessions), last.session, file)
    for field in SESSIONS_AGREE:
        if getattr(first, field) != getattr(last, field):
            expected, found = getattr(first, field), getattr(last, field)
            raise Refusal(f"journal session {last.session} {field}", expected, found, file)
    if len(first.ranks) != len(last.ranks):
        raise Refusal(f"journal session {last.session} ranks", len(first.ranks), len(last.ranks), file)
    for rank, (before, now) in enumerate(zip(first.ranks, last.ranks, strict=True)):
        for field in RANK_SESSIONS_AGREE:
            expected, found = compared(before, field), compared(now, field)
            if expected != found:
                raise Refusal(f"journal session {last.session} rank {rank} {field}", expected, found, file)


def read_journal(file: Path, cell_digest: str) -> Journal:
    return parse_journal(file.read_bytes(), cell_digest, file) if file.exists() else Journal()


class JournalWriter:
    """Appends lines, each chained to the one before, and syncs each. Cuts a torn last line off first.

    Raises:
        Held: another process writes this journal, or has since it was read (the claim on a cell ends with its holder; a
            writer may outlive it).
    """

    def __init__(self, file: Path, last_sha256: str = sha256(b"")) -> None:
        self._path, self._last = file, last_sha256
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file = file.open("ab", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Held(f"{file} is being written by another process") from None
        data = file.read_bytes()
        self._end = data.rfind(b"\n") + 1
        whole = data[: self._end].splitlines()
        if sha256(whole[-1] if whole else b"") != last_sha256:
            raise Held(f"{file} has been written by another process since it was read")
        if self._end < len(data):
            print(f"{file}: the last line is torn and dropped: its point is measured again", file=sys.stderr)
            os.ftruncate(self._file.fileno(), self._end)

    def append(self, line: Line) -> float:
        """Write and sync one line; returns the seconds that took.

        Raises:
            Refusal: the disk does not take the line. What it took of it is cut off again.
        """
        began = time.monotonic()
        data = encode_line(msgspec.structs.replace(line, previous_sha256=self._last))
        rest = memoryview(data + b"\n")
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            os.ftruncate(self._file.fileno(), self._end)
            raise Refusal("journal", "a disk that takes the line", error.strerror, self._path) from None
        self._last, self._end = sha256(data), self._end + len(data) + 1
        return time.monotonic() - began

    def close(self) -> None:
        self._file.close()
