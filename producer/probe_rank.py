"""One data-parallel rank of a probe: its engine and its records. `run_probe` starts and watches it.

Rank 0 writes the records of all ranks.
"""

import argparse
from pathlib import Path

import msgspec

from producer.adapters import adapter_of, pins_digest
from producer.heartbeat import Heartbeat
from producer.lockstep import Lockstep
from producer.nodes import add_arguments, given_place
from producer.resolving import launch_of, probe_digest, read_campaign, resolve
from producer.supervise import prepare_rank
from schemas.canonical import parse, write_model
from schemas.errors import run
from schemas.observation import ProbeRecord


def probe_rank(arguments: argparse.Namespace, heart: Heartbeat) -> None:
    """Start this rank's engine, together with the other ranks; rank 0 writes what all of them are."""
    request = resolve(read_campaign(arguments.campaign), arguments.campaign)
    deployment = request.deployments[arguments.deployment]

    from producer import engine

    rank = engine.Rank(arguments.rank, deployment.topology.dp, given_place(arguments))
    if rank.follows:
        engine.follow(deployment.model, deployment, request.environment, rank, heart)
        return
    started = engine.start(deployment.model, deployment, request.environment, rank)
    own = msgspec.json.encode((started.workers, started.observe_scheduler()))
    ranks = [msgspec.json.decode(data) for data in Lockstep(started.group).exchange(own)]
    started.stop()
    if arguments.rank != 0:
        return
    record = {
        "probe_digest": probe_digest(request, deployment),
        "attempt_id": rank.place.attempt_id,
        "phase": arguments.phase,
        "launch": launch_of(request, deployment),
        "pins_sha256": pins_digest(adapter_of(request.runtime_backend_version, arguments.campaign)),
        "workers": [worker for workers, _ in ranks for worker in workers],
        "schedulers": [scheduler for _, scheduler in ranks],
    }
    write_model(arguments.output, parse(ProbeRecord, record, arguments.output))
    blocks = min(scheduler["num_blocks"] for _, scheduler in ranks)
    print(
        f"probe {arguments.deployment} {arguments.phase}: {blocks} blocks, engine up in {started.start_seconds:.1f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--campaign", type=Path, required=True)
    parser.add_argument("--deployment", required=True)
    parser.add_argument("--phase", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--rank", type=int, required=True)
    add_arguments(parser)
    parser.add_argument("--supervisor", type=int, required=True, help="process that watches this one")
    parser.add_argument("--heartbeat", type=int, required=True, help="file descriptor of the shared pulse")
    arguments = parser.parse_args()
    prepare_rank(arguments.supervisor)
    heart = Heartbeat(arguments.heartbeat)
    with heart.telling():
        probe_rank(arguments, heart)


if __name__ == "__main__":
    run(main)
