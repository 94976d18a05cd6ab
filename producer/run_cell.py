"""Measure one frozen cell: claim it, resume its journal, start the engine once, write the rank artifact.

Exit codes: 0 measured, 2 refused, 75 somebody else holds the cell, 1 the measurement failed.
"""

import argparse
import contextlib
import os
import socket
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from producer.adapters import Adapter, adapter_of, check_installed
from producer.artifact import assemble, contract_of, producer_record, receipt
from producer.journal import JournalWriter, read_journal
from producer.progress import Progress
from producer.session import MeasurementFailed, measure, utc_now
from producer.tokens import TokenStream
from schemas.canonical import canonical_bytes, read_model, sha256, write_atomic
from schemas.errors import Held, Refusal, run
from schemas.journal import PointLine, SessionLine
from schemas.native import write_struct
from schemas.plan import FrozenCell

STREAM_SEED = "53"


@contextlib.contextmanager
def claim(folder: Path) -> Iterator[None]:
    """Exclusive claim on a cell. The lock belongs to the process, so a dead holder's claim is free at once.

    Raises:
        Held: somebody else has it; names host and process.
    """
    folder.mkdir(parents=True, exist_ok=True)
    holder = folder / "claim.json"
    lock = FileLock(folder / "claim.lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        who = holder.read_text() if holder.exists() else "an unknown process"
        raise Held(f"{folder} is being measured by {who}") from None
    try:
        job = os.environ.get("SLURM_JOB_ID")
        facts = {"host": socket.gethostname(), "pid": os.getpid(), "since": utc_now()}
        write_atomic(holder, canonical_bytes(facts | ({"slurm_job_id": job} if job else {})))
        yield
    finally:
        holder.unlink(missing_ok=True)
        lock.release()


def open_session(cell: FrozenCell, adapter: Adapter, engine: Any, number: int, run_id: str | None) -> SessionLine:
    """The line that opens this engine start, from what the engine itself says."""
    from producer.engine import GC_POLICY
    from producer.observe import observe_engine

    scheduler = engine.scheduler
    expected = {
        "block_size": cell.block_size,
        "hash_block_size": cell.hash_block_size,
        "cache_hit_alignment_tokens": cell.cache_hit_alignment_tokens,
    }
    found = {
        "block_size": scheduler.block_size,
        "hash_block_size": scheduler.hash_block_size,
        "cache_hit_alignment_tokens": scheduler.cache_config.cache_hit_alignment_tokens,
    }
    for field, value in expected.items():
        if found[field] != value:
            raise Refusal(f"engine {field}", f"{value} of the accepted profile", found[field], cell.name)
    snapshot, cudagraph = observe_engine(scheduler)
    free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    limits = {
        "max_num_scheduled_tokens": scheduler.max_num_scheduled_tokens,
        "max_num_running_reqs": scheduler.max_num_running_reqs,
        "max_model_len": scheduler.max_model_len,
    }
    feasible = cell.identity.limits.max_batch_size if cell.identity.phase == "decode" else 0
    return SessionLine(
        cell_digest=cell.digest,
        session=number,
        run_id=run_id or uuid.uuid4().hex,
        dp_rank=0,
        dp_size=1,
        started_at=utc_now(),
        engine_start_seconds=engine.start_seconds,
        producer=producer_record(cell, adapter.distribution, STREAM_SEED) | {"gc_policy": GC_POLICY},
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


def measure_missing(cell: FrozenCell, adapter: Adapter, folder: Path) -> float:
    """Start the engine and measure the points without a line; returns seconds spent in the producer's overrides."""
    from producer import engine as engine_half

    journal_file = folder / "repetitions.jsonl"
    journal = read_journal(journal_file, cell.digest)
    identity = cell.identity
    engine = engine_half.start(cell.model, identity, identity.environment, adapter)
    number = len(journal.sessions) + 1
    run_id = journal.sessions[0].run_id if journal.sessions else None
    writer = JournalWriter(journal_file)
    writer.append(open_session(cell, adapter, engine, number, run_id))
    points = cell.points.points()
    progress = Progress(folder / "progress.json", cell.name, len(points), len(journal.finished))

    def finish(line: PointLine) -> None:
        writer.append(line)
        progress.finished(line)

    conversation = measure(
        TokenStream(STREAM_SEED, cell.vocab_size),
        contract_of(cell),
        identity.phase,
        points,
        cell.cache_hit_alignment_tokens,
        journal.finished,
        number,
        time.monotonic,
        finish,
    )
    with engine_half.frozen_collector():
        engine.scheduler.begin(conversation, journal.next_forward_index)
        engine.run_conversation()
    writer.close()
    return engine.scheduler.overhead_seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cell", type=Path, required=True, help="cell.json")
    arguments = parser.parse_args()
    cell = read_model(FrozenCell, arguments.cell, "frozen cell")
    folder = arguments.cell.parent
    if folder.name != cell.name:
        raise Refusal("frozen cell", f"the folder's name {folder.name}", cell.name, arguments.cell)
    adapter = adapter_of(cell.identity.runtime_backend_version, arguments.cell)

    with claim(folder):
        journal_file = folder / "repetitions.jsonl"
        overhead = 0.0
        if len(read_journal(journal_file, cell.digest).finished) < len(cell.points.points()):
            check_installed(adapter)
            try:
                overhead = measure_missing(cell, adapter, folder)
            except MeasurementFailed as failure:
                print(f"failed: {cell.name}: {failure}", file=sys.stderr)
                sys.exit(1)
        journal = read_journal(journal_file, cell.digest)
        files = {
            "repetitions.jsonl": sha256(journal_file.read_bytes()),
            "benchmark.json": write_struct(folder / "benchmark.json", assemble(cell, journal)),
        }
        write_struct(folder / "receipt.json", receipt(cell, journal, files, overhead))


if __name__ == "__main__":
    run(main)
