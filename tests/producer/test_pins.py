"""Pins: every engine source file that measuring relies on, of every qualified release."""

import ast
import hashlib
import re
import zipfile
from pathlib import Path

import pytest

from producer.adapters import ADAPTERS, check_installed, read_pins
from producer.adapters.make_pins import RELIED_ON, RELIED_ON_IN, pins_of, relied_on
from producer.source_digest import measuring_modules
from schemas.errors import Refusal

ROOT = Path(__file__).parents[2]


def engine_imports(source: str) -> set[tuple[str, str]]:
    """(module, name) of every import from the engine, wherever it stands; an imported module has no name."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {(node.module, alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {(alias.name, "") for alias in node.names}
    return {(module, name) for module, name in found if module.partition(".")[0] == "vllm"}


def files_of(module: str, name: str) -> set[str]:
    """Where what is imported may stand: a module or package of that name, or something in the module."""
    paths = [module.replace(".", "/")]
    if name:
        paths.append(f"{paths[0]}/{name}")
    return {file for path in paths for file in (f"{path}.py", f"{path}/__init__.py")}


def test_imports_are_found_wherever_they_stand():
    source = "import vllm\nfrom vllm.a import b\ndef f():\n    from vllm import LLM\n    import torch, vllm.c\n"
    assert engine_imports(source) == {("vllm", ""), ("vllm.a", "b"), ("vllm", "LLM"), ("vllm.c", "")}
    assert files_of("vllm.a", "b") == {"vllm/a.py", "vllm/a/__init__.py", "vllm/a/b.py", "vllm/a/b/__init__.py"}


@pytest.mark.parametrize("adapter", ADAPTERS.values(), ids=list(ADAPTERS))
def test_every_engine_module_that_measuring_imports_is_pinned(adapter):
    pins, seen = read_pins(adapter), 0
    for module in measuring_modules():
        for imported in sorted(engine_imports((ROOT / module).read_text())):
            assert files_of(*imported) & pins.keys(), f"{module} imports {imported}, which no pin names"
            seen += 1
    assert seen > 10


@pytest.mark.parametrize("adapter", ADAPTERS.values(), ids=list(ADAPTERS))
def test_the_pins_name_what_is_relied_on_and_nothing_else(adapter):
    pins = read_pins(adapter)
    assert tuple(pins) == relied_on(adapter.version)
    assert all(re.fullmatch(r"[0-9a-f]{64}", digest) for digest in pins.values())


def test_what_is_relied_on_is_named_once():
    assert RELIED_ON_IN.keys() <= ADAPTERS.keys()
    for version in ADAPTERS:
        assert len(relied_on(version)) == len(set(relied_on(version)))
        assert set(RELIED_ON) <= set(relied_on(version))


def test_the_installed_engine_is_the_pinned_one():
    adapter = ADAPTERS["0.32.0"]
    pytest.importorskip("vllm.version")
    root = check_installed(adapter)
    assert all((root / name).is_file() for name in read_pins(adapter))


def wheel_of(tmp_path: Path, names: tuple[str, ...]) -> Path:
    file = tmp_path / "engine.whl"
    with zipfile.ZipFile(file, "w") as wheel:
        for name in names:
            wheel.writestr(name, f"# {name}\n")
    return file


def test_pins_are_the_digests_of_the_files_in_the_wheel(tmp_path: Path):
    wheel = wheel_of(tmp_path, (*relied_on("0.33.0"), "vllm/another.py"))
    pins = pins_of("0.33.0", wheel)
    assert pins.keys() == set(relied_on("0.33.0"))
    assert pins["vllm/v1/request.py"] == hashlib.sha256(b"# vllm/v1/request.py\n").hexdigest()


def test_a_wheel_without_a_file_that_is_relied_on_is_refused(tmp_path: Path):
    wheel = wheel_of(tmp_path, tuple(name for name in relied_on("0.32.0") if name != "vllm/v1/request.py"))
    with pytest.raises(Refusal) as refused:
        pins_of("0.32.0", wheel)
    expected = f"relied-on engine source: expected a file of vllm 0.32.0, found vllm/v1/request.py: {wheel}"
    assert str(refused.value) == expected
