"""One data-parallel rank of a cell: its engine, its side of the conversation. `run_cell` starts and watches it.

Rank 0 writes the journal; a point has one line, with what every rank did.
"""

import argparse
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import msgspec

from producer.adapters import adapter_of
from producer.artifact import contract_of
from producer.device_state import reader_of
from producer.exclusive import utc_now
from producer.heartbeat import Heartbeat
from producer.journal import Journal, JournalWriter, check_sessions, read_journal
from producer.launch_checks import refuse_unmodelled
from producer.lockstep import Lockstep
from producer.nodes import Place, add_arguments, given_place
from producer.progress import PointLog
from producer.record import producer_record, serving_config
from producer.session import Host, MeasurementFailed, measure
from producer.supervise import prepare_rank
from producer.tokens import TokenStream
from schemas.canonical import Strict, parse, read_model
from schemas.errors import Refusal, run
from schemas.journal import PointLine, RankSession, SessionLine, decode_rank_session
from schemas.observation import SchedulerRecord, WorkerRecord
from schemas.plan import FrozenCell


def check_engine(cell: FrozenCell, engine: Any) -> None:
    """The started engine is the one of the accepted profile, on its device, with at least its capacity."""
    scheduler = engine.scheduler
    found = {
        "block_size": scheduler.block_size,
        "hash_block_size": scheduler.hash_block_size,
        "cache_hit_alignment_tokens": scheduler.kv_cache_config.cache_hit_alignment_tokens,
    }
    for field, value in found.items():
        if value != getattr(cell, field):
            raise Refusal(f"engine {field}", f"{getattr(cell, field)} of the accepted profile", value, cell.name)
    if engine.device_names != [cell.device_name] * len(engine.device_names):
        raise Refusal("device", f"{cell.device_name} of the accepted profile", engine.device_names, cell.name)
    free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    if free < cell.free_blocks:
        raise Refusal("engine free blocks", f"at least {cell.free_blocks} of the accepted profile", free, cell.name)


def checked(model: type[Strict], record: dict[str, Any], where: str) -> dict[str, Any]:
    """A record of an engine's process as the journal holds it: of its schema, without absent fields.

    Raises:
        Refusal: a field that the schema does not have so.
    """
    values: dict[str, Any] = parse(model, record, where).model_dump(mode="json", exclude_none=True)
    return values


def rank_session(cell: FrozenCell, engine: Any, rank: int) -> RankSession:
    """What this rank's engine says of itself."""
    from producer.observe import observe_engine

    scheduler = engine.scheduler
    cudagraph = engine.observe_graph()
    observed = engine.observe_scheduler()
    serving = serving_config(observed["groups"], observed["launch"], cell.name)
    free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    limits = {
        "max_num_scheduled_tokens": scheduler.max_num_scheduled_tokens,
        "max_num_running_reqs": scheduler.max_num_running_reqs,
        "max_model_len": scheduler.max_model_len,
    }
    decode = cell.identity.phase == "decode"
    return RankSession(
        dp_rank=rank,
        device_name=engine.device_names[0],
        engine_start_seconds=engine.start_seconds,
        engine=observe_engine(scheduler, cudagraph)
        | {"threads": engine.threads, "collectors": engine.collectors(), "serving_config": serving},
        limits=limits
        | {
            "block_size": scheduler.block_size,
            "num_gpu_blocks": scheduler.kv_cache_config.num_blocks,
            "configured_max_batch_size": cell.identity.limits.max_batch_size,
            "feasible_max_batch_size": cell.identity.limits.max_batch_size if decode else 0,
        },
        cudagraph=cudagraph,
        capacity=limits
        | {
            "usable_blocks_without_watermark": free,
            "usable_blocks_with_watermark": free,
            "kvwarm_eligible": decode,
        },
        runtime={
            "workers": [checked(WorkerRecord, record, cell.name) for record in engine.workers],
            "scheduler": checked(SchedulerRecord, observed, cell.name),
        },
    )


def open_session(cell: FrozenCell, journal: Journal, ranks: list[RankSession]) -> SessionLine:
    """The line that opens this start of the engines."""
    adapter = adapter_of(cell.identity.runtime_backend_version, cell.name)
    return SessionLine(
        previous_sha256="",
        cell_digest=cell.digest,
        session=len(journal.sessions) + 1,
        run_id=journal.sessions[0].run_id if journal.sessions else uuid.uuid4().hex,
        started_at=utc_now(),
        producer=producer_record(cell, adapter),
        ranks=ranks,
    )


def host_of(engine: Any, lockstep: Lockstep, heart: Heartbeat, log: PointLog, writer: JournalWriter | None) -> Host:
    """What the conversation asks of this process; rank 0 has the writer."""

    def started(benchmark_id: int) -> None:
        heart.started(benchmark_id)
        log.started()

    def finish(line: PointLine) -> float:
        seconds = 0.0
        if writer is not None:
            seconds = writer.append(line)
            log.finished(line)
        heart.finished()
        return seconds

    parallel = engine.core.vllm_config.parallel_config
    first = parallel.data_parallel_rank_local * parallel.tensor_parallel_size
    return Host(
        clock=time.monotonic,
        spent=engine.scheduler.spent,
        cached_tokens=engine.scheduler.cached_tokens,
        exchange=lockstep.exchange,
        device_state=reader_of(engine.device, range(first, first + parallel.local_world_size)),
        started=started,
        rejected=heart.rejected,
        finish=finish,
    )


def measure_rank(cell: FrozenCell, folder: Path, rank: int, place: Place, heart: Heartbeat) -> None:
    """Start this rank's engine and measure the points without a line, together with the other ranks."""
    from producer import engine as engine_half

    identity = cell.identity
    parallel = engine_half.Rank(rank, identity.topology.dp, place)
    if parallel.follows:
        engine_half.follow(cell.model, identity, identity.environment, parallel, heart)
        return
    journal_file = folder / "repetitions.jsonl"
    journal = read_journal(journal_file, cell.digest)
    engine = engine_half.start(cell.model, identity, identity.environment, parallel)
    refuse_unmodelled(engine.scheduler, Path(cell.model))
    check_engine(cell, engine)

    def run_dummy_batch() -> None:
        heart.step()
        engine.core.execute_dummy_batch()

    lockstep = Lockstep(engine.group, run_dummy_batch)
    with engine.frozen_collector():
        own = msgspec.json.encode(rank_session(cell, engine, rank))
        session = open_session(cell, journal, [decode_rank_session(data) for data in lockstep.exchange(own)])
        check_sessions([*journal.sessions, session], journal_file)
        writer = JournalWriter(journal_file, journal.last_sha256) if rank == 0 else None
        if writer is not None:
            writer.append(session)
        conversation = measure(
            TokenStream(identity.token_seed, cell.vocab_size, rank),
            contract_of(cell, folder),
            host_of(engine, lockstep, heart, PointLog(cell, folder, len(journal.finished)), writer),
            identity.phase,
            cell.points.points(),
            cell.cache_hit_alignment_tokens,
            journal.finished,
            session.session,
        )
        heart.ready()
        engine.scheduler.begin(conversation, journal.next_forward_index(rank), lockstep, heart.step)
        engine.run_conversation()
    if writer is not None:
        writer.close()
    engine.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cell", type=Path, required=True)
    parser.add_argument("--rank", type=int, required=True)
    add_arguments(parser)
    parser.add_argument("--supervisor", type=int, required=True, help="process that watches this one")
    parser.add_argument("--heartbeat", type=int, required=True, help="file descriptor of the shared pulse")
    arguments = parser.parse_args()
    prepare_rank(arguments.supervisor)
    heart = Heartbeat(arguments.heartbeat)
    cell = read_model(FrozenCell, arguments.cell, "frozen cell")
    try:
        with heart.telling():
            measure_rank(cell, arguments.cell.parent, arguments.rank, given_place(arguments), heart)
    except MeasurementFailed as failure:
        print(f"rank {arguments.rank}: {failure}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    run(main)
