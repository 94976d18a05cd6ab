"""Start one engine of the demo and observe it: what the bare start took, and what the records cost above it.

observe_once.py DEPLOYMENT: prints seconds as one JSON object.
"""

import json
import sys
import time
from pathlib import Path

from producer import engine
from producer.nodes import Place
from producer.resolving import read_campaign, resolve
from schemas.canonical import parse
from schemas.observation import SchedulerRecord, WorkerRecord

CAMPAIGN = Path("config/campaigns/cpu-demo.yaml")

if __name__ == "__main__":
    request = resolve(read_campaign(CAMPAIGN), CAMPAIGN)
    deployment = request.deployments[sys.argv[1]]
    rank = engine.Rank(place=Place(attempt_id="bench"))
    began = time.monotonic()
    started = engine.start(deployment.model, deployment, request.environment, rank)  # observes its workers once
    observed = time.monotonic()
    scheduler = started.observe_scheduler()
    ended = time.monotonic()
    for worker in started.workers:
        parse(WorkerRecord, worker, "bench")
    parse(SchedulerRecord, scheduler, "bench")
    figures = {
        "start_seconds": started.start_seconds,
        "worker_seconds": observed - began - started.start_seconds,
        "scheduler_seconds": ended - observed,
        "parse_seconds": time.monotonic() - ended,
    }
    started.stop()
    print(json.dumps(figures))
