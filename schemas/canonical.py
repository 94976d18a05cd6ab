"""Canonical JSON, digests, and the two edges to the disk: strict reading, atomic writing."""

import contextlib
import hashlib
import json
import math
import os
import reprlib
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from schemas.errors import Refusal

SHORT = 16
"""Hex digits of a digest that a path carries."""


class Strict(BaseModel):
    """Base of every artifact: immutable, no unknown keys, no coercion (a bool is no int, "0" is no 0)."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


Model = TypeVar("Model", bound=Strict)

_LINE = reprlib.Repr()
"""Writes a value out as far as a person reads a line."""
_LINE.maxstring = _LINE.maxlong = _LINE.maxother = 400


def canonical_bytes(value: Any) -> bytes:
    """Canonical JSON of `value`: sorted keys, no white space, UTF-8, no NaN, no newline.

    A model is dumped without its absent optional fields, so that old digests survive new fields.
    """
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json", exclude_none=True)
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def digest(value: Any) -> str:
    """64 hex digits: sha256 of the canonical JSON of `value`."""
    return sha256(canonical_bytes(value))


def short(full: str) -> str:
    """The digits of a digest that a path carries."""
    return full[:SHORT]


_reads: ContextVar[dict[str, str] | None] = ContextVar("reads", default=None)
ABSENT = "absent"
"""In place of the digest of a file that is not there."""


@contextlib.contextmanager
def recording_reads() -> Iterator[dict[str, str]]:
    """Path -> sha256 of every file that is read inside; `ABSENT` of one that is looked for and not there."""
    reads: dict[str, str] = {}
    token = _reads.set(reads)
    try:
        yield reads
    finally:
        _reads.reset(token)


@contextlib.contextmanager
def not_recording() -> Iterator[None]:
    """For a part whose reads are known without a record."""
    token = _reads.set(None)
    try:
        yield
    finally:
        _reads.reset(token)


def _record(path: Path, found: str) -> None:
    reads = _reads.get()
    if reads is not None:
        reads[str(path)] = found


def file_digest(path: Path | str) -> str:
    """sha256 of a file, or `ABSENT`."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123 (thousands of files at each parse)
            return sha256(file.read())
    except OSError:
        return ABSENT


def is_file(path: Path) -> bool:
    """Whether a file is there. Whatever depends on the answer depends on its content too."""
    found = file_digest(path) if _reads.get() is not None and path.is_file() else ABSENT
    _record(path, found)
    return path.is_file()


def read_bytes(path: Path, what: str) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise Refusal(what, "a readable file", error.strerror, path) from None
    if _reads.get() is not None:
        _record(path, sha256(data))
    return data


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text} is larger than any number that a reader keeps")
    return number


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """`json` lets the last of two equal keys win silently; which one counts would be each reader's guess."""
    found = dict(pairs)
    if len(found) != len(pairs):
        (twice, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"key {twice!r} stands twice")
    return found


def _parse_json(data: bytes, what: str, path: Path) -> Any:
    try:
        text = data.decode()
        return json.loads(text, parse_constant=_no_constant, parse_float=_finite, object_pairs_hook=_object)
    except RecursionError:
        raise Refusal(what, "JSON", "containers nested too deep", path) from None
    except ValueError as error:
        raise Refusal(what, "JSON", error, path) from None


def read_json(path: Path, what: str) -> Any:
    """Parsed JSON of `path` (UTF-8); what readers do not agree on is refused: NaN, infinities, a key that stands
    twice."""
    return _parse_json(read_bytes(path, what), what, path)


class _UniqueKeyLoader(yaml.CSafeLoader):
    """YAML's safe loader lets a repeated key win silently; a campaign must not."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":  # `<<: *anchor`, which the keys beside it may override
                continue
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} stands twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path, what: str) -> Any:
    try:
        # A subclass of the safe loader: it builds plain data only.
        return yaml.load(read_bytes(path, what), Loader=_UniqueKeyLoader)  # noqa: S506
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1}, " if mark else ""
        raise Refusal(what, "YAML", f"{place}{error.problem}", path) from None
    except (
        yaml.YAMLError,
        ValueError,
        TypeError,
    ) as error:  # bytes that are no UTF-8, dates that are none, a list as key
        raise Refusal(what, "YAML", error, path) from None


def _expected(error: Any) -> str:
    """What a pydantic error wanted, as a noun."""
    if error["type"] == "extra_forbidden":
        return "no such key"
    if error["type"] == "missing":
        return "a value"
    message = str(error["msg"]).removeprefix("Value error, ").removeprefix("Input should be ")
    return message[:1].lower() + message[1:]


def _shown(error: Any) -> str:
    """What stands in the place of a pydantic error, short enough for a line."""
    found = error["input"]
    if error["type"] == "missing":
        return "nothing"
    return f"a {type(found).__name__}" if isinstance(found, dict | list) else _LINE.repr(found)


def _validate(model: type[Model], text: str | bytes, file: Path | str) -> Model:
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        # Of a union's branches the deepest came closest, and one of the value's own type before the others; the
        # branches' own names say nothing to a person.
        found = error.errors(include_url=False)
        first = max(found, key=lambda each: (len(each["loc"]), not each["type"].endswith("_type")))
        field = ".".join(str(part) for part in first["loc"] if "[" not in str(part)) or model.__name__
        raise Refusal(field, _expected(first), _shown(first), file) from None


def parse(model: type[Model], data: Any, file: Path | str) -> Model:
    """`data` (plain JSON values) as `model`; the first violation becomes a refusal that names its field."""
    try:
        text = json.dumps(data, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise Refusal(model.__name__, "JSON values", error, file) from None
    return _validate(model, text, file)


def read_model(model: type[Model], path: Path, what: str) -> Model:
    """The model in the JSON file `path`: read as `read_json` reads it, and validated from the same bytes."""
    data = read_bytes(path, what)
    _parse_json(data, what, path)
    return _validate(model, data, path)


def write_atomic(path: Path, data: bytes) -> None:
    """Write `data` so that a reader sees all of it or nothing: temporary file, fsync, rename, fsync of the folder.

    Raises:
        Refusal: the disk does not take the file.
    """
    try:
        _write_atomic(path, data)
    except OSError as error:
        raise Refusal("write", "a disk that takes the file", error.strerror, path) from None


def _write_atomic(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_model(path: Path, model: BaseModel) -> None:
    """The canonical bytes of `model`, so that `sha256sum` of the file is the model's digest."""
    write_atomic(path, canonical_bytes(model))
