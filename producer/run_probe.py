"""Start one deployment's engine once and record what memory it really has."""

import argparse
import contextlib
from pathlib import Path

from producer.adapters import adapter_of, check_installed, pins_digest
from producer.exclusive import exclusive_devices
from producer.resolving import launch_of, probe_digest, read_campaign, resolve
from schemas.canonical import parse, short, write_model
from schemas.errors import Refusal, run
from schemas.observation import ProbeRecord


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--campaign", type=Path, required=True, help="campaign file")
    parser.add_argument("--deployment", required=True)
    parser.add_argument("--digest", required=True, help="digest of the probe, or its first digits")
    parser.add_argument("--phase", required=True)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()

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

    from producer import engine

    with contextlib.ExitStack() as held:
        if adapter.device != "cpu":  # a probe measures no time: on the CPU it may run beside another
            held.enter_context(exclusive_devices(adapter.device, deployment.topology.gpus))
        started = engine.start(deployment.model, deployment, request.environment, adapter)
        workers = started.observe_workers()
    from producer.observe import observe_scheduler

    record = {
        "probe_digest": digest,
        "phase": arguments.phase,
        "launch": launch_of(request, deployment),
        "pins_sha256": pins_digest(adapter),
        "workers": workers,
        "schedulers": [observe_scheduler(started.scheduler)],
    }
    write_model(arguments.output, parse(ProbeRecord, record, arguments.output))
    print(
        f"probe {arguments.deployment} {arguments.phase}: "
        f"{started.scheduler.kv_cache_config.num_blocks} blocks, engine up in {started.start_seconds:.1f} s"
    )


if __name__ == "__main__":
    run(main)
