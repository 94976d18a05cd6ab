"""Every attempt at a measurement leaves a record, and a refusal is not tried again by the driver that saw it.

`attempts.jsonl` beside the journal, and `<phase>.attempts.jsonl` beside a probe's record, have one line when a job
begins and one when it ends. A job that was killed has no second line.
"""

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from producer.exclusive import slurm_job, utc_now
from producer.supervise import Stopped, Supervised
from schemas.canonical import canonical_bytes
from schemas.errors import REFUSED, Refusal


def read_attempts(file: Path) -> list[dict[str, Any]]:
    """One dict an attempt, in order: `started_at`, `attempt` of its driver, host, process and job; of an ended one
    also `ended_at`, exit `code` and `reason`."""
    attempts: list[dict[str, Any]] = []
    for line in file.read_text().splitlines() if file.exists() else ():
        with contextlib.suppress(ValueError):  # torn by a full disk or a dead machine
            facts = json.loads(line)
            if "started_at" in facts:
                attempts.append(facts)
            elif attempts:
                attempts[-1] |= facts
    return attempts


def _append(file: Path, facts: dict[str, Any]) -> None:
    torn = file.exists() and not file.read_bytes().endswith(b"\n")
    with contextlib.suppress(OSError), file.open("ab") as lines:  # a full disk ends a cell at its journal
        lines.write(b"\n" * torn + canonical_bytes(facts) + b"\n")


class Attempt:
    """The attempt that runs: says how it ended when nothing was raised."""

    def __init__(self) -> None:
        self.ended = Supervised(0)


@contextlib.contextmanager
def recorded(file: Path, number: int) -> Iterator[Attempt]:
    """Record what runs inside in `file`, as attempt `number` of its driver (Snakemake counts from 1).

    Raises:
        Refusal: the attempt before it was refused. A refusal is the same the second time, and costs an engine start.
    """
    before = read_attempts(file)
    who = {"attempt": number, "host": socket.gethostname(), "pid": os.getpid(), "started_at": utc_now()}
    file.parent.mkdir(parents=True, exist_ok=True)
    _append(file, who | slurm_job())

    def end(code: int, reason: str) -> None:
        facts = {"code": code, "ended_at": utc_now()}
        _append(file, facts | ({"reason": reason} if reason else {}))

    if number > 1 and before and before[-1].get("code") == REFUSED:
        reason = before[-1]["reason"]
        end(REFUSED, reason)
        raise Refusal(f"attempt {number}", "no refusal before it", reason, file)
    attempt = Attempt()
    try:
        yield attempt
    except Refusal as refusal:
        end(REFUSED, str(refusal))
        raise
    except Stopped as stop:
        end(128 + stop.number, str(stop))
        raise
    except Exception as error:
        end(1, f"{type(error).__name__}: {error}")
        raise
    end(*attempt.ended)
