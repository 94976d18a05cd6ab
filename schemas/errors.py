"""Refusals: one family of errors for bad input, one line each."""

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

REFUSED = 2
"""Exit code of a command that refused its input."""

HELD = 75
"""Exit code of a command that found its cell claimed by somebody else (EX_TEMPFAIL of sysexits.h)."""


class Refusal(Exception):
    """Bad input: `<field>: expected <expected>, found <found>: <file>`.

    `field` names the offending value in the words of the file that holds it; `file` is the file to open.
    """

    def __init__(self, field: str, expected: object, found: object, file: str | Path) -> None:
        self.field, self.expected, self.found, self.file = field, expected, found, str(file)
        line = f"{field}: expected {expected}, found {found}: {file}"
        super().__init__(" ".join(line.split()))


class Held(Exception):
    """Somebody else measures this cell."""


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """A refusal inside ends the process with its one line on stderr and exit code `REFUSED`, never a traceback."""
    try:
        yield
    except Refusal as refusal:
        print(f"refused: {refusal}", file=sys.stderr)
        sys.exit(REFUSED)


def run(main: Callable[[], None]) -> None:
    """Run a command's main: a refusal, or a cell held by somebody else, becomes one line and a non-zero exit."""
    gc.freeze()  # a collection need not look at all that was imported
    try:
        with refusing():
            main()
    except Held as held:
        print(f"held: {held}", file=sys.stderr)
        sys.exit(HELD)
