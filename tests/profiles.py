"""Profiles for tests: small ones by hand, and GLM-5.3-Flash at TP 4 as it was observed live."""

from schemas.profile import Profile, ProfileGroup

PAGE = 13_516_800
"""Bytes of a GLM-5.3-Flash pool block at TP 4."""


def group(spec_type: str, block: int, **more) -> ProfileGroup:
    kind = "state" if spec_type in ("MambaSpec", "CircularBufferSpec") else "attention"
    fields = {"name": "g", "kind": kind, "spec_type": spec_type, "num_layers": 1, "page_size_bytes": 1}
    if kind == "state":
        fields["blocks_per_request"] = 1
    return ProfileGroup(**fields | {"block_size_tokens": block} | more)


def profile(*groups: ProfileGroup, free_blocks: int = 1000, block: int = 128, **change) -> Profile:
    """A profile of `groups` (default: one full-attention group), 1,024 tokens and 8 requests a step, context 2,048."""
    groups = groups or (group("FullAttentionSpec", block),)
    recurrent = any(member.spec_type == "MambaSpec" for member in groups)
    fields = {
        "architecture": "A",
        "model_config_sha256": "0",
        "model_revision": "r",
        "runtime_backend_version": "0.32.0",
        "groups": groups,
        "free_blocks": free_blocks,
        "kv_cache_bytes": free_blocks * groups[0].page_size_bytes,
        "block_size": block,
        "hash_block_size": block,
        "cache_hit_alignment_tokens": block,
        "enable_prefix_caching": True,
        "mamba_cache_mode": "align" if recurrent else "none",
        "max_num_tokens": 1024,
        "max_batch_size": 8,
        "max_model_len": 2048,
        "device_name": "cpu",
    }
    return Profile(**fields | change)


def glm_groups(checkpoint: bool = True, alignment: int = 16) -> tuple[ProfileGroup, ...]:
    more = {"prefill_checkpoint_blocks": 1, "prefill_checkpoint_alignment": alignment} if checkpoint else {}
    state = [group("MambaSpec", 2176, num_layers=layers, page_size_bytes=PAGE, **more) for layers in (9, 9, 8, 8)]
    return (
        *state,
        group("MLAAttentionSpec", 2176, num_layers=22, page_size_bytes=PAGE),
        group("CircularBufferSpec", 4, num_layers=11, page_size_bytes=PAGE),
    )


def glm(checkpoint: bool = True, **change) -> Profile:
    limits = {"max_num_tokens": 8192, "max_batch_size": 32, "max_model_len": 1_048_576, "free_blocks": 13_696}
    return profile(*glm_groups(checkpoint), block=2176, **limits | change)
