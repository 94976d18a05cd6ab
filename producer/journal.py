"""The journal of a cell: a finished point is on disk before the next one starts."""

import os
from pathlib import Path
from typing import NamedTuple

import msgspec

from schemas.canonical import sha256
from schemas.errors import Refusal
from schemas.journal import Line, PointLine, SessionLine, decode_line, encode_line


class Journal(NamedTuple):
    """The lines of a journal, and the sha256 of each point's line by benchmark id."""

    sessions: tuple[SessionLine, ...] = ()
    points: tuple[PointLine, ...] = ()
    line_sha256: dict[int, str] = {}

    @property
    def finished(self) -> frozenset[int]:
        return frozenset(line.benchmark_id for line in self.points)

    @property
    def next_forward_index(self) -> int:
        """One past the last forward that any finished point counted."""
        ends = [repetition.forward_index for line in self.points for repetition in line.repetitions]
        return max(ends, default=-1) + 1


def parse_journal(data: bytes, cell_digest: str, file: Path) -> Journal:
    """The lines of `data`. A torn last line (no newline) is dropped: its point was not finished.

    Raises:
        Refusal: a line that is no journal line, of another cell, or a point that stands twice.
    """
    lines = data.split(b"\n")
    sessions: list[SessionLine] = []
    points: dict[int, PointLine] = {}
    digests: dict[int, str] = {}
    for number, raw in enumerate(lines[:-1], start=1):
        try:
            line = decode_line(raw)
        except msgspec.MsgspecError as error:
            raise Refusal(f"journal line {number}", "a session or a point", error, file) from None
        if isinstance(line, SessionLine):
            if line.cell_digest != cell_digest:
                raise Refusal(f"journal line {number} cell_digest", cell_digest, line.cell_digest, file)
            sessions.append(line)
            continue
        if not sessions:
            raise Refusal(f"journal line {number}", "a session before the first point", "a point", file)
        if line.benchmark_id in points:
            raise Refusal(f"journal line {number} benchmark_id", "each point once", line.benchmark_id, file)
        points[line.benchmark_id] = line
        digests[line.benchmark_id] = sha256(raw)
    return Journal(tuple(sessions), tuple(points.values()), digests)


def read_journal(file: Path, cell_digest: str) -> Journal:
    return parse_journal(file.read_bytes(), cell_digest, file) if file.exists() else Journal()


class JournalWriter:
    """Appends lines and syncs each. Cuts a torn last line off first."""

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists():
            data = file.read_bytes()
            whole = data.rfind(b"\n") + 1
            if whole != len(data):
                os.truncate(file, whole)
        self._file = file.open("ab")

    def append(self, line: Line) -> None:
        self._file.write(encode_line(line) + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
