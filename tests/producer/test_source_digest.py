"""The digest of the code that measures: what changes it, and what does not."""

import ast
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from producer.source_digest import (
    MEASURING,
    NOT_MEASURING,
    ROOT,
    digest_of,
    measuring_modules,
    producer_digest,
    source_sha256,
)

SOURCE = '''
"""A module."""

import time
from typing import NamedTuple

LIMIT = 4
"""What the limit is."""


class Chunk(NamedTuple):
    """A chunk."""

    computed: int
    scheduled: int = 0
    """Tokens of this step."""


class Failed(Exception):
    """Nothing but a name."""


def wall(steps, first, *, unit="s", **more):
    """Seconds of all steps."""
    total = 0.0
    for step in steps:
        if step.end is None or not step:
            continue
        total += step.end - step.start
    text = f"{total:.3f} {unit!r} of {len(steps)}"
    return {"total": total, **more}, text, first
'''


def changed(old: str, new: str) -> str:
    assert SOURCE.count(old) == 1, old
    return SOURCE.replace(old, new)


NO_DIFFERENCE = {
    "docstring of the module": changed('"""A module."""', '"""Another."""'),
    "no docstring of the module": changed('"""A module."""\n', ""),
    "docstring of a class": changed('"""A chunk."""', '"""Some tokens."""'),
    "a class without its docstring": changed('    """Nothing but a name."""', "    pass"),
    "docstring of a function": changed('    """Seconds of all steps."""\n', ""),
    "words beside a constant": changed('"""What the limit is."""', '"""Tokens."""'),
    "words beside a field": changed('    """Tokens of this step."""\n', ""),
    "a comment": changed("    total = 0.0", "    # Seconds.\n    total = 0.0  # so far"),
    "blank lines": changed("    total = 0.0\n", "\n\n    total = 0.0\n\n"),
    "one line in many": changed(
        "def wall(steps, first, *, unit=", "def wall(\n    steps,\n    first,\n    *,\n    unit="
    ),
    "brackets": changed("step.end - step.start", "(step.end - step.start)"),
    "other quotes": changed('"total"', "'total'"),
    "a string in pieces": changed('"total"', '"to" "tal"'),
    "u before a string": changed('"total"', 'u"total"'),
    "an f-string in pieces": changed("""f"{total:.3f} {unit!r} of""", """f"{total:.3f} {unit!r}" f" of"""),
    "digits apart": changed("LIMIT = 4", "LIMIT = 0x4"),
}

DIFFERENCE = {
    "a variable renamed": SOURCE.replace("total", "sum_"),
    "a constant": changed("LIMIT = 4", "LIMIT = 5"),
    "a float for an int": changed("LIMIT = 4", "LIMIT = 4.0"),
    "a bool for an int": changed("scheduled: int = 0", "scheduled: int = False"),
    "bytes for a string": changed('unit="s"', 'unit=b"s"'),
    "nothing for nought": changed("total = 0.0", "total = None"),
    "a negative": changed("LIMIT = 4", "LIMIT = -4"),
    "statements in another order": changed(
        "import time\nfrom typing import NamedTuple\n", "from typing import NamedTuple\nimport time\n"
    ),
    "operands in another order": changed("step.end - step.start", "step.start - step.end"),
    "an operator": changed("total += step", "total -= step"),
    "a comparison": changed("is None", "is not None"),
    "and for or": changed("or not step", "and not step"),
    "a keyword": changed("continue", "break"),
    "a default": changed('unit="s"', 'unit="ms"'),
    "a keyword-only argument for an ordinary one": changed("first, *, unit", "first, unit"),
    "an annotation": changed("computed: int", "computed: float"),
    "a base class": changed("(Exception)", "(ValueError)"),
    "a field in another place": changed(
        "    computed: int\n    scheduled: int = 0\n", "    scheduled: int = 0\n    computed: int\n"
    ),
    "a key for an unpacking": changed("**more}", '"more": more}'),
    "the text of an f-string": changed(" of {len", " in {len"),
    "the place of the text of an f-string": changed("{unit!r} of", "of {unit!r}"),
    "the format of an f-string": changed(":.3f", ":.4f"),
    "the conversion of an f-string": changed("!r", "!s"),
    "the expression of an f-string": changed("{len(steps)}", "{len(more)}"),
    "a plain string for an f-string": changed('f"{total', '"{total'),
    "a statement more": changed("    return {", "    time.sleep(0)\n    return {"),
    "a statement less": changed("        if step.end is None or not step:\n            continue\n", ""),
    "an alias": changed("import time", "import time as clock"),
}


@pytest.mark.parametrize("name", NO_DIFFERENCE)
def test_what_is_only_written_otherwise_has_the_same_digest(name: str):
    ast.parse(NO_DIFFERENCE[name])
    assert NO_DIFFERENCE[name] != SOURCE
    assert source_sha256(NO_DIFFERENCE[name]) == source_sha256(SOURCE)


@pytest.mark.parametrize("name", DIFFERENCE)
def test_what_does_otherwise_has_another_digest(name: str):
    assert source_sha256(DIFFERENCE[name]) != source_sha256(SOURCE)


def test_no_two_of_the_changes_are_taken_for_one_another():
    digests = {name: source_sha256(source) for name, source in DIFFERENCE.items()}
    assert len(set(digests.values())) == len(digests)


def test_a_constant_is_its_type_and_its_value():
    values = ("1", "True", "1.0", "'1'", "b'1'", "1j", "None", "...")
    assert len({source_sha256(f"x = {value}") for value in values}) == len(values)


def test_an_empty_list_is_not_the_absence_of_one():
    sources = ("x = []", "x = ()", "x = {}", "x = [None]", "x = None", "return_ = x")
    assert len({source_sha256(source) for source in sources}) == len(sources)
    assert source_sha256("def f(*, a, b=None): return") != source_sha256("def f(*, a=None, b): return")


TRICKY = """
def f(a, /, b: int = 1, *c, d=None, e, **g) -> "x":
    x: int
    y = f"{a!r:>{b}}|{{}}" f"" "é" f"{b=}"
    match a:
        case {"k": None, **rest} if not rest: return [*c, lambda: (yield)]
        case True | False | None: pass
    async def h():
        async with a as b, c: return [z async for z in b if z]
    try: global q
    except* (A, B) as e: raise e from None
    finally: del x, y[1:2, ...]
"""
"""Every place where releases of Python gave the same source other trees: f-strings above all (3.12), type_params."""

TRICKY_SHA256 = "709d0493645b31879b17473c391bbebe85a225be47803efa969ab1200d87295f"


def test_the_digest_of_a_source_is_what_it_always_was():
    # Written out: python3.11, 3.12 and 3.13 agreed on it.
    assert source_sha256(TRICKY) == TRICKY_SHA256


@pytest.mark.parametrize("python", ["python3.11", "python3.12", "python3.13", "python3.14"])
def test_another_python_finds_the_same_digest(python: str):
    found = shutil.which(python)
    # A version manager leaves names on the path that start nothing.
    if found is None or subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode:
        pytest.skip(f"no {python} here")
    code = "import sys; from producer.source_digest import *; print(producer_digest(), source_sha256(sys.stdin.read()))"
    done = subprocess.run(
        [found, "-c", code],
        input=TRICKY,
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUTF8": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [producer_digest(), source_sha256(TRICKY)]


def copy_of_the_producer(target: Path) -> Path:
    for name in ("producer", "schemas"):
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    return target


def test_every_measuring_module_counts_and_no_other(tmp_path: Path):
    root = copy_of_the_producer(tmp_path)
    files = sorted(root.rglob("*.py"))
    for file in files:
        file.write_text("x = 1\n")
    before, counted = digest_of(root), set(measuring_modules(root))
    assert {"producer/scheduler.py", "producer/adapters/__init__.py", "schemas/journal.py"} <= counted
    for file in files:
        name = file.relative_to(root).as_posix()
        file.write_text("x = 1  # a comment\n")
        assert digest_of(root) == before, name
        file.write_text("x = 2\n")
        assert (digest_of(root) != before) == (name in counted), name
        file.write_text("x = 1\n")


def test_a_new_module_counts_until_it_is_named(tmp_path: Path):
    root = copy_of_the_producer(tmp_path)
    before = digest_of(root)
    (root / "producer" / "anew.py").write_text("x = 1\n")
    assert digest_of(root) != before


def test_the_same_code_under_another_name_is_other_code(tmp_path: Path):
    root = copy_of_the_producer(tmp_path)
    before = digest_of(root)
    (root / "producer" / "reduction.py").rename(root / "producer" / "reductions.py")
    assert digest_of(root) != before


def test_every_exclusion_is_a_module_that_is_there():
    names = set(NOT_MEASURING)
    assert names == {name for name in names if (ROOT / name).is_file()}
    assert all(any(Path(name).match(pattern) for pattern in MEASURING) for name in names)


def first_party_imports(name: str) -> set[str]:
    """Modules of the producer that a module names: imported, or given to the engine by their path in a string."""
    found: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / name).read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Constant) and re.fullmatch(r"producer(\.\w+)+", str(node.value)):
            found |= {str(node.value), str(node.value).rpartition(".")[0]}
    paths = {module.replace(".", "/") for module in found if module.partition(".")[0] == "producer"}
    files = {f"{path}.py" for path in paths} | {f"{path}/__init__.py" for path in paths}
    return {file for file in files if (ROOT / file).is_file()}


def test_all_that_measuring_a_cell_loads_counts_or_is_excluded_for_a_reason():
    loaded: set[str] = set()
    waiting = {"producer/run_cell.py"}
    while waiting:
        name = waiting.pop()
        loaded.add(name)
        waiting |= first_party_imports(name) - loaded
    assert {"producer/scheduler.py", "producer/observe.py", "producer/session.py"} <= loaded
    proposing = {name for name in loaded if name.startswith("producer/grids/")}
    assert loaded - proposing - NOT_MEASURING.keys() <= set(measuring_modules())
