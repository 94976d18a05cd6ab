"""Snakemake's dry runs and runs as JSON lines: `snakemake -n --logger passgrid > jobs.jsonl`.

A dry run writes to standard output in place of Snakemake's text, or to `--logger-passgrid-file` beside it. A run needs
the file, for its jobs write to standard output too. A line is one JSON object with sorted keys. `event` says which:

totals     jobs (rule -> number) and total. First; again when a checkpoint has added jobs. Nothing to do is total 0.
job        rule, wildcards, input, output, log (lists of paths), threads, resources (what the rule asks for, without
           Snakemake's own and paths of the machine), reason (the whole of Snakemake's, files sorted); where the rule
           has them, message and checkpoint (true). In a run also jobid, which the lines below name, and local (false:
           an executor submits it). In a dry run Snakemake has neither: ids are of one process, and it does not decide.
started    jobid, time (Unix seconds)
finished   jobid, time
job_error  jobid, time, rule, output, log; message and external_jobid where an executor gives them
error      exception, message: as Snakemake words it, of a job's command and of what ended the whole

Snakemake finds a logger only as a package of this name on the module path (snakemake_interface_common 1.23.0,
plugin_registry/__init__.py:92), hence a folder of its own beside the rooms.
"""

import logging
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Optional

from snakemake_interface_logger_plugins.base import LogHandlerBase
from snakemake_interface_logger_plugins.common import LogEvent
from snakemake_interface_logger_plugins.settings import LogHandlerSettingsBase

from schemas.canonical import canonical_bytes
from schemas.errors import Refusal, refusing

Line = dict[str, Any]

NOTHING_TO_DO = "Nothing to be done"
"""How Snakemake begins the line that it logs instead of totals (snakemake 9.27.1, common/__init__.py:30)."""

OWN_RESOURCES = ("_cores", "_nodes", "mem", "mem_mib", "disk", "disk_mib", "tmpdir")
"""Snakemake's bookkeeping, other units of the same, and a path of the machine."""

FILE_LISTS = {
    "Missing output files": "output",
    "Incomplete output files": "output",
    "Updated input files": "input",
    "Input files updated by another job": "input",
}
"""What a reason lists -> the files it is taken from (snakemake 9.27.1, jobs.py:1921)."""

STORAGE_NOTES = (" (retrieve from storage)", " (send to storage)", " (in storage)")
"""What Snakemake says behind the path of a file that a storage provider keeps (snakemake 9.27.1, io/fmt.py)."""


def path(shown: str) -> str:
    """The path in what Snakemake shows of a file."""
    for note in STORAGE_NOTES:
        shown = shown.removesuffix(note)
    return shown


def canonical_reason(reason: str, files: dict[str, list[str]]) -> str:
    """`reason` with its lists sorted: Snakemake joins sets, in another order in every process."""

    def in_order(part: str) -> str:
        label, _, names = part.partition(": ")
        listed = [path(name) for name in names.split(", ")]
        if label not in FILE_LISTS:
            return part
        known = set(files[FILE_LISTS[label]])
        # A file that a checkpoint waits for is in the reason and not among the inputs. Of a path with a comma only the
        # known ones tell where it ends.
        if not set(listed) <= known and any(", " in file for file in known):
            return part
        return f"{label}: {', '.join(sorted(listed))}"

    return "; ".join(map(in_order, reason.split("; ")))


def totals(record: Any, dryrun: bool) -> Iterator[Line]:
    jobs = {rule: number for rule, number in record.stats.items() if rule != "total"}
    yield {"event": "totals", "jobs": jobs, "total": record.stats["total"]}


def job(record: Any, dryrun: bool) -> Iterator[Line]:
    files = {kind: [path(file) for file in getattr(record, kind)] for kind in ("input", "output", "log")}
    line: Line = {
        "event": "job",
        "rule": record.rule_name,
        "wildcards": dict(record.wildcards),
        "reason": canonical_reason(record.reason, files),
        "resources": {name: value for name, value in record.resources.items() if name not in OWN_RESOURCES},
        "threads": record.threads,
    }
    if record.rule_msg:
        line["message"] = record.rule_msg
    if record.is_checkpoint:
        line["checkpoint"] = True
    if not dryrun:
        line |= {"jobid": record.jobid, "local": record.local}
    yield line | files


def started(record: Any, dryrun: bool) -> Iterator[Line]:
    for jobid in record.jobs:
        yield {"event": "started", "jobid": jobid, "time": record.created}


def finished(record: Any, dryrun: bool) -> Iterator[Line]:
    yield {"event": "finished", "jobid": record.job_id, "time": record.created}


def job_error(record: Any, dryrun: bool) -> Iterator[Line]:
    line = {
        "event": "job_error",
        "jobid": record.jobid,
        "time": record.created,
        "rule": record.rule_name,
        "output": [path(file) for file in record.output],
        "log": [path(file) for file in record.log],
    }
    named = {"message": record.rule_msg, "external_jobid": record.aux.get("external_jobid")}
    yield line | {key: str(value) for key, value in named.items() if value}


def error(record: Any, dryrun: bool) -> Iterator[Line]:
    yield {"event": "error", "exception": record.exception, "message": record.getMessage()}


def unnamed(record: Any, dryrun: bool) -> Iterator[Line]:
    """A record without an event: Snakemake says in words alone that there is nothing to do."""
    if record.getMessage().startswith(NOTHING_TO_DO):
        yield {"event": "totals", "jobs": {}, "total": 0}


LINES: dict[str | None, Callable[[Any, bool], Iterator[Line]]] = {
    LogEvent.RUN_INFO: totals,
    LogEvent.JOB_INFO: job,
    LogEvent.JOB_STARTED: started,
    LogEvent.JOB_FINISHED: finished,
    LogEvent.JOB_ERROR: job_error,
    LogEvent.ERROR: error,
    None: unnamed,
}


@dataclass
class LogHandlerSettings(LogHandlerSettingsBase):
    """Options of the command line: `--logger-passgrid-<field>`."""

    file: Optional[Path] = field(  # noqa: UP045 (the registry knows no other spelling)
        default=None,
        metadata={"help": "Write the JSON lines to this file. Needed in a run; a dry run takes standard output."},
    )


class LogHandler(LogHandlerBase):
    """Writes the lines as they come; a run can be followed."""

    settings: LogHandlerSettings
    writes_to_stream = property(lambda self: self.settings.file is None)
    writes_to_file = property(lambda self: self.settings.file is not None)
    has_filter = True
    has_formatter = True
    needs_rulegraph = False

    def __post_init__(self) -> None:
        self._last_totals: Line | None = None
        with refusing():
            self._stream = self._open()

    def _open(self) -> BinaryIO:
        file = self.settings.file
        if file is None:
            if not self.common_settings.dryrun:
                raise Refusal("--logger-passgrid-file", "a file for the lines of a run", "none", "command line")
            return sys.stdout.buffer
        self.baseFilename = str(file.absolute())
        try:
            return file.open("wb")
        except OSError as cause:
            raise Refusal("--logger-passgrid-file", "a file to write", cause.strerror, file) from None

    def emit(self, record: logging.LogRecord) -> None:
        try:
            lines = LINES.get(getattr(record, "event", None))
            for line in lines(record, self.common_settings.dryrun) if lines else ():
                self._write(line)
            if self.writes_to_stream and record.levelno >= logging.WARNING:
                print(record.getMessage(), file=sys.stderr)
        except BrokenPipeError:  # the reader, `head` for one, has enough; Python flushes standard output again at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
        except Exception:
            self.handleError(record)

    def _write(self, line: Line) -> None:
        # A dry run logs its totals before and after the jobs.
        if line["event"] == "totals":
            if line == self._last_totals:
                return
            self._last_totals = line
        self._stream.write(canonical_bytes(line) + b"\n")
        self._stream.flush()

    def close(self) -> None:
        if self.writes_to_file:
            self._stream.close()
        super().close()
