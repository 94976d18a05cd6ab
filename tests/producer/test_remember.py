"""What is kept answers only while everything that it was made of is as it was."""

import os
from pathlib import Path

import pytest

from producer import remember
from producer.remember import remembered
from schemas.canonical import is_file, read_bytes


class Sum:
    """Bytes of one file and of another that may be absent; counts how often it is computed."""

    def __init__(self, folder: Path) -> None:
        self.one, self.other, self.kept, self.computed = folder / "one", folder / "other", folder / "kept.json", 0
        self.one.write_text("abc")

    def compute(self) -> int:
        self.computed += 1
        return len(read_bytes(self.one, "one")) + (len(read_bytes(self.other, "other")) if is_file(self.other) else 0)

    def ask(self, causes: object = "a") -> tuple[int, int]:
        """The value, and how often it was computed so far."""
        return remembered(self.kept, causes, int, self.compute), self.computed


@pytest.fixture
def both(tmp_path: Path) -> Sum:
    return Sum(tmp_path)


def test_nothing_changed_is_computed_once(both: Sum):
    assert [both.ask(), both.ask()] == [(3, 1), (3, 1)]


def test_another_content_of_the_same_length_and_time_is_computed_anew(both: Sum):
    both.ask()
    stat = both.one.stat()
    both.one.write_text("xyz")
    os.utime(both.one, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert both.ask() == (3, 2)


def test_a_file_that_appears_or_goes_is_computed_anew(both: Sum):
    both.ask()
    both.other.write_text("de")
    assert both.ask() == (5, 2)
    both.other.unlink()
    assert both.ask() == (3, 3)


def test_other_causes_are_computed_anew(both: Sum):
    both.ask("a")
    assert both.ask("b") == (3, 2)


def test_other_code_computes_anew(both: Sum, monkeypatch: pytest.MonkeyPatch):
    both.ask()
    monkeypatch.setattr(remember, "code_digest", lambda: "another")
    assert both.ask() == (3, 2)


@pytest.mark.parametrize("text", ["", "{}", '{"key": 1}', "[", '{"key":"k","files":{},"value":"x"}'])
def test_a_damaged_file_costs_time_alone(both: Sum, text: str):
    both.ask()
    both.kept.write_text(text)
    assert both.ask() == (3, 2)
