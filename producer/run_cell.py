"""Measure one frozen cell: claim it, resume its journal, start the engine once, write the rank artifacts.

Exit codes: 0 measured, 2 refused, 75 somebody else holds the cell, 1 the measurement failed, 128 + n stopped by
signal n. Whatever ends it, the points in repetitions.jsonl are kept and never measured again.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from producer.adapters import Adapter, adapter_of, check_installed, pins_digest
from producer.artifact import assemble, contract_of, receipt
from producer.attempts import recorded
from producer.control import Engines, Head, follow, head_of
from producer.devices import check_devices
from producer.exclusive import claim
from producer.journal import Journal, read_journal
from producer.nodes import Place, add_arguments, given_place, place_of
from producer.progress import StatusFile
from producer.record import producer_record
from producer.supervise import Patience, Stopped, Supervised, stop_on_signals
from producer.tokens import GENERATOR
from schemas.canonical import digest, read_bytes, read_model, sha256
from schemas.errors import HELD, REFUSED, Refusal, run
from schemas.layout import rank_file
from schemas.model_config import read_model_config
from schemas.native import Struct, struct_bytes, write_struct
from schemas.plan import FrozenCell


def check_cell(cell: FrozenCell, file: Path) -> None:
    """The frozen cell is what its digest covers: folder, points, and a contract that this checkout has.

    Raises:
        Refusal: a field that is not the digest's.
    """
    identity = cell.identity
    facts = {
        "cell name": (file.parent.name, cell.name),
        "points_sha256": (identity.points_sha256, digest(cell.points)),
        "token_generator": (GENERATOR, identity.token_generator),
        "pins_sha256": (pins_digest(adapter_of(identity.runtime_backend_version, file)), identity.pins_sha256),
    }
    for field, (expected, found) in facts.items():
        if expected != found:
            raise Refusal(f"frozen cell {field}", expected, found, file)
    contract_of(cell, file)


def check_model(cell: FrozenCell, file: Path) -> None:
    """The model folder still holds the config that the cell was planned with."""
    found = read_model_config(Path(cell.model)).sha256
    if found != cell.identity.model_config_sha256:
        raise Refusal(f"config of {cell.model}", cell.identity.model_config_sha256, found, file)


def check_producer(cell: FrozenCell, adapter: Adapter, journal: Journal, file: Path) -> None:
    """A journal goes on with the producer that began it: seconds before an engine would find out."""
    if not journal.sessions:
        return
    began, now = journal.sessions[0].producer, producer_record(cell, adapter)
    for field in sorted(began.keys() | now.keys()):
        if began.get(field) != now.get(field):
            raise Refusal(f"producer.{field} of this journal", began.get(field), f"{now.get(field)} here", file)


def check_here(cell: FrozenCell, adapter: Adapter, journal: Journal, file: Path) -> None:
    """Model, engine, producer and devices of this machine are the cell's: asked before an engine is loaded.

    Raises:
        Refusal: the first that is not.
    """
    check_model(cell, file)
    check_installed(adapter)
    check_producer(cell, adapter, journal, file.parent / "repetitions.jsonl")
    check_devices(adapter.device, cell.identity.topology, file, cell.identity.nodes or 1)


def measure_missing(cell: FrozenCell, file: Path, journal: Journal, patience: Patience, head: Head) -> Supervised:
    """Run the engine until every point has a line; says why when the exit code is not 0."""
    adapter = adapter_of(cell.identity.runtime_backend_version, file)
    status = StatusFile(cell, file.parent, len(journal.finished))
    try:
        check_here(cell, adapter, journal, file)
    except Refusal as refusal:
        status.write("failed", str(refusal))
        raise
    try:
        ended = head.supervise(engines_of(cell, file), patience, producer_record(cell, adapter), status.watch)
    except Stopped as stop:
        points = points_kept(cell, file)
        status.write("stopped", str(stop), points)
        kept = f"{points} of {len(cell.points.points())} points are measured and kept"
        print(f"{stop}: {cell.name} at {status.current_point}: {kept}", file=sys.stderr)
        return Supervised(128 + stop.number, f"{stop}: {kept}")
    if ended.code and points_kept(cell, file) < len(cell.points.points()):
        status.write("failed", ended.reason)
        if ended.code not in (REFUSED, HELD):  # a rank that refuses has said it all
            print(f"failed: {cell.name} at {status.current_point}: {ended.reason}", file=sys.stderr)
        return ended
    if ended.code:
        print(f"{cell.name}: every point is measured; the engine ended badly: {ended.reason}", file=sys.stderr)
    status.write("finished")
    return Supervised(0)


def points_kept(cell: FrozenCell, file: Path) -> int:
    return len(read_journal(file.parent / "repetitions.jsonl", cell.digest).finished)


def write_once(file: Path, struct: Struct) -> str:
    """Write an artifact that is not there yet; one that is there must be the same, since nothing overwrites it.

    Returns the sha256 of the file.
    """
    if not file.exists():
        return write_struct(file, struct)
    expected, found = sha256(struct_bytes(struct)), sha256(read_bytes(file, file.name))
    if expected != found:
        raise Refusal(f"sha256 of {file.name}", f"{expected} of repetitions.jsonl", found, file)
    return found


def write_artifacts(cell: FrozenCell, folder: Path) -> None:
    """One artifact a rank, and the receipt: functions of the journal alone."""
    journal_file = folder / "repetitions.jsonl"
    journal = read_journal(journal_file, cell.digest)
    files = {journal_file.name: sha256(journal_file.read_bytes())}
    for rank in range(journal.ranks):
        files[rank_file(rank)] = write_once(folder / rank_file(rank), assemble(cell, journal, rank))
    write_once(folder / "receipt.json", receipt(cell, journal, files))


def engines_of(cell: FrozenCell, file: Path) -> Engines:
    device = adapter_of(cell.identity.runtime_backend_version, file).device
    return Engines("producer.measure_rank", ["--cell", str(file)], cell.identity.topology, device)


def follow_cell(cell: FrozenCell, file: Path, patience: Patience, place: Place) -> int:
    """Run another node's part of what the head measures; returns the head's exit code."""

    def facts() -> dict[str, Any]:
        check_model(cell, file)
        adapter = adapter_of(cell.identity.runtime_backend_version, file)
        check_installed(adapter)
        check_devices(adapter.device, cell.identity.topology, file, place.nodes)
        return producer_record(cell, adapter)

    return follow(place, engines_of(cell, file), patience, facts)


def measure(cell: FrozenCell, file: Path, patience: Patience, head: Head, number: int) -> int:
    """Measure what is missing of the cell in `file`, and write its artifacts; returns the exit code."""
    with claim(file.parent), recorded(file.parent / "attempts.jsonl", number) as attempt:
        check_cell(cell, file)
        journal = read_journal(file.parent / "repetitions.jsonl", cell.digest)
        if len(journal.finished) < len(cell.points.points()):
            attempt.ended = measure_missing(cell, file, journal, patience, head)
        if not attempt.ended.code:
            write_artifacts(cell, file.parent)
    return attempt.ended.code


def run_cell(file: Path, patience: Patience, given: Place, number: int = 1) -> int:
    """This node's part of the cell in `file`: all of it where there is one node; returns the exit code."""
    cell = read_model(FrozenCell, file, "frozen cell")
    place = place_of(cell.identity.nodes or 1, given, os.environ)
    if place.node_rank:
        check_cell(cell, file)
        return follow_cell(cell, file, patience, place)
    with head_of(place, patience) as head:
        head.code = measure(cell, file, patience, head, number)
    return head.code


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cell", type=Path, required=True, help="cell.json")
    parser.add_argument("--start-timeout", type=float, default=3600, help="seconds until an engine must run")
    parser.add_argument("--step-timeout", type=float, default=600, help="seconds that one step may take")
    parser.add_argument("--attempt", type=int, default=1, help="of the driver that started this one")
    add_arguments(parser)
    arguments = parser.parse_args()
    stop_on_signals()
    patience = Patience(arguments.start_timeout, arguments.step_timeout)
    try:
        code = run_cell(arguments.cell, patience, given_place(arguments), arguments.attempt)
    except Stopped as stop:  # before or after the engine: nothing of it runs
        print(f"{stop}: {arguments.cell}", file=sys.stderr)
        code = 128 + stop.number
    sys.exit(code)


if __name__ == "__main__":
    run(main)
