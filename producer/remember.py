"""Results that are slow to compute and depend on files alone, kept until one of the files differs."""

import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from schemas.canonical import digest, file_digest, recording_reads, write_atomic
from schemas.errors import Refusal

ROOT = Path(__file__).parent.parent
CODE = ("schemas/**/*.py", "producer/**/*.py")
"""What computes: another state of it may compute otherwise."""

T = TypeVar("T")


class Remembered(msgspec.Struct, frozen=True):
    """`key`: the code and what the caller names; `files`: path -> sha256 of everything else that was read."""

    key: str
    files: dict[str, str]
    value: msgspec.Raw


def code_digest() -> str:
    whole = hashlib.sha256()
    for pattern in CODE:
        for file in sorted(ROOT.glob(pattern)):
            whole.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes() + b"\0")
    return whole.hexdigest()


def remembered(file: Path, causes: Any, kind: type[T], compute: Callable[[], T]) -> T:
    """The `kind` that `compute` returns, from `file` if `causes` and every file that was read for it are as they were.

    Deleting the file costs time and nothing else; a folder that cannot be written to costs the same.
    """
    key = digest([code_digest(), causes])
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        kept = msgspec.json.decode(file.read_bytes(), type=Remembered)
        if kept.key == key and all(file_digest(name) == found for name, found in kept.files.items()):
            return msgspec.json.decode(kept.value, type=kind)
    with recording_reads() as files:
        value = compute()
    raw = msgspec.Raw(msgspec.json.encode(value))
    with contextlib.suppress(Refusal):
        write_atomic(file, msgspec.json.encode(Remembered(key, files, raw)))
    return value
