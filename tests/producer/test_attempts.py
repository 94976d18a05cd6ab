"""Every attempt leaves a record; a refusal is not tried again by the driver that saw it."""

import json
import re
from pathlib import Path

import pytest

from producer.attempts import read_attempts, recorded
from producer.exclusive import slurm_job
from producer.supervise import Stopped, Supervised
from schemas.errors import Refusal

REFUSAL = Refusal("engine free blocks", "at least 2000", 1023, "cell.json")


def outcomes(file: Path) -> list[tuple[int, int | None, str | None]]:
    return [(found["attempt"], found.get("code"), found.get("reason")) for found in read_attempts(file)]


def attempt(file: Path, number: int, error: Exception | None = None, ended: Supervised | None = None) -> None:
    with recorded(file, number) as running:
        if error is not None:
            raise error
        if ended is not None:
            running.ended = ended


def test_a_record_of_each_way_to_end(tmp_path: Path):
    file = tmp_path / "cell" / "attempts.jsonl"
    attempt(file, 1)
    attempt(file, 1, ended=Supervised(1, "no step for 600 s"))
    for error in (REFUSAL, Stopped(15), OSError("disk")):
        with pytest.raises(type(error)):
            attempt(file, 1, error)
    assert outcomes(file) == [
        (1, 0, None),
        (1, 1, "no step for 600 s"),
        (1, 2, "engine free blocks: expected at least 2000, found 1023: cell.json"),
        (1, 143, "stopped by SIGTERM"),
        (1, 1, "OSError: disk"),
    ]
    times = [found[name] for found in read_attempts(file) for name in ("started_at", "ended_at")]
    assert times == sorted(times)


def test_a_refusal_is_refused_again_at_once_and_by_its_first_words(tmp_path: Path):
    file = tmp_path / "attempts.jsonl"
    with pytest.raises(Refusal):
        attempt(file, 1, REFUSAL)
    for number in (2, 3):
        line = f"attempt {number}: expected no refusal before it, found {REFUSAL}: {file}"
        with pytest.raises(Refusal, match=f"^{re.escape(line)}$"):
            attempt(file, number, AssertionError("it ran"))
    assert outcomes(file) == [(number, 2, str(REFUSAL)) for number in (1, 2, 3)]
    # The next run begins anew: somebody may have put it right.
    attempt(file, 1)
    assert outcomes(file)[3:] == [(1, 0, None)]


@pytest.mark.parametrize("ended", [Supervised(1, "rank 0 was ended by SIGKILL"), Supervised(143, "stopped by SIGTERM")])
def test_what_is_no_refusal_is_tried_again(tmp_path: Path, ended: Supervised):
    file = tmp_path / "attempts.jsonl"
    attempt(file, 1, ended=ended)
    attempt(file, 2)
    assert [code for _, code, _ in outcomes(file)] == [ended.code, 0]


def test_a_killed_attempt_has_no_end_and_is_tried_again(tmp_path: Path):
    file = tmp_path / "attempts.jsonl"
    attempt(file, 1)
    file.write_bytes(file.read_bytes().split(b"\n")[0] + b"\n")
    attempt(file, 2)
    assert outcomes(file) == [(1, None, None), (2, 0, None)]


def test_a_torn_line_costs_its_own_attempt_alone(tmp_path: Path):
    file = tmp_path / "attempts.jsonl"
    attempt(file, 1)
    file.write_bytes(file.read_bytes()[:-5])
    attempt(file, 1)
    assert outcomes(file) == [(1, None, None), (1, 0, None)]


@pytest.mark.parametrize(
    ("environment", "job"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "12"}, "12"),
        ({"SLURM_JOB_ID": "14", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "2"}, "12_2"),
    ],
)
def test_a_job_is_named_as_squeue_names_it(tmp_path: Path, monkeypatch, environment: dict[str, str], job: str | None):
    for name in ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert slurm_job().get("slurm_job_id") == job
    attempt(tmp_path / "attempts.jsonl", 1)
    assert json.loads((tmp_path / "attempts.jsonl").read_text().splitlines()[0]).get("slurm_job_id") == job
