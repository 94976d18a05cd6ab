"""The journal: torn, edited and foreign lines."""

import resource
from pathlib import Path

import msgspec
import pytest

from producer.journal import JournalWriter, parse_journal, read_journal
from schemas.errors import Held, Refusal
from schemas.journal import PointLine, RankPoint, RankSession, Repetition, SessionLine, encode_line
from schemas.native import UNOBSERVED, Prompts, ScheduledRequests

SESSION = SessionLine(
    previous_sha256="",
    cell_digest="c" * 64,
    session=1,
    run_id="r",
    started_at="2026-01-01T00:00:00Z",
    producer={},
    ranks=[RankSession(0, "cpu", 1.0, engine={}, limits={}, cudagraph={}, capacity={}, runtime={})],
)


def point(benchmark_id: int, forward: int, session: int = 1) -> PointLine:
    counts = ScheduledRequests(1, 8, 0.0, 0, 0, 0, 0.0)
    repetition = Repetition(5, forward, "schedule_to_output", 0.0, 1.0, 0.0, counts, UNOBSERVED, "0")
    prompts = Prompts("recorded", [], "0")
    rank = RankPoint([], [], [], [repetition], [], prompts, 1, {}, None)
    return PointLine("", benchmark_id, session, "not_applicable", [rank], "now")


def journal_with(tmp_path: Path, *lines) -> Path:
    file = tmp_path / "repetitions.jsonl"
    writer = JournalWriter(file)
    for line in lines:
        writer.append(line)
    writer.close()
    return file


def test_what_was_appended_is_read_back(tmp_path: Path):
    file = journal_with(tmp_path, SESSION, point(2, 7), point(1, 9))
    journal = read_journal(file, "c" * 64)
    assert journal.finished == {1, 2}
    assert journal.next_forward_index(0) == 10


def test_a_torn_last_line_is_dropped_and_cut_off_before_the_next(tmp_path: Path):
    file = journal_with(tmp_path, SESSION, point(1, 7))
    with file.open("ab") as tail:
        tail.write(encode_line(point(2, 9))[:40])
    assert read_journal(file, "c" * 64).finished == {1}
    writer = JournalWriter(file, read_journal(file, "c" * 64).last_sha256)
    writer.append(point(3, 11))
    writer.close()
    assert read_journal(file, "c" * 64).finished == {1, 3}


def test_a_line_edited_in_the_middle_is_refused_with_its_number(tmp_path: Path):
    file = journal_with(tmp_path, SESSION, point(1, 7), point(2, 9))
    lines = file.read_bytes().split(b"\n")
    lines[1] = lines[1].replace(b'"forward_index":7', b'"forward_index":"7"')
    with pytest.raises(Refusal, match="journal line 2"):
        parse_journal(b"\n".join(lines), "c" * 64, file)


def test_a_journal_of_another_cell_is_refused(tmp_path: Path):
    file = journal_with(tmp_path, SESSION)
    with pytest.raises(Refusal, match=r"journal line 1 cell_digest: expected d+, found c+"):
        read_journal(file, "d" * 64)


def test_a_point_that_stands_twice_is_refused(tmp_path: Path):
    file = journal_with(tmp_path, SESSION, point(1, 7), point(1, 9))
    with pytest.raises(Refusal, match="each point once, found 1"):
        read_journal(file, "c" * 64)


def test_an_unknown_key_is_refused(tmp_path: Path):
    file = journal_with(tmp_path, SESSION)
    data = msgspec.json.decode(file.read_bytes().split(b"\n")[0]) | {"averaged": True}
    with pytest.raises(Refusal, match="averaged"):
        parse_journal(msgspec.json.encode(data) + b"\n", "c" * 64, file)


def test_a_line_that_was_edited_or_lost_breaks_the_chain(tmp_path: Path):
    file = journal_with(tmp_path, SESSION, point(1, 7), point(2, 9), point(3, 11))
    lines = file.read_bytes().split(b"\n")
    edited = [lines[0], lines[1].replace(b'"end_monotonic":1.0', b'"end_monotonic":0.5'), *lines[2:]]
    assert edited != lines
    for broken in (edited, [lines[0], *lines[2:]]):
        with pytest.raises(Refusal, match=r"journal line \d previous_sha256: expected [0-9a-f]{64}, found"):
            parse_journal(b"\n".join(broken), "c" * 64, file)


@pytest.mark.parametrize(
    ("change", "rank", "line"),
    [
        ({}, {"device_name": "another"}, "journal session 2 rank 0 device_name: expected cpu, found another"),
        ({}, {"engine": {"graph": "FULL"}}, "journal session 2 rank 0 engine: expected {}, found {'graph': 'FULL'}"),
        ({"producer": {"protocol": 2}}, {}, "journal session 2 producer: expected {}, found {'protocol': 2}"),
        ({"ranks": SESSION.ranks * 2}, None, "journal session 2 ranks: expected 1, found 2"),
        ({"session": 5}, {}, "journal session: expected 2, found 5"),
    ],
)
def test_sessions_of_different_engines_are_no_journal(tmp_path: Path, change, rank, line):
    if rank is not None:
        change = change | {"ranks": [msgspec.structs.replace(SESSION.ranks[0], **rank)]}
    second = msgspec.structs.replace(SESSION, **{"session": 2} | change)
    file = journal_with(tmp_path, SESSION, point(1, 7), second)
    with pytest.raises(Refusal) as refusal:
        read_journal(file, "c" * 64)
    assert line in str(refusal.value)


def test_a_point_belongs_to_the_session_before_it(tmp_path: Path):
    file = journal_with(tmp_path, SESSION, point(1, 7, session=42))
    with pytest.raises(Refusal, match="expected a point of the session before it, found a point of session 42"):
        read_journal(file, "c" * 64)


def test_a_point_that_not_every_rank_has_is_refused(tmp_path: Path):
    one = point(1, 7)
    file = journal_with(tmp_path, SESSION, msgspec.structs.replace(one, ranks=one.ranks * 2))
    with pytest.raises(Refusal, match="journal line 2 ranks: expected 1, found 2"):
        read_journal(file, "c" * 64)


def test_two_writers_never_share_a_journal(tmp_path: Path):
    """The claim of a killed supervisor is free at once; the rank that it left behind may still be writing."""
    first = JournalWriter(tmp_path / "repetitions.jsonl")
    first.append(SESSION)
    with pytest.raises(Held, match=r"repetitions\.jsonl is being written by another process"):
        JournalWriter(tmp_path / "repetitions.jsonl")
    assert read_journal(tmp_path / "repetitions.jsonl", "c" * 64).sessions
    first.close()
    last = read_journal(tmp_path / "repetitions.jsonl", "c" * 64).last_sha256
    JournalWriter(tmp_path / "repetitions.jsonl", last).close()


def test_a_writer_that_read_the_journal_before_somebody_wrote_it_leaves(tmp_path: Path):
    """Chaining to a line that is no longer the last would break the journal for good."""
    file = journal_with(tmp_path, SESSION)
    stale = read_journal(file, "c" * 64).last_sha256
    other = JournalWriter(file, stale)
    other.append(point(1, 7))
    other.close()
    with pytest.raises(Held, match="has been written by another process since it was read"):
        JournalWriter(file, stale)
    assert read_journal(file, "c" * 64).finished == {1}


def test_a_full_disk_costs_the_line_and_nothing_before_it(tmp_path: Path):
    """The kernel takes a part of the line, then no more: that part is cut off, and the writer says why."""
    file = tmp_path / "repetitions.jsonl"
    writer = JournalWriter(file)
    writer.append(SESSION)
    writer.append(point(1, 7))
    before = file.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 50, hard))
    try:
        with pytest.raises(Refusal, match="journal: expected a disk that takes the line, found File too large"):
            writer.append(point(2, 9))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert file.read_bytes() == before
    writer.append(point(2, 9))
    writer.close()
    assert read_journal(file, "c" * 64).finished == {1, 2}
