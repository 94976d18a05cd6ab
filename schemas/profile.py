"""The imported profile: what planning believes about a deployment's memory."""

from typing import Literal, Self

from pydantic import model_validator

from schemas.canonical import Strict
from schemas.points import Count, Positive, Size

GroupKind = Literal["attention", "convolution", "state"]


class ProfileGroup(Strict):
    """One cache group. `page_size_bytes` is a whole block of the pool; sizes of blocks and windows in tokens.

    `spec_type` is the class of its layers' cache specs, or the classes, sorted and joined by `+`. `blocks_per_request`
    is what a state group holds of a running request between block boundaries: 1 and the speculative blocks.
    """

    name: str
    kind: GroupKind
    spec_type: str
    num_layers: Positive
    block_size_tokens: Positive
    page_size_bytes: Size
    sliding_window: Positive | None = None
    blocks_per_request: Positive | None = None
    prefill_checkpoint_blocks: Positive | None = None
    prefill_checkpoint_alignment: Positive | None = None

    @model_validator(mode="after")
    def _kind(self) -> Self:
        if self.kind == "convolution" and self.sliding_window is None:
            raise ValueError("a sliding_window for a convolution group")
        if self.kind == "state" and (self.blocks_per_request is None or self.sliding_window is not None):
            raise ValueError("blocks_per_request and no sliding_window for a state group")
        if self.kind != "state" and self.blocks_per_request is not None:
            raise ValueError(f"no blocks_per_request for a group of kind {self.kind}")
        if self.spec_type != "MambaSpec" and self.prefill_checkpoint_blocks is not None:
            raise ValueError(f"no prefill_checkpoint_blocks for a group of {self.spec_type}")
        return self


class Profile(Strict):
    """`profile/<deployment>-<digest>.json`: imported from probe records that passed every check, or declared.

    A declared profile names no probe; its `provenance` says where its figures come from, and the settings that only a
    launch can show (`gpu_memory_utilization`, `kv_cache_memory_bytes`, `enable_chunked_prefill`) are absent.
    """

    schema_version: Literal[1] = 1
    architecture: str
    model_config_sha256: str
    model_revision: str
    runtime_backend_version: str
    provenance: str = "probe"
    probe_digest: str | None = None
    probe_records_sha256: dict[str, str] = {}
    groups: tuple[ProfileGroup, ...]
    free_blocks: Positive
    kv_cache_bytes: Size
    block_size: Positive
    hash_block_size: Positive
    cache_hit_alignment_tokens: Positive
    enable_prefix_caching: bool
    enable_chunked_prefill: bool | None = None
    mamba_cache_mode: Literal["none", "align"]
    gpu_memory_utilization: float | None = None
    kv_cache_memory_bytes: Size | None = None
    max_num_tokens: Positive
    max_batch_size: Positive
    max_model_len: Positive
    weights_bytes: Count | None = None
    device_name: str
    cudagraph_capture_sizes: tuple[Positive, ...] = ()

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.kv_cache_bytes % self.free_blocks:
            raise ValueError(f"kv_cache_bytes a multiple of free_blocks {self.free_blocks}")
        for group in self.groups:
            if group.page_size_bytes * self.free_blocks != self.kv_cache_bytes:
                raise ValueError(f"page_size_bytes {self.page_size_bytes} of kv_cache_bytes in group {group.name}")
        return self

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of the shared pool."""
        return self.kv_cache_bytes // self.free_blocks


class Diagnostics(Strict):
    """`profile/<deployment>-<digest>.diagnostics.json`: why an import is incomplete."""

    schema_version: Literal[1] = 1
    status: Literal["incomplete"] = "incomplete"
    probe_digest: str
    diagnostics: tuple[str, ...]
