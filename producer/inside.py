"""The first thing that runs in a container: is it the container that the campaign describes? Then the command runs.

Wrong mounts and a wrong producer cost seconds here, and a whole cell if they are found in its artifacts.
"""

import argparse
import os
import sys
from pathlib import Path

from producer.source_digest import producer_digest
from schemas.errors import Refusal, run

MOUNTS = Path("/proc/self/mountinfo")


def mounted(text: str) -> dict[str, set[str]]:
    """Mount point -> its options, of mountinfo (proc(5)); of stacked mounts the last one counts."""
    points = {}
    for line in text.splitlines():
        fields = line.split()
        point = fields[4].encode().decode("unicode_escape").encode("latin-1").decode()  # \040 is a blank
        points[point] = set(fields[5].split(","))
    return points


def check_mounts(declared: list[str], points: dict[str, set[str]]) -> None:
    """Every declared mount is one, and read-only where it is declared so.

    Raises:
        Refusal: the mount, and what it is.
    """
    for mount in declared:
        inside, _, mode = mount.partition(":")
        options = points.get(inside.rstrip("/") or "/")
        if options is None:
            raise Refusal("container mount", f"{inside} to be mounted", "nothing there", MOUNTS)
        if mode == "ro" and "ro" not in options:
            raise Refusal("container mount", f"{inside} to be read-only", "writable", MOUNTS)


def check_producer(expected: str) -> None:
    """The producer in here is the one that was launched.

    Raises:
        Refusal: another digest.
    """
    found = producer_digest()
    if found != expected:
        raise Refusal("producer in the container", f"digest {expected} of the launching checkout", found, Path.cwd())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--producer", required=True, help="digest of the producer that was launched")
    parser.add_argument("--mount", action="append", default=[], help="/inside, /inside:ro or /inside:rw")
    parser.add_argument("command", nargs="+", help="-- producer.<module> and its arguments")
    arguments = parser.parse_args()
    check_mounts(arguments.mount, mounted(MOUNTS.read_text()))
    check_producer(arguments.producer)
    os.execv(sys.executable, [sys.executable, "-m", *arguments.command])  # noqa: S606


if __name__ == "__main__":
    run(main)
