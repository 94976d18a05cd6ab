"""Resolve a campaign file to its request: strict, with defaults filled in."""

import argparse
from pathlib import Path

from producer.resolving import read_campaign, resolve
from schemas.canonical import digest, short, write_model
from schemas.errors import Refusal, run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--campaign", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    request = resolve(read_campaign(arguments.campaign), arguments.campaign)
    expected = f"request-{short(digest(request))}.json"
    if arguments.output.name != expected:
        raise Refusal("request", expected, arguments.output.name, arguments.campaign)
    write_model(arguments.output, request)


if __name__ == "__main__":
    run(main)
