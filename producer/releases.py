"""Whose records this checkout reads: its own producer's, and those of every release with the same protocol.

`releases.json` is shipped, so a reader needs no version control. Two entries with one protocol promise that their
producers measure the same and write the same; what breaks that promise raises the protocol (`Contract.protocol`).
The code of a working tree that was never released is read by that very code and by nothing else.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from producer.contracts import CONTRACTS
from producer.source_digest import producer_digest
from schemas.canonical import Strict, parse, read_json, write_atomic
from schemas.errors import Refusal, run

HISTORY = Path(__file__).parent / "releases.json"

THIS_CHECKOUT = "this checkout"


class Release(Strict):
    """One release: the protocol of each contract, and the digest of the code that measured."""

    release: str
    protocols: dict[str, int]
    producer_digest: str


def this_release(name: str) -> Release:
    """This checkout as the release `name`."""
    protocols = {contract.name: contract.protocol for contract in CONTRACTS.values()}
    return Release(release=name, protocols=protocols, producer_digest=producer_digest())


def extended(history: Sequence[Release], release: Release, file: Path | str) -> tuple[Release, ...]:
    """`history` with `release` at its end.

    Raises:
        Refusal: a name that is taken, or a digest that already stands under another protocol.
    """
    for earlier in history:
        if earlier.release == release.release:
            raise Refusal("release", f"another name than {earlier.release}", release.release, file)
        if earlier.producer_digest == release.producer_digest and earlier.protocols != release.protocols:
            field = f"protocols of {release.release}"
            expected = f"{earlier.protocols} of {earlier.release}, which is the same code"
            raise Refusal(field, expected, release.protocols, file)
    return (*history, release)


def read_releases(file: Path = HISTORY) -> tuple[Release, ...]:
    """The releases of `file` in order.

    Raises:
        Refusal: no list of releases, or one that `extended` would not have made.
    """
    data: Any = read_json(file, "releases")
    if not isinstance(data, list):
        raise Refusal("releases", "a list", f"a {type(data).__name__}", file)
    history: tuple[Release, ...] = ()
    for entry in data:
        history = extended(history, parse(Release, entry, file), file)
    return history


def accepted_producer_digests(contract: str, protocol: int, history: Sequence[Release] | None = None) -> dict[str, str]:
    """Digest of a producer -> who it is, for every producer that measures `contract` by this protocol integer.

    Contracts count their protocols for themselves, so both are asked for. The reader's own comes first.
    """
    accepted: dict[str, str] = {}
    for release in (this_release(THIS_CHECKOUT), *(read_releases() if history is None else history)):
        if release.protocols.get(contract) == protocol:
            accepted.setdefault(release.producer_digest, release.release)
    return accepted


def write_releases(history: Sequence[Release], file: Path) -> None:
    write_atomic(file, (json.dumps([release.model_dump() for release in history], indent=2) + "\n").encode())


def main() -> None:
    parser = argparse.ArgumentParser(description="Append the producer of this checkout to the shipped releases.")
    parser.add_argument("--add", metavar="NAME", required=True, help="name of the release")
    parser.add_argument("--history", type=Path, default=HISTORY)
    arguments = parser.parse_args()
    release = this_release(arguments.add)
    write_releases(extended(read_releases(arguments.history), release, arguments.history), arguments.history)
    print(f"{release.release}: protocols {release.protocols}, producer {release.producer_digest}")


if __name__ == "__main__":
    run(main)
