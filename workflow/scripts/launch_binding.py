"""Whether the engines that measured a cell are the one that was accepted.

Each engine start of a cell keeps the records that a probe keeps. They are compared field by field with the probe's of
the cell's phase, or with what a declared profile says.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from producer.adapters import Adapter, adapter_of
from producer.journal import Journal
from schemas.canonical import Strict, digest, parse, read_model, recording_reads
from schemas.errors import Refusal
from schemas.journal import RankSession, SessionLine
from schemas.observation import ProbeRecord, SchedulerRecord, WorkerRecord
from schemas.plan import CellIdentity, FrozenCell
from schemas.profile import Profile

from cache_groups import memory_findings, profile_groups
from model_checks import loading_findings, method_findings
from probe_checks import cache_findings
from record_differences import Difference, differ, differences, scheduler_differences, worker_differences
from runtime_compatibility import look_up
from scheduler_checks import MAY_BE_OFF, scheduling_findings
from spec_pages import pool_page_bytes
from worker_checks import (
    device_findings,
    graph_findings,
    recurrent_findings,
    runtime_findings,
    settings_findings,
    thread_findings,
)

Record = WorkerRecord | SchedulerRecord
PROBE, PROFILE = "the accepted probe", "the accepted profile"

MAY_DIFFER = {
    "model.model": "where the model lies may change: the digest of its config is compared",
    "hardware.threads": "a cell need not fix the threads of a process: those that it fixes are checked as its own",
}
"""Field of a worker's record in which a launch may differ from the accepted one -> why.

The size of the pool and what follows from it are no part of `record_differences`: a larger pool holds what was
planned, and `capacity_findings` refuses a smaller one. Attempts differ by their nature (`attempt_findings`).
"""

WORKER_FIELDS = (
    ("model_config_sha256", "model.config_sha256"),
    ("runtime_backend_version", "runtime.version"),
    ("device_name", "hardware.device_name"),
    ("max_num_tokens", "settings.max_num_batched_tokens"),
    ("max_batch_size", "settings.max_num_seqs"),
    ("max_model_len", "settings.max_model_len"),
    ("enable_prefix_caching", "settings.enable_prefix_caching"),
)
SCHEDULER_FIELDS = (
    ("runtime_backend_version", "runtime.version"),
    ("block_size", "block_size"),
    ("hash_block_size", "hash_block_size"),
    ("cache_hit_alignment_tokens", "cache_hit_alignment_tokens"),
    ("enable_prefix_caching", "enable_prefix_caching"),
    ("mamba_cache_mode", "mamba_cache_mode"),
    ("max_num_tokens", "max_num_scheduled_tokens"),
    ("max_batch_size", "max_num_running_reqs"),
    ("max_model_len", "max_model_len"),
)
"""Field of a profile -> where a record says the same."""


class Accepted(NamedTuple):
    """What a cell's launches are bound to: the accepted profile and, unless it is declared, the probe's record."""

    profile: Profile
    record: ProbeRecord | None = None
    record_file: str = ""
    record_sha256: str = ""


class RankRecords(Strict):
    """`RankSession.runtime`: what the processes of one data-parallel rank say of themselves."""

    workers: tuple[WorkerRecord, ...]
    scheduler: SchedulerRecord

    @property
    def all(self) -> tuple[Record, ...]:
        return (*self.workers, self.scheduler)


def read_accepted(files: Sequence[Path], cell: str) -> Accepted:
    """The accepted profile and, of an imported one, the record of the cell's phase.

    Raises:
        Refusal: a file that cannot be read, or other files than such a profile has.
    """
    if not files:
        raise Refusal("accepted profile", f"that of {cell}", "none", "command line")
    profile = read_model(Profile, files[0], "accepted profile")
    if len(files) != (1 if profile.probe_digest is None else 2):
        wanted = "no probe record beside a declared one" if profile.probe_digest is None else "one probe record with it"
        raise Refusal("accepted profile", wanted, [file.name for file in files[1:]], files[0])
    if len(files) == 1:
        return Accepted(profile)
    with recording_reads() as reads:
        record = read_model(ProbeRecord, files[1], "probe record")
    return Accepted(profile, record, files[1].name, reads[str(files[1])])


def accepted_findings(cell: FrozenCell, accepted: Accepted) -> Iterator[str]:
    """The profile is of the cell's launch, and the record is the one that it was imported from."""
    profile, record = accepted.profile, accepted.record
    source = profile.probe_digest or digest(profile)
    if source != cell.identity.probe_digest:
        yield f"accepted profile: expected that of probe {cell.identity.probe_digest}, found that of {source}"
    if record is None:
        return
    wanted = profile.probe_records_sha256.get(accepted.record_file, "none")
    if accepted.record_sha256 != wanted:
        name, found = accepted.record_file, accepted.record_sha256
        yield f"sha256 of the probe's {name}: expected {wanted} of {PROFILE}, found {found}"
    if record.phase != cell.identity.phase:
        yield f"phase of the probe's {accepted.record_file}: expected {cell.identity.phase}, found {record.phase}"


def read_launch(session: SessionLine) -> tuple[dict[int, RankRecords], list[str]]:
    """The records of an engine start by rank; a line for each rank whose records are none."""
    records, unreadable = {}, []
    for rank, own in enumerate(session.ranks):
        try:
            records[rank] = parse(RankRecords, own.runtime, "journal")
        except Refusal as refusal:
            unreadable.append(
                f"rank {rank}: runtime.{refusal.field}: expected {refusal.expected}, found {refusal.found}"
            )
    return records, unreadable


def rank_findings(tensor_parallel: int, rank: int, own: RankSession, records: RankRecords) -> Iterator[str]:
    """Every process of a data-parallel rank is there once, and holds what the session's own blocks say."""
    expected = [(rank, tp, 0) for tp in range(tensor_parallel)]
    found = sorted((worker.dp_rank, worker.tp_rank, worker.pp_rank) for worker in records.workers)
    if found != expected:
        yield f"rank {rank}: worker ranks (dp, tp, pp): expected {expected}, found {found}"
    scheduler = records.scheduler
    facts: list[tuple[Record, str, Any, Any]] = [
        (scheduler, "dp_rank", rank, scheduler.dp_rank),
        (scheduler, "num_blocks", own.limits.get("num_gpu_blocks"), scheduler.num_blocks),
        (
            scheduler,
            "initial_free_blocks",
            own.capacity.get("usable_blocks_without_watermark"),
            scheduler.initial_free_blocks,
        ),
        *((worker, "hardware.device_name", own.device_name, worker.hardware.device_name) for worker in records.workers),
    ]
    for record, field, said, kept in facts:
        if said != kept:
            yield f"{record.label}: {field}: expected {said} of its session, found {kept}"


def process_findings(adapter: Adapter, record: Record) -> Iterator[str]:
    """What stands against one process by itself: another engine than the adapter's, and a cache that cannot be."""
    yield from runtime_findings(adapter, record.runtime)
    if record.unresolved_fields:
        yield f"unresolved_fields: expected none, found {', '.join(record.unresolved_fields)}"
    if isinstance(record, WorkerRecord):
        yield from cache_findings(adapter.version, record.cache)


def declared_findings(identity: CellIdentity, record: Record) -> Iterator[str]:
    """What a process of a cell on a declared profile says otherwise than the cell's launch: no probe was compared.

    Which layers are experts or quantized stands in the model's config; of it, the cell has its strategy and its labels.
    """
    version, device = identity.runtime_backend_version, adapter_of(identity.runtime_backend_version, "cell").device
    if isinstance(record, SchedulerRecord):
        yield from scheduling_findings(version, identity, record)
        # Planning refuses a profile without them.
        for setting in MAY_BE_OFF:
            if record.launch.get(setting) is False:
                yield f"launch.{setting}: expected True, found False"
        return
    experts = identity.parallel_strategy not in ("single", "tp")
    yield from settings_findings(device, identity, experts, record.settings)
    yield from graph_findings(device, identity, record.settings)
    yield from recurrent_findings(record)
    yield from device_findings(device, record)
    yield from loading_findings(identity, record.model)
    yield from method_findings(identity, record.model)
    sidecar = identity.model_sidecar_sha256
    yield from differ({"model.sidecar_sha256": (sidecar, record.model.sidecar_sha256)})
    if not record.settings.enable_chunked_prefill:
        yield "settings.enable_chunked_prefill: expected True, found False"


def capacity_findings(profile: Profile, records: RankRecords) -> Iterator[str]:
    """No process of a rank has fewer blocks than were planned with."""
    scheduler, free = records.scheduler, profile.free_blocks
    if scheduler.initial_free_blocks < free:
        found = scheduler.initial_free_blocks
        yield f"{scheduler.label}: initial_free_blocks: expected at least {free} of {PROFILE}, found {found}"
    for worker in records.workers:
        if worker.cache.num_blocks <= free:
            wanted = f"more than the {free} free blocks of {PROFILE}"
            yield f"{worker.label}: cache.num_blocks: expected {wanted}, found {worker.cache.num_blocks}"


def attempt_findings(records: Sequence[Record], known: Mapping[str, str]) -> Iterator[str]:
    """One launch has one attempt id, and no other launch has it: `known` are those of others, and whose."""
    ids = sorted({record.attempt_id for record in records})
    if len(ids) > 1:
        yield f"attempt_id: expected one of all processes, found {', '.join(ids)}"
    for attempt in ids:
        if attempt in known:
            yield f"attempt_id: expected one of its own, found {attempt} of {known[attempt]}"


def process_differences(expected: Record, found: Record) -> Iterator[Difference]:
    """What a process says otherwise than the same process of another launch, but for what may differ."""
    if isinstance(expected, WorkerRecord) and isinstance(found, WorkerRecord):
        yield from (each for each in worker_differences(expected, found) if each.field not in MAY_DIFFER)
    elif isinstance(expected, SchedulerRecord) and isinstance(found, SchedulerRecord):
        yield from scheduler_differences(expected, found)


def launch_findings(expected: Sequence[Record], found: Sequence[Record], of: str) -> Iterator[str]:
    """What a launch says otherwise than another one; in what order its processes stand says nothing."""
    reference = {record.label: record for record in expected}
    for record in found:
        if record.label not in reference:
            yield f"{record.label}: expected a process of {of}, found another"
            continue
        for field, wanted, own in process_differences(reference[record.label], record):
            yield f"{record.label}: {field}: expected {wanted!r} of {of}, found {own!r}"


def profile_findings(profile: Profile, records: Sequence[Record]) -> Iterator[str]:
    """What a launch says otherwise than a profile that no probe witnesses."""
    for record in records:
        for field, wanted, own in profile_differences(profile, record):
            yield f"{record.label}: {field}: expected {wanted!r} of {PROFILE}, found {own!r}"


def profile_differences(profile: Profile, record: Record) -> Iterator[Difference]:
    plain = record.model_dump(mode="json")
    for name, place in WORKER_FIELDS if isinstance(record, WorkerRecord) else SCHEDULER_FIELDS:
        yield from differences(getattr(profile, name), look_up(plain, place), place)
    if not isinstance(record, WorkerRecord):
        return
    if profile.cudagraph_capture_sizes:
        sizes = record.settings.compilation.cudagraph_capture_sizes
        yield from differences(profile.cudagraph_capture_sizes, sizes, "settings.compilation.cudagraph_capture_sizes")
    try:
        groups = profile_groups(profile.runtime_backend_version, record.cache, pool_page_bytes(record.cache))
    except ValueError:
        return  # `group_findings` says why
    declared, own = ([group.model_dump(exclude={"name"}) for group in each] for each in (profile.groups, groups))
    yield from differences(declared, own, "cache.groups")


def session_findings(
    cell: FrozenCell, accepted: Accepted, session: SessionLine, launch: Mapping[int, RankRecords]
) -> Iterator[str]:
    """What stands against the records of one engine start by themselves, and beside the capacity that was planned."""
    adapter = adapter_of(cell.identity.runtime_backend_version, cell.name)
    for rank, records in launch.items():
        yield from rank_findings(cell.identity.topology.tp, rank, session.ranks[rank], records)
        yield from memory_findings(cell.identity, records.workers, records.scheduler)
        yield from capacity_findings(accepted.profile, records)
        for record in records.all:
            lines = [*process_findings(adapter, record)]
            if isinstance(record, WorkerRecord):
                lines += thread_findings(adapter.device, cell.identity.environment, record)
            if accepted.record is None:
                lines += declared_findings(cell.identity, record)
            yield from (f"{record.label}: {line}" for line in lines)


def binding_findings(cell: FrozenCell, accepted: Accepted, journal: Journal) -> Iterator[str]:
    """Everything that keeps the engine starts of a cell from being launches of what was accepted.

    Starts on a declared profile are also compared with the first of them.
    """
    yield from accepted_findings(cell, accepted)
    profile, probe = accepted.profile, accepted.record
    reference: list[Record] = [] if probe is None else [*probe.workers, *probe.schedulers]
    whose = PROBE
    known = {} if probe is None else {probe.attempt_id: PROBE}
    for session in journal.sessions:
        where = f"session {session.session}"
        launch, found = read_launch(session)
        records = [record for of_rank in launch.values() for record in of_rank.all]
        found += [*session_findings(cell, accepted, session, launch), *attempt_findings(records, known)]
        if probe is None:
            found += profile_findings(profile, records)
        if reference:
            found += launch_findings(reference, records, whose)
        yield from (f"{where} {line}" for line in found)
        known |= {record.attempt_id: where for record in records}
        if not reference:
            reference, whose = records, where
