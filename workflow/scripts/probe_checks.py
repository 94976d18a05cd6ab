"""Whether probe records are what their deployment's launch must leave: each doubt is a line with both values.

What one process says by itself is checked in worker_checks, scheduler_checks, cache_groups and cache_placement; here
is what a launch as a whole must be, and what its processes and its phases must have in common.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain

from producer.adapters import adapter_of, pins_digest
from producer.resolving import launch_of, probe_digest
from schemas.observation import CacheMemory, EngineRecords, ProbeRecord, SchedulerRecord, WorkerRecord
from schemas.request import Request, ResolvedDeployment

from cache_groups import group_findings, memory_findings
from cache_placement import placement_findings
from record_differences import RANK_OWN, Difference, differ, differences, scheduler_differences, worker_differences
from scheduler_checks import scheduler_findings
from worker_checks import worker_findings

ATTEMPT = re.compile("[0-9a-f]{32}")
"""The id of a launch: `uuid4().hex` (producer/control.py)."""

RANKS = {"dp_rank", "tp_rank", "pp_rank"}


def labelled(label: str, lines: Iterable[object]) -> Iterator[str]:
    for line in lines:
        yield f"{label}: {line}"


def launch_findings(request: Request, deployment: ResolvedDeployment, record: ProbeRecord) -> Iterator[str]:
    """The record is of this launch of this deployment, by this adapter."""
    adapter = adapter_of(request.runtime_backend_version, "request")
    yield from differ(
        {
            "probe_digest": (probe_digest(request, deployment), record.probe_digest),
            "pins_sha256": (pins_digest(adapter), record.pins_sha256),
        }
    )
    yield from map(str, differences(launch_of(request, deployment), record.launch, "launch"))


def rank_findings(deployment: ResolvedDeployment, records: EngineRecords, attempt_id: str) -> Iterator[str]:
    """Every expected rank is there once, and every record is of one attempt that has an id."""
    topology = deployment.topology
    yield from differ(
        {
            "worker ranks (dp, tp, pp)": (
                [(dp, tp, 0) for dp in range(topology.dp) for tp in range(topology.tp)],
                sorted((worker.dp_rank, worker.tp_rank, worker.pp_rank) for worker in records.workers),
            ),
            "scheduler ranks": (
                list(range(topology.dp)),
                sorted(scheduler.dp_rank for scheduler in records.schedulers),
            ),
        }
    )
    if not ATTEMPT.fullmatch(attempt_id):
        yield f"attempt_id: expected 32 hexadecimal digits, found {attempt_id!r}"
    processes: tuple[WorkerRecord | SchedulerRecord, ...] = (*records.workers, *records.schedulers)
    for process in processes:
        yield from labelled(process.label, differ({"attempt_id": (attempt_id, process.attempt_id)}))


def process_findings(request: Request, deployment: ResolvedDeployment, records: EngineRecords) -> Iterator[str]:
    """What each process says by itself, and what the processes of each data-parallel rank must have in common.

    A rank that says what another one said, without a doubt, leaves none either.
    """
    sound_workers: set[str] = set()
    sound_ranks: set[tuple[str, ...]] = set()
    said: dict[int, list[str]] = {}
    for worker in records.workers:
        own = worker.model_dump_json(exclude=RANKS)
        said.setdefault(worker.dp_rank, []).append(own)
        if own not in sound_workers:
            lines = [*own_findings(request, deployment, worker)]
            yield from labelled(worker.label, lines)
            if not lines:
                sound_workers.add(own)
    for scheduler in records.schedulers:
        rank = (scheduler.model_dump_json(exclude=RANKS), *said.get(scheduler.dp_rank, []))
        if rank not in sound_ranks:
            workers = [worker for worker in records.workers if worker.dp_rank == scheduler.dp_rank]
            lines = [
                *labelled(scheduler.label, scheduler_findings(request, deployment, scheduler)),
                *memory_findings(deployment, workers, scheduler),
            ]
            yield from lines
            if not lines:
                sound_ranks.add(rank)


def own_findings(request: Request, deployment: ResolvedDeployment, worker: WorkerRecord) -> Iterator[str]:
    """What one worker says of its engine and of its cache."""
    yield from worker_findings(request, deployment, worker)
    yield from cache_findings(request.runtime_backend_version, worker.cache)


def cache_findings(runtime_version: str, cache: CacheMemory) -> Iterator[str]:
    """What a worker's cache says by itself, as fields of the worker's record."""
    for line in chain(group_findings(runtime_version, cache), placement_findings(cache)):
        yield f"cache.{line}"


def common_findings(records: EngineRecords) -> Iterator[str]:
    """Every rank has what the first one has, but for the size of its pool and the shard of the weights."""
    first_worker, first_scheduler = first_of(records)
    for worker in records.workers[1:]:
        found = (each for each in worker_differences(first_worker, worker) if each.field not in RANK_OWN)
        yield from labelled(worker.label, beside(first_worker.label, found))
    for scheduler in records.schedulers[1:]:
        other = scheduler_differences(first_scheduler, scheduler)
        yield from labelled(scheduler.label, beside(first_scheduler.label, other))
    for scheduler in records.schedulers[:1]:
        expected, own = first_worker.runtime.model_dump(), scheduler.runtime.model_dump()
        if expected != own:
            yield f"{scheduler.label}: runtime: expected that of {first_worker.label}, {expected}, found {own}"


def phase_findings(reference: ProbeRecord, record: ProbeRecord) -> Iterator[str]:
    """Both phases are launched alike: rank by rank, everything is equal but the size of the pool."""
    workers = {worker.label: worker for worker in reference.workers}
    schedulers = {scheduler.label: scheduler for scheduler in reference.schedulers}
    label = f"the {reference.phase} launch"
    for worker in record.workers:
        if (other := workers.get(worker.label)) is not None:
            yield from labelled(worker.label, beside(label, worker_differences(other, worker)))
    for scheduler in record.schedulers:
        if (twin := schedulers.get(scheduler.label)) is not None:
            yield from labelled(scheduler.label, beside(label, scheduler_differences(twin, scheduler)))


def first_of(records: EngineRecords) -> tuple[WorkerRecord, SchedulerRecord]:
    return records.workers[0], records.schedulers[0]


def beside(label: str, found: Iterable[Difference]) -> Iterator[str]:
    for field, expected, other in found:
        yield f"{field}: expected {expected!r} of {label}, found {other!r}"


def diagnose(request: Request, deployment: ResolvedDeployment, records: list[ProbeRecord]) -> list[str]:
    """Every reason why these records are no profile, with the phase and the process in front."""
    found = list(differ({"phases": (sorted(deployment.phases), sorted(record.phase for record in records))}))
    for record in records:
        found += labelled(record.phase, launch_findings(request, deployment, record))
        ranks = list(rank_findings(deployment, record, record.attempt_id))
        found += labelled(record.phase, ranks)
        if not record.workers or not record.schedulers:
            continue
        found += labelled(record.phase, process_findings(request, deployment, record))
        found += labelled(record.phase, common_findings(record))
    for record in records[1:]:
        found += labelled(record.phase, phase_findings(records[0], record))
    for attempt_id, times in Counter(record.attempt_id for record in records).items():
        if times > 1:
            found.append(f"attempt_id: expected one of each phase's launch, found {attempt_id!r} {times} times")
    return list(dict.fromkeys(found))
