"""Accept an imported profile: refuses until the campaign file names the profile's digest."""

import argparse
from pathlib import Path

from producer.resolving import read_campaign
from schemas.canonical import read_bytes, sha256, write_atomic
from schemas.errors import Refusal, run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--campaign", type=Path, required=True)
    parser.add_argument("--deployment", required=True)
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    acceptance = read_campaign(arguments.campaign).acceptance
    imported = sha256(read_bytes(arguments.profile, "profile"))
    accepted = imported if acceptance == "auto" else acceptance.get(arguments.deployment)
    if accepted != imported:
        print(
            f"profile of {arguments.deployment}: {arguments.profile}\n"
            f"Read it; if it is right, write into {arguments.campaign}:\n\n"
            f"acceptance:\n  {arguments.deployment}: {imported}\n"
        )
        raise Refusal(
            f"acceptance.{arguments.deployment}",
            f"the digest of the imported profile {imported}",
            accepted or "nothing",
            arguments.campaign,
        )
    write_atomic(arguments.output, imported.encode())


if __name__ == "__main__":
    run(main)
