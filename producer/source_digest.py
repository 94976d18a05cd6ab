"""The digest of the code that measures: what it does, not how it is written down.

A record that named a file's bytes could not be read after a corrected comment; one that named nothing could not be
told from a record of other code. So the digest covers the syntax trees, without comments, docstrings and layout.
"""

import ast
import functools
import hashlib
import json
from pathlib import Path
from typing import Any

MEASURING = (
    "producer/*.py",
    "producer/adapters/*.py",
    "schemas/journal.py",
    "schemas/launch.py",
    "schemas/native.py",
    "schemas/observation.py",
    "schemas/points.py",
)
"""Modules that decide what is measured and what is written of it. A new one counts until it is named below.

Of the schemas: the lines, the records in them and the artifact that are written, the capture sizes that an engine is
given, and the point keys that the prompts hang on. The others only read what a cell's own digest covers.
"""

NOT_MEASURING = {
    "producer/admission.py": "which points a plan keeps: frozen in the cell",
    "producer/capacity.py": "which points a plan keeps: frozen in the cell",
    "producer/simulation.py": "which points a plan keeps: frozen in the cell",
    "producer/planning.py": "which cells there are: each is frozen in its file",
    "producer/resolving.py": "which deployments there are: each is frozen in its cells",
    "producer/graph.py": "which files Snakemake makes",
    "producer/parsed.py": "which files Snakemake makes",
    "producer/recollection.py": "why a cell is measured, in words",
    "producer/launch.py": "where a command runs",
    "producer/inside.py": "where a command runs",
    "producer/remember.py": "what need not be computed again",
    "producer/run_probe.py": "the records of a probe, which have a protocol of their own",
    "producer/probe_rank.py": "the records of a probe, which have a protocol of their own",
    "producer/nodes.py": "on which nodes processes run; on how many is frozen in the cell",
    "producer/control.py": "when processes start and end; what they wrote counts or does not by itself",
    "producer/supervise.py": "when processes start and end; what they wrote counts or does not by itself",
    "producer/progress.py": "what a person sees meanwhile",
    "producer/attempts.py": "what a person sees afterwards",
    "producer/releases.py": "whose records are read, not what is in them",
    "producer/adapters/make_pins.py": "how the pins are made; their digest is in the record",
}
"""Modules of the folders above that no measured number and no written record depends on, each with its reason.

`producer/grids/` is not among the folders: it proposes points, and a cell holds the points that it measures.
"""

ROOT = Path(__file__).parent.parent


def measuring_modules(root: Path = ROOT) -> tuple[str, ...]:
    """Paths below `root` of the modules that the digest covers, sorted."""
    found = {file.relative_to(root).as_posix() for pattern in MEASURING for file in root.glob(pattern)}
    return tuple(sorted(found - NOT_MEASURING.keys()))


def canonical(node: ast.AST) -> list[Any]:
    """`node` as nested lists: its class, then each field that is not empty.

    `ast.dump` would not do: releases of Python add fields (3.12 `type_params`) and leave out others (3.13), and split
    the text of an f-string differently. Bare strings are documentation wherever they stand, and `pass` is what is
    left of a body whose documentation is gone. The prefix of `u"..."` (`kind`) is layout.
    """
    if isinstance(node, ast.Constant):
        return ["Constant", _scalar(node.value)]
    fields: list[Any] = [type(node).__name__]
    for name in node._fields:
        value = getattr(node, name, None)
        if isinstance(value, list):
            value = [_value(item) for item in _items(node, value)]
        elif value is not None:
            value = _value(value)
        if value is not None and value != []:
            fields.append([name, value])
    return fields


def _items(node: ast.AST, values: list[Any]) -> list[Any]:
    """The parts of a list field that mean something."""
    if not isinstance(node, ast.JoinedStr):
        return [value for value in values if not _is_silent(value)]
    parts: list[Any] = []
    for value in values:
        if isinstance(value, ast.Constant) and parts and isinstance(parts[-1], ast.Constant):
            # An f-string's constants are text.
            parts[-1] = ast.Constant(value="".join((parts[-1].value, value.value)))  # type: ignore[arg-type]
        else:
            parts.append(value)
    return [part for part in parts if not (isinstance(part, ast.Constant) and part.value == "")]


def _is_silent(statement: Any) -> bool:
    """Whether a statement does nothing: `pass`, or a string that nobody takes."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return isinstance(statement.value.value, str)
    return isinstance(statement, ast.Pass)


def _value(value: Any) -> Any:
    return canonical(value) if isinstance(value, ast.AST) else _scalar(value)


def _scalar(value: Any) -> str:
    """Type and value, so that 1, 1.0 and True differ. `ascii`: what `repr` escapes hangs on the Unicode tables."""
    return f"{type(value).__name__} {value!a}"


def source_sha256(source: str) -> str:
    """sha256 of what `source` does."""
    return hashlib.sha256(_bytes(canonical(ast.parse(source)))).hexdigest()


def _bytes(tree: Any) -> bytes:
    return json.dumps(tree, separators=(",", ":")).encode()


def digest_of(root: Path) -> str:
    """sha256 over path and syntax tree of every measuring module below `root`."""
    modules = [(name, source_sha256((root / name).read_text("utf-8"))) for name in measuring_modules(root)]
    return hashlib.sha256(_bytes(modules)).hexdigest()


@functools.cache
def producer_digest() -> str:
    """The digest of this checkout's producer."""
    return digest_of(ROOT)
