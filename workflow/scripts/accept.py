"""Accept an imported profile: refuses until the campaign file names the profile's digest."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from producer.capacity import startup_blocks_of_request
from schemas.canonical import read_bytes, read_json, read_model, sha256, write_atomic
from schemas.errors import Refusal, run
from schemas.profile import Profile

from campaign_argument import add_campaign, graph_of


def changed_fields(old: Any, new: Any, place: str = "") -> Iterator[str]:
    """Where two profiles differ, field by field: `<place>: <old> -> <new>`."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            yield from changed_fields(old.get(key), new.get(key), f"{place}.{key}" if place else key)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (before, after) in enumerate(zip(old, new, strict=True)):
            yield from changed_fields(before, after, f"{place}[{index}]")
    elif old != new:
        yield f"{place}: {json.dumps(old)} -> {json.dumps(new)}"


def summary(profile: Profile) -> Iterator[str]:
    """What a person reads a profile for: the groups, the pool, and how many of the longest requests it holds."""
    for group in profile.groups:
        window = f", window {group.sliding_window}" if group.sliding_window else ""
        held = f", {group.blocks_per_request} of a request" if group.blocks_per_request else ""
        layers = "layer" if group.num_layers == 1 else "layers"
        yield (
            f"{group.kind}: {group.num_layers} {layers} of {group.spec_type}, blocks of {group.block_size_tokens} "
            f"tokens{window}{held}"
        )
    blocks = startup_blocks_of_request(
        profile.groups, profile.max_model_len, profile.max_num_tokens, profile.mamba_cache_mode
    )
    gib = profile.kv_cache_bytes / 2**30
    yield f"{profile.free_blocks} free blocks of {profile.page_size_bytes} bytes: {gib:.2f} GiB"
    yield (
        f"a request of {profile.max_model_len} tokens reserves {blocks} blocks: "
        f"{profile.free_blocks / blocks:.2f} of them at once"
    )
    switched_off = [
        name for name in ("enable_prefix_caching", "enable_chunked_prefill") if getattr(profile, name) is False
    ]
    if switched_off:
        yield f"the engine switched off {' and '.join(switched_off)}: it cannot be planned"


def accepted_before(root: Path, deployment: str, accepted: str) -> Path | None:
    """The profile that a digest in the campaign file means: a plan keeps those that it was made with."""
    kept = [*root.glob(f"plan-*/profiles/{deployment}.json"), *root.glob(f"profile/{deployment}-*.json")]
    return next((file for file in kept if sha256(file.read_bytes()) == accepted), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_campaign(parser)
    parser.add_argument("--deployment", required=True)
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    graph, deployment = graph_of(arguments), arguments.deployment
    imported = sha256(read_bytes(arguments.profile, "profile"))
    if not graph.is_accepted(deployment, imported):
        acceptance = graph.campaign.acceptance
        accepted = acceptance.get(deployment) if isinstance(acceptance, dict) else None
        before = None if accepted is None else accepted_before(graph.layout.root, deployment, accepted)
        print(f"profile of {deployment}: {arguments.profile}")
        profile = read_model(Profile, arguments.profile, "profile")
        print("".join(f"  {line}\n" for line in summary(profile)), end="")
        if before is not None:
            print(f"It is not the accepted one ({before}):")
            old, new = read_json(before, "profile"), read_json(arguments.profile, "profile")
            print("".join(f"  {line}\n" for line in changed_fields(old, new)), end="")
        print(f"Read it; if it is right, write into {arguments.campaign}:\n\nacceptance:\n  {deployment}: {imported}\n")
        raise Refusal(
            f"acceptance.{deployment}",
            f"the digest of the imported profile {imported}",
            accepted or "nothing",
            arguments.campaign,
        )
    write_atomic(arguments.output, imported.encode())


if __name__ == "__main__":
    run(main)
