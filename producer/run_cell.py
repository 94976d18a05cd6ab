"""Measure one frozen cell: claim it, resume its journal, start the engine once, write the rank artifact.

Exit codes: 0 measured, 2 refused, 75 somebody else holds the cell, 1 the measurement failed.
"""

import argparse
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from producer.adapters import Adapter, adapter_of, check_installed
from producer.artifact import GC_POLICY, assemble, contract_of, producer_record, receipt
from producer.exclusive import claim, exclusive_devices, utc_now
from producer.journal import JournalWriter, check_sessions, read_journal
from producer.progress import Progress
from producer.session import MeasurementFailed, measure
from producer.tokens import GENERATOR, TokenStream
from schemas.canonical import digest, read_bytes, read_model, sha256
from schemas.errors import Refusal, run
from schemas.journal import PointLine, SessionLine
from schemas.model_config import read_model_config
from schemas.native import Struct, struct_bytes, write_struct
from schemas.plan import FrozenCell


def check_cell(cell: FrozenCell, file: Path) -> None:
    """The frozen cell is what its digest covers: folder, points, and the model as it lies on disk now.

    Raises:
        Refusal: a field that is not the digest's.
    """
    identity = cell.identity
    facts = {
        "cell name": (file.parent.name, cell.name),
        "points_sha256": (identity.points_sha256, digest(cell.points)),
        "token_generator": (GENERATOR, identity.token_generator),
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


def check_engine(cell: FrozenCell, scheduler: Any) -> None:
    """The started engine is the one of the accepted profile, with at least its capacity."""
    found = {
        "block_size": scheduler.block_size,
        "hash_block_size": scheduler.hash_block_size,
        "cache_hit_alignment_tokens": scheduler.cache_config.cache_hit_alignment_tokens,
    }
    for field, value in found.items():
        if value != getattr(cell, field):
            raise Refusal(f"engine {field}", f"{getattr(cell, field)} of the accepted profile", value, cell.name)
    free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    if free < cell.free_blocks:
        raise Refusal("engine free blocks", f"at least {cell.free_blocks} of the accepted profile", free, cell.name)


def open_session(cell: FrozenCell, adapter: Adapter, engine: Any, number: int, run_id: str | None) -> SessionLine:
    """The line that opens this engine start, from what the engine itself says."""
    from producer.observe import observe_engine

    scheduler = engine.scheduler
    snapshot, cudagraph = observe_engine(scheduler)
    free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    limits = {
        "max_num_scheduled_tokens": scheduler.max_num_scheduled_tokens,
        "max_num_running_reqs": scheduler.max_num_running_reqs,
        "max_model_len": scheduler.max_model_len,
    }
    feasible = cell.identity.limits.max_batch_size if cell.identity.phase == "decode" else 0
    return SessionLine(
        previous_sha256="",
        cell_digest=cell.digest,
        session=number,
        run_id=run_id or uuid.uuid4().hex,
        dp_rank=0,
        dp_size=1,
        started_at=utc_now(),
        engine_start_seconds=engine.start_seconds,
        device_name=engine.device_name,
        producer=producer_record(cell, adapter.distribution, GC_POLICY),
        engine=snapshot,
        limits=limits
        | {
            "block_size": scheduler.block_size,
            "num_gpu_blocks": scheduler.kv_cache_config.num_blocks,
            "configured_max_batch_size": cell.identity.limits.max_batch_size,
            "feasible_max_batch_size": feasible,
        },
        cudagraph=cudagraph,
        capacity={
            "common": limits
            | {
                "usable_blocks_without_watermark": free,
                "usable_blocks_with_watermark": free,
                "kvwarm_eligible": cell.identity.phase == "decode",
            }
        },
    )


def measure_missing(cell: FrozenCell, adapter: Adapter, folder: Path) -> None:
    """Start the engine and measure the points without a line."""
    from producer import engine as engine_half

    journal_file = folder / "repetitions.jsonl"
    journal = read_journal(journal_file, cell.digest)
    identity = cell.identity
    engine = engine_half.start(cell.model, identity, identity.environment, adapter)
    check_engine(cell, engine.scheduler)
    number = len(journal.sessions) + 1
    session = open_session(cell, adapter, engine, number, journal.sessions[0].run_id if journal.sessions else None)
    check_sessions([*journal.sessions, session], journal_file)
    writer = JournalWriter(journal_file, journal.last_sha256)
    writer.append(session)
    points = cell.points.points()
    progress = Progress(folder / "progress.json", cell.name, len(points), len(journal.finished))

    def finish(line: PointLine) -> None:
        writer.append(line)
        progress.finished(line)

    conversation = measure(
        TokenStream(identity.token_seed, cell.vocab_size),
        contract_of(cell, folder),
        identity.phase,
        points,
        cell.cache_hit_alignment_tokens,
        journal.finished,
        number,
        time.monotonic,
        lambda: engine.scheduler.overhead_seconds,
        finish,
    )
    with engine.frozen_collector():
        engine.scheduler.begin(conversation, journal.next_forward_index)
        engine.run_conversation()
    writer.close()


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cell", type=Path, required=True, help="cell.json")
    arguments = parser.parse_args()
    cell = read_model(FrozenCell, arguments.cell, "frozen cell")
    folder = arguments.cell.parent
    check_cell(cell, arguments.cell)
    adapter = adapter_of(cell.identity.runtime_backend_version, arguments.cell)

    with claim(folder):
        journal_file = folder / "repetitions.jsonl"
        if len(read_journal(journal_file, cell.digest).finished) < len(cell.points.points()):
            check_model(cell, arguments.cell)
            check_installed(adapter)
            try:
                with exclusive_devices(adapter.device, cell.identity.topology.gpus):
                    measure_missing(cell, adapter, folder)
            except MeasurementFailed as failure:
                print(f"failed: {cell.name}: {failure}", file=sys.stderr)
                sys.exit(1)
        journal = read_journal(journal_file, cell.digest)
        files = {
            "repetitions.jsonl": sha256(journal_file.read_bytes()),
            "benchmark.json": write_once(folder / "benchmark.json", assemble(cell, journal)),
        }
        write_once(folder / "receipt.json", receipt(cell, journal, files))


if __name__ == "__main__":
    run(main)
