"""Start one deployment's engine once and record what memory it really has."""

import argparse
import os
import sys
from pathlib import Path

from producer.adapters import adapter_of, check_installed
from producer.attempts import recorded
from producer.control import Engines, follow, head_of
from producer.devices import check_devices
from producer.nodes import add_arguments, given_place, nodes_needed, place_of
from producer.resolving import launch_of, probe_digest, read_campaign, resolve
from producer.source_digest import producer_digest
from producer.supervise import Patience, Stopped, Supervised, stop_on_signals
from schemas.canonical import short
from schemas.errors import HELD, REFUSED, Refusal, run


def probe(arguments: argparse.Namespace) -> Supervised:
    """Start the engine, one process a data-parallel rank, and wait for its records."""
    request = resolve(read_campaign(arguments.campaign), arguments.campaign)
    deployment = request.deployments.get(arguments.deployment)
    if deployment is None:
        raise Refusal("deployment", f"one of {list(request.deployments)}", arguments.deployment, arguments.campaign)
    if arguments.phase not in deployment.phases:
        raise Refusal("phase", f"one of {deployment.phases}", arguments.phase, arguments.campaign)
    digest = probe_digest(request, deployment)
    if short(digest) != short(arguments.digest):
        raise Refusal(f"deployments.{arguments.deployment} probe digest", arguments.digest, digest, arguments.campaign)
    adapter = adapter_of(request.runtime_backend_version, arguments.campaign)
    check_installed(adapter)

    options = ["--campaign", str(arguments.campaign), "--deployment", arguments.deployment]
    options += ["--phase", arguments.phase, "--output", str(arguments.output)]
    patience = Patience(arguments.start_timeout, arguments.start_timeout)
    name = f"probe {arguments.deployment} {arguments.phase}"
    facts = {**launch_of(request, deployment), "producer": producer_digest()}
    nodes = nodes_needed(deployment.topology, request.system.node.num_gpus_per_node)
    place = place_of(nodes, given_place(arguments), os.environ)
    check_devices(adapter.device, deployment.topology, arguments.campaign, nodes)
    # A probe measures no time: on the CPU it may run beside another.
    device = None if adapter.device == "cpu" else adapter.device
    engines = Engines("producer.probe_rank", options, deployment.topology, device)
    if place.node_rank:
        sys.exit(follow(place, engines, patience, lambda: facts))
    with head_of(place, patience) as head:
        ended = head.supervise(engines, patience, facts, lambda pulses: None)
        head.code = ended.code
    if ended.code not in (0, REFUSED, HELD):
        print(f"failed: {name}: {ended.reason}", file=sys.stderr)
    return ended


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--campaign", type=Path, required=True, help="campaign file")
    parser.add_argument("--deployment", required=True)
    parser.add_argument("--digest", required=True, help="digest of the probe, or its first digits")
    parser.add_argument("--phase", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--start-timeout", type=float, default=3600, help="seconds until an engine must run")
    parser.add_argument("--attempt", type=int, default=1, help="of the driver that started this one")
    add_arguments(parser)
    arguments = parser.parse_args()
    stop_on_signals()
    try:
        with recorded(arguments.output.with_suffix(".attempts.jsonl"), arguments.attempt) as attempt:
            attempt.ended = probe(arguments)
    except Stopped as stop:
        print(f"{stop}: probe", file=sys.stderr)
        sys.exit(128 + stop.number)
    sys.exit(attempt.ended.code)


if __name__ == "__main__":
    run(main)
