"""Whether the engines that measured a cell are the one that was accepted.

Each engine start of a cell keeps the records that a probe keeps. They are compared leaf by leaf with the probe's of
the cell's phase, or with what a declared profile says.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from producer.adapters import Adapter, adapter_of, read_pins
from producer.journal import Journal
from schemas.canonical import Strict, digest, parse, read_bytes, read_model, sha256
from schemas.errors import Refusal
from schemas.journal import RankSession, SessionLine
from schemas.observation import ProbeRecord, SchedulerRecord, WorkerRecord
from schemas.plan import FrozenCell
from schemas.profile import Profile

from rank_checks import close
from runtime_compatibility import look_up

Record = WorkerRecord | SchedulerRecord
PROBE, PROFILE = "the accepted probe", "the accepted profile"
NOTHING: Any = object()
"""In place of a value that one of two records does not have."""


class Freedom(NamedTuple):
    """Leaves of a record in which a launch may differ from the accepted one; `*` is any one part of a path.

    `per block`: as many times the accepted size as the pool is larger, or the very same.
    """

    path: str
    extent: Literal["any", "per block"]
    reason: str


IN_LAYER_ORDER = "layers whose blocks lie together begin, and reach, as far as the pool is large"
OF_ONE_MACHINE = "a figure of one machine: the blocks that it leaves room for are compared"
AT_LEAST = "a larger pool holds what was planned; a smaller one is refused by its free blocks"
MAY_DIFFER = (
    Freedom("attempt_id", "any", "each launch has its own"),
    Freedom("model.model", "any", "where the model lies: the digest of its config is compared"),
    Freedom("hardware.total_memory_bytes", "any", OF_ONE_MACHINE),
    Freedom("cache.available_cache_bytes", "any", OF_ONE_MACHINE),
    Freedom("hardware.threads", "any", "threads that a cell fixes are compared with its own environment"),
    Freedom("cache.num_blocks", "any", AT_LEAST),
    Freedom("num_blocks", "any", AT_LEAST),
    Freedom("initial_free_blocks", "any", AT_LEAST),
    Freedom("max_concurrency", "per block", "the blocks of the pool over those of one request"),
    Freedom("cache.storages.*.size_bytes", "per block", "the whole pool"),
    Freedom("cache.tensor_allocations.*.size", "per block", "the whole pool"),
    Freedom("cache.tensor_allocations.*.offset", "per block", IN_LAYER_ORDER),
    Freedom("cache.tensor_allocations.*.layer_stride", "per block", IN_LAYER_ORDER),
    Freedom("cache.layer_tensors.*.*.storage_offset_bytes", "per block", IN_LAYER_ORDER),
    Freedom("cache.layer_tensors.*.*.stride_bytes.*", "per block", IN_LAYER_ORDER),
    Freedom("cache.layer_tensors.*.*.shape.0", "per block", "the axis that counts blocks"),
)

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
    record = read_model(ProbeRecord, files[1], "probe record")
    return Accepted(profile, record, files[1].name, sha256(read_bytes(files[1], "probe record")))


class Difference(NamedTuple):
    """A leaf that two plain values do not have in common."""

    path: tuple[str, ...]
    expected: Any
    found: Any

    def line(self, of: str) -> str:
        return f"{'.'.join(self.path)}: expected {shown(self.expected)} of {of}, found {shown(self.found)}"


def shown(value: Any) -> str:
    """A leaf as it is; of a part of a record how much there is."""
    if value is NOTHING:
        return "nothing"
    if isinstance(value, dict):
        return f"{len(value)} fields"
    if isinstance(value, list) and any(isinstance(part, dict | list) for part in value):
        return f"{len(value)} parts"
    return repr(value)


def differences(expected: Any, found: Any, path: tuple[str, ...] = ()) -> Iterator[Difference]:
    """Every leaf that is not the same, by value and type; lists of different lengths count as one."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in (*expected, *(key for key in found if key not in expected)):
            yield from differences(expected.get(key, NOTHING), found.get(key, NOTHING), (*path, key))
    elif isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        for index, (before, now) in enumerate(zip(expected, found, strict=True)):
            yield from differences(before, now, (*path, str(index)))
    elif type(expected) is not type(found) or expected != found:
        yield Difference(path, expected, found)


def extent_of(path: tuple[str, ...]) -> str:
    """How far a leaf may differ; empty for not at all."""
    for freedom in MAY_DIFFER:
        parts = freedom.path.split(".")
        if len(parts) == len(path) and all(part in ("*", own) for part, own in zip(parts, path, strict=True)):
            return freedom.extent
    return ""


def blocks_of(record: Record) -> int:
    return record.cache.num_blocks if isinstance(record, WorkerRecord) else record.num_blocks


def record_findings(expected: Record, found: Record, of: str) -> Iterator[str]:
    """What a process says otherwise than the same process `of` another launch."""
    accepted_blocks, blocks = blocks_of(expected), blocks_of(found)
    accepted, own = (record.model_dump(mode="json", exclude_none=True) for record in (expected, found))
    for difference in differences(accepted, own):
        extent = extent_of(difference.path)
        sizes = difference.expected, difference.found
        in_proportion = all(isinstance(size, int | float) for size in sizes) and close(
            sizes[0] * blocks, sizes[1] * accepted_blocks
        )
        if not (extent == "any" or (extent == "per block" and in_proportion)):
            yield f"{found.label}: {difference.line(of)}"


def launch_findings(expected: Sequence[Record], found: Sequence[Record], of: str) -> Iterator[str]:
    """What a launch says otherwise than another one; in what order its processes stand says nothing."""
    reference = {record.label: record for record in expected}
    for record in found:
        if record.label in reference:
            yield from record_findings(reference[record.label], record, of)
        else:
            yield f"{record.label}: expected one of {', '.join(sorted(reference))} of {of}, found another"


def field_findings(profile: Profile, record: Record) -> Iterator[str]:
    """The fields that a profile and a record both have."""
    plain = record.model_dump(mode="json")
    fields = WORKER_FIELDS if isinstance(record, WorkerRecord) else SCHEDULER_FIELDS
    for name, place in fields:
        for difference in differences(getattr(profile, name), look_up(plain, place), (place,)):
            yield f"{record.label}: {difference.line(PROFILE)}"


def capacity_findings(profile: Profile, records: RankRecords) -> Iterator[str]:
    """No process of a rank has fewer blocks than the profile's plan was made for."""
    free = records.scheduler.initial_free_blocks
    if free < profile.free_blocks:
        wanted = f"at least {profile.free_blocks} of {PROFILE}"
        yield f"{records.scheduler.label}: initial_free_blocks: expected {wanted}, found {free}"
    for record in records.all:
        if blocks_of(record) <= profile.free_blocks:
            field = "cache.num_blocks" if isinstance(record, WorkerRecord) else "num_blocks"
            wanted = f"more than the {profile.free_blocks} free blocks of {PROFILE}"
            yield f"{record.label}: {field}: expected {wanted}, found {blocks_of(record)}"


def runtime_findings(adapter: Adapter, record: Record) -> Iterator[str]:
    """The engine is the adapter's, by the bytes of its pinned files; nothing of the process was left open."""
    expected = {
        "distribution": adapter.distribution,
        "version": adapter.version,
        "source_files": read_pins(adapter),
    }
    found = record.runtime.model_dump(include=set(expected))
    for difference in differences(expected, found, ("runtime",)):
        yield f"{record.label}: {difference.line('the adapter')}"
    if record.unresolved_fields:
        yield f"{record.label}: unresolved_fields: expected none, found {', '.join(record.unresolved_fields)}"


def rank_findings(tp: int, rank: int, own: RankSession, records: RankRecords) -> Iterator[str]:
    """Every process of a data-parallel rank is there once, and says what the session's own blocks say."""
    wanted = [(rank, number, 0) for number in range(tp)]
    ranks = sorted((worker.dp_rank, worker.tp_rank, worker.pp_rank) for worker in records.workers)
    if ranks != wanted:
        yield f"workers: expected the ranks (dp, tp, pp) {wanted}, found {ranks}"
    scheduler = records.scheduler
    if scheduler.dp_rank != rank:
        yield f"scheduler: expected that of rank {rank}, found {scheduler.label}"
    for name, expected, found in (
        ("num_blocks", own.limits.get("num_gpu_blocks"), scheduler.num_blocks),
        ("initial_free_blocks", own.capacity.get("usable_blocks_without_watermark"), scheduler.initial_free_blocks),
    ):
        if expected != found:
            yield f"{scheduler.label}: {name}: expected {expected} of the session, found {found}"
    for worker in records.workers:
        if worker.cache.num_blocks != scheduler.num_blocks:
            wanted_blocks = f"{scheduler.num_blocks} of {scheduler.label}"
            yield f"{worker.label}: cache.num_blocks: expected {wanted_blocks}, found {worker.cache.num_blocks}"
        if worker.hardware.device_name != own.device_name:
            device = worker.hardware.device_name
            yield f"{worker.label}: hardware.device_name: expected {own.device_name} of the session, found {device}"


def read_records(rank: int, own: RankSession) -> RankRecords:
    """The records of one rank of a session.

    Raises:
        Refusal: they are none; names the field.
    """
    try:
        return parse(RankRecords, own.runtime, f"rank {rank}")
    except Refusal as refusal:
        raise Refusal(f"rank {rank} runtime.{refusal.field}", refusal.expected, refusal.found, "journal") from None


def attempt_findings(records: Sequence[Record], known: Mapping[str, str]) -> Iterator[str]:
    """One launch has one attempt id, and no other launch has it: `known` are those of others, and whose."""
    ids = sorted({record.attempt_id for record in records})
    if len(ids) > 1:
        yield f"attempt_id: expected one of all processes, found {', '.join(ids)}"
    for attempt in ids:
        if attempt in known:
            yield f"attempt_id: expected one of its own, found {attempt} of {known[attempt]}"


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
            records[rank] = read_records(rank, own)
        except Refusal as refusal:
            unreadable.append(f"{refusal.field}: expected {refusal.expected}, found {refusal.found}")
    return records, unreadable


def sound_findings(cell: FrozenCell, session: SessionLine, launch: Mapping[int, RankRecords]) -> Iterator[str]:
    """What stands against the records of one engine start by themselves."""
    adapter = adapter_of(cell.identity.runtime_backend_version, cell.name)
    for rank, records in launch.items():
        yield from rank_findings(cell.identity.topology.tp, rank, session.ranks[rank], records)
        for record in records.all:
            yield from runtime_findings(adapter, record)


def profile_findings(profile: Profile, launch: Mapping[int, RankRecords]) -> Iterator[str]:
    """What the records of one engine start say otherwise than a profile that no probe witnesses."""
    for records in launch.values():
        for record in records.all:
            yield from field_findings(profile, record)


def binding_findings(cell: FrozenCell, accepted: Accepted, journal: Journal) -> Iterator[str]:
    """Everything that keeps the engine starts of a cell from being launches of what was accepted.

    Starts on a declared profile are also compared with the first of them.
    """
    yield from accepted_findings(cell, accepted)
    profile, probe = accepted.profile, accepted.record
    reference: list[Record] = [] if probe is None else [*probe.workers, *probe.schedulers]
    known = {} if probe is None else {probe.attempt_id: PROBE}
    for session in journal.sessions:
        where = f"session {session.session}"
        launch, unreadable = read_launch(session)
        records = [record for of_rank in launch.values() for record in of_rank.all]
        found = [*unreadable, *sound_findings(cell, session, launch), *attempt_findings(records, known)]
        for of_rank in launch.values():
            found += capacity_findings(profile, of_rank)
        if probe is None:
            found += profile_findings(profile, launch)
        if reference:
            found += launch_findings(reference, records, "session 1" if probe is None else PROBE)
        yield from (f"{where} {line}" for line in found)
        known |= {record.attempt_id: where for record in records}
        reference = reference or records
