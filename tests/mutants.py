"""Mutants of a JSON document: every leaf and every container changed in every way that its type allows.

Pure: a mutant shares with its original all but the containers on the way to the change.
"""

import re
from collections.abc import Callable, Iterator
from hashlib import sha256
from typing import Any, Literal, NamedTuple

Path = tuple[str | int, ...]
Sort = Literal["value", "type", "structure"]

NAN = "<NaN>"
"""Stands for the number that JSON does not have: whoever writes a mutant puts NaN in the place of this text."""

UNKNOWN_KEY = "unexpected"


class Change(NamedTuple):
    """What is done to one value: its name, its sort, and the value in its place."""

    sort: Sort
    kind: str
    value: Any


class Mutant(NamedTuple):
    path: Path
    sort: Sort
    kind: str
    document: Any

    @property
    def pattern(self) -> str:
        return pattern(self.path)

    @property
    def rank(self) -> str:
        """A fixed order that has nothing to do with the place: which mutants a sample takes."""
        return sha256(f"{self.path} {self.kind}".encode()).hexdigest()


NAMED = ("layer_specs", "layer_tensors", "layer_classes", "source_files")
"""Objects whose keys are names of the model or of the engine: any of them stands for all."""


def pattern(path: Path) -> str:
    """The path without its list indices and such names: `results[].point.batch_size`, `source_files{}`."""
    text = ""
    for part, before in zip(path, (None, *path), strict=False):
        text += "[]" if isinstance(part, int) else "{}" if before in NAMED else f".{part}"
    return text.removeprefix(".")


def replaced(document: Any, path: Path, value: Any) -> Any:
    """`document` with `value` at `path`; everything beside the path is shared."""
    if not path:
        return value
    copy = document.copy()
    copy[path[0]] = replaced(document[path[0]], path[1:], value)
    return copy


def same(a: Any, b: Any) -> bool:
    """Whether JSON holds one value: 5 and 5.0 are the same number, true is none, and a dict's order says nothing."""
    if isinstance(a, bool) or isinstance(b, bool) or type(a) is not type(b):
        return a is b or (_is_number(a) and _is_number(b) and a == b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(value, b[key]) for key, value in a.items())
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: float) -> Iterator[Change]:
    yield Change("value", "+1", value + 1)
    yield Change("value", "*2", value * 2)
    yield Change("value", "negated", -value)
    yield Change("value", "zero", 0)
    if isinstance(value, float):
        yield Change("value", "+1%", value * 1.01)
        yield Change("value", "a little", value * (1 + 2**-24))
    else:
        yield Change("type", "fraction", value + 0.5)
    yield Change("type", "bool", bool(value))
    yield Change("type", "text", str(value))
    yield Change("type", "NaN", NAN)


def _text(value: str) -> Iterator[Change]:
    yield Change("value", "other text", value + "x")
    # Dates, versions and digests that still look like one.
    yield Change("value", "other digit", re.sub(r"\d(?=\D*$)", lambda last: str((int(last[0]) + 1) % 10), value))
    yield Change("value", "empty text", "")
    yield Change("type", "number", int(value) if value.isdecimal() else 1)


def _bool(value: bool) -> Iterator[Change]:
    yield Change("value", "flipped", not value)
    yield Change("type", "number", int(value))
    yield Change("type", "text", str(value).lower())


def _null() -> Iterator[Change]:
    for kind, value in (("number", 1), ("text", "x"), ("bool", True), ("list", []), ("object", {})):
        yield Change("type", kind, value)


def _object(value: dict[str, Any]) -> Iterator[Change]:
    yield Change("structure", "empty", {})
    yield Change("structure", "unknown key", value | {UNKNOWN_KEY: 1})
    yield Change("type", "list", list(value.values()))


def _list(value: list[Any]) -> Iterator[Change]:
    yield Change("structure", "empty", [])
    yield Change("structure", "reversed", value[::-1])
    yield Change("type", "object", {str(index): each for index, each in enumerate(value)})


def changes(value: Any) -> Iterator[Change]:
    """All that can stand in the place of `value`."""
    if value is None:
        yield from _null()
        return
    yield Change("type", "null", None)
    if isinstance(value, bool):
        yield from _bool(value)
    elif isinstance(value, str):
        yield from _text(value)
    elif isinstance(value, dict):
        yield from _object(value)
        return
    elif isinstance(value, list):
        yield from _list(value)
        return
    else:
        yield from _number(value)
    yield Change("type", "list", [value])


def parts(value: Any) -> Iterator[tuple[str | int, str, Any]]:
    """Changes of a container that concern one of its parts: key or index, kind, the container in its place."""
    if isinstance(value, dict):
        for key in value:
            yield key, "removed", {name: each for name, each in value.items() if name != key}
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield index, "removed", value[:index] + value[index + 1 :]
            yield index, "twice", [*value[:index], each, *value[index:]]
            if index:
                yield index, "swapped", [*value[: index - 1], each, value[index - 1], *value[index + 1 :]]


def mutants(document: Any, wanted: Callable[[Path], bool] = lambda path: True) -> Iterator[Mutant]:
    """Every mutant of a document below the paths that are wanted. What changes nothing is no mutant."""

    def below(value: Any, path: Path) -> Iterator[Mutant]:
        for change in changes(value):
            if wanted(path) and not same(value, change.value):
                yield Mutant(path, change.sort, change.kind, replaced(document, path, change.value))
        for part, kind, changed in parts(value):
            if wanted((*path, part)) and not same(value, changed):
                yield Mutant((*path, part), "structure", kind, replaced(document, path, changed))
        entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for part, each in entries:
            yield from below(each, (*path, part))

    yield from below(document, ())
