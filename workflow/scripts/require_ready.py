"""Refuse a readiness that is not ready, with its first blocker; the verdict itself stays where it is."""

import argparse
from pathlib import Path

from schemas.canonical import read_model, write_atomic
from schemas.errors import Refusal, run
from schemas.evidence import Readiness


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--readiness", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    readiness = read_model(Readiness, arguments.readiness, "readiness")
    if readiness.status != "ready":
        raise Refusal("readiness", "ready", f"{readiness.status}: {readiness.blockers[0]}", arguments.readiness)
    write_atomic(arguments.output, f"{readiness.plan_sha256}\n".encode())


if __name__ == "__main__":
    run(main)
