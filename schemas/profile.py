"""The imported profile: what planning believes about a deployment's memory."""

from typing import Literal

from schemas.canonical import Strict
from schemas.points import NonNegative, Positive

GroupKind = Literal["attention", "convolution", "state"]


class ProfileGroup(Strict):
    """One cache group. `page_size_bytes` is a whole block of the pool; sizes of blocks and windows in tokens."""

    name: str
    kind: GroupKind
    spec_type: str
    num_layers: Positive
    block_size_tokens: Positive
    page_size_bytes: Positive
    sliding_window: Positive | None = None
    blocks_per_request: Positive | None = None
    prefill_checkpoint_blocks: Positive | None = None
    prefill_checkpoint_alignment: Positive | None = None


class Profile(Strict):
    """`profile/<deployment>-<digest>.json`: imported from probe records that passed every check."""

    schema_version: Literal[1] = 1
    architecture: str
    model_config_sha256: str
    model_revision: str
    runtime_backend_version: str
    probe_digest: str
    probe_records_sha256: dict[str, str]
    groups: tuple[ProfileGroup, ...]
    free_blocks: Positive
    kv_cache_bytes: Positive
    block_size: Positive
    hash_block_size: Positive
    cache_hit_alignment_tokens: Positive
    enable_prefix_caching: bool
    mamba_cache_mode: Literal["none", "align"]
    max_num_tokens: Positive
    max_batch_size: Positive
    max_model_len: Positive
    weights_bytes: NonNegative
    device_name: str

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
