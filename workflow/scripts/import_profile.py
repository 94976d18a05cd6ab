"""Import probe records as a profile, believing nothing: one failed check is a diagnostic, and no profile is made."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from producer.adapters import adapter_of, pins_digest
from producer.capacity import startup_blocks_of_request
from producer.resolving import KV_ELEMENT_BYTES, launch_of, probe_digest, read_campaign, resolve
from schemas.canonical import read_bytes, read_model, sha256, write_model
from schemas.errors import REFUSED, Refusal, run
from schemas.observation import CacheGroup, ProbeRecord, WorkerRecord
from schemas.profile import Diagnostics, Profile, ProfileGroup
from schemas.request import Request, ResolvedDeployment

CACHE_DTYPES = {"bfloat16": ("auto", "bfloat16"), "fp8": ("fp8", "fp8_e4m3")}
"""Label of the KV cache -> the engine settings whose cache elements it names, under a bfloat16 model."""


def profile_groups(groups: tuple[CacheGroup, ...], page_size_bytes: int) -> tuple[ProfileGroup, ...]:
    """Cache groups as the planner counts them: the page of every group is a whole block of the pool."""
    return tuple(
        ProfileGroup.model_validate(
            {
                "name": f"runtime_group_{index}",
                "kind": group.kind,
                "spec_type": group.spec_type,
                "num_layers": len(group.layer_names),
                "block_size_tokens": group.block_size_tokens,
                "page_size_bytes": page_size_bytes,
                "sliding_window": group.sliding_window,
                "blocks_per_request": 1 + (group.num_speculative_blocks or 0) if group.kind == "state" else None,
                "prefill_checkpoint_blocks": group.num_prefill_checkpoint_blocks or None,
                "prefill_checkpoint_alignment": group.prefill_checkpoint_alignment or None,
            }
        )
        for index, group in enumerate(groups)
    )


def _differ(label: str, pairs: dict[str, tuple[Any, Any]]) -> Iterator[str]:
    for field, (expected, found) in pairs.items():
        if expected != found:
            yield f"{label}: {field}: expected {expected}, found {found}"


def check_launch(request: Request, deployment: ResolvedDeployment, record: ProbeRecord) -> Iterator[str]:
    """The record is of this launch, and every expected rank is there once."""
    label = record.phase
    adapter = adapter_of(request.runtime_backend_version, "request")
    yield from _differ(
        label,
        {
            "probe_digest": (probe_digest(request, deployment), record.probe_digest),
            "launch": (launch_of(request, deployment), record.launch),
            "pins_sha256": (pins_digest(adapter), record.pins_sha256),
            "unresolved_fields": ((), record.unresolved_fields),
            "worker ranks (dp, tp, pp)": (
                [(dp, tp, 0) for dp in range(deployment.topology.dp) for tp in range(deployment.topology.tp)],
                sorted((worker.dp_rank, worker.tp_rank, worker.pp_rank) for worker in record.workers),
            ),
            "scheduler ranks": (
                list(range(deployment.topology.dp)),
                sorted(scheduler.dp_rank for scheduler in record.schedulers),
            ),
        },
    )


def check_worker(deployment: ResolvedDeployment, request: Request, label: str, worker: WorkerRecord) -> Iterator[str]:
    """Settings as asked for, and a cache whose views lie inside their storages."""
    yield from _differ(
        label,
        {
            "runtime_version": (request.runtime_backend_version, worker.runtime_version),
            "dtype": ("bfloat16", worker.dtype),
            "quantization": (None, worker.quantization),
            "enable_prefix_caching": (True, worker.enable_prefix_caching),
            "async_scheduling": (False, worker.async_scheduling),
            "enforce_eager": (deployment.engine.enforce_eager, worker.enforce_eager),
            "max_model_len": (deployment.limits.max_model_len, worker.max_model_len),
            "max_num_batched_tokens": (deployment.limits.max_num_tokens, worker.max_num_batched_tokens),
            "max_num_seqs": (deployment.limits.max_batch_size, worker.max_num_seqs),
            "tensor_parallel_size": (deployment.topology.tp, worker.tensor_parallel_size),
            "data_parallel_size": (deployment.topology.dp, worker.data_parallel_size),
            "pipeline_parallel_size": (1, worker.pipeline_parallel_size),
            "enable_expert_parallel": (deployment.topology.moe_ep > 1, worker.enable_expert_parallel),
        },
    )
    dtypes = CACHE_DTYPES.get(deployment.precision.kv_cache, ())
    if worker.cache_dtype not in dtypes:
        yield f"{label}: cache_dtype: expected one of {dtypes}, found {worker.cache_dtype!r}"
    if worker.weights_bytes <= 0:
        yield f"{label}: weights_bytes: expected a positive count, found {worker.weights_bytes}"
    storages = {storage.storage_id: storage.size_bytes for storage in worker.storages}
    allocated = sum(storages.values())
    if not allocated or allocated % worker.num_blocks:
        yield f"{label}: storages: expected bytes divisible by {worker.num_blocks} blocks, found {allocated}"
    for allocation in worker.tensor_allocations:
        last = allocation.offset + (len(allocation.layers) - 1) * allocation.layer_stride
        end = last + (worker.num_blocks - 1) * allocation.block_stride
        if end >= allocation.size:
            yield f"{label}: tensor of {allocation.layers[0]}: last page: expected below {allocation.size}, found {end}"
    if deployment.engine.enforce_eager and worker.cudagraph_mode != "NONE":
        yield f"{label}: cudagraph_mode: expected NONE of an eager launch, found {worker.cudagraph_mode}"
    element = KV_ELEMENT_BYTES[deployment.precision.kv_cache]
    attention = {layer for group in worker.groups if group.kind == "attention" for layer in group.layer_names}
    for layer in sorted(attention & worker.layer_tensors.keys()):
        sizes = {tensor.element_size_bytes for tensor in worker.layer_tensors[layer]}
        if sizes != {element}:
            yield f"{label}: {layer}: expected elements of {element} bytes, found {sorted(sizes)}"
    owned = {layer for group in worker.groups for layer in group.layer_names}
    for layer in sorted(owned - worker.layer_tensors.keys()):
        yield f"{label}: layer_tensors: expected a bound tensor of {layer}, found none"
    for layer, tensors in worker.layer_tensors.items():
        for tensor in tensors:
            reach = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride_bytes, strict=False))
            end = tensor.storage_offset_bytes + reach + tensor.element_size_bytes
            size = storages.get(tensor.storage_id, 0)
            if len(tensor.shape) != len(tensor.stride_bytes) or end > size:
                yield f"{label}: {layer}: expected a view inside {size} bytes, found {end}"


def check_cache(runtime: str, deployment: ResolvedDeployment, record: ProbeRecord) -> Iterator[str]:
    """Groups of known kinds, equal over ranks; the pool's count, its null block and its concurrency add up."""
    for scheduler in record.schedulers:
        label = f"{record.phase} scheduler dp{scheduler.dp_rank}"
        for group in scheduler.groups:
            if group.kind == "unsupported":
                yield f"{label}: unsupported runtime cache spec {group.spec_type}"
        # Data-parallel ranks size their caches independently: only a rank's own workers have its number of blocks.
        for worker in record.workers:
            if worker.dp_rank == scheduler.dp_rank and worker.num_blocks != scheduler.num_blocks:
                found = f"{worker.num_blocks} of worker tp{worker.tp_rank}, found {scheduler.num_blocks}"
                yield f"{label}: num_blocks: expected {found}"
            if worker.groups != scheduler.groups:
                sizes = [[group.block_size_tokens for group in groups] for groups in (worker.groups, scheduler.groups)]
                yield (
                    f"{label}: groups: expected those of worker dp{worker.dp_rank} tp{worker.tp_rank} "
                    f"with blocks {sizes[0]}, found others with blocks {sizes[1]}"
                )
        reserved = scheduler.num_blocks - scheduler.initial_free_blocks
        limits = deployment.limits
        yield from _differ(
            label,
            {
                "runtime_version": (runtime, scheduler.runtime_version),
                "async_scheduling": (False, scheduler.async_scheduling),
                "reserved blocks": (len(scheduler.permanent_reserved_block_ids), reserved),
                "watermark_blocks": (0, scheduler.watermark_blocks),
                "enable_prefix_caching": (True, scheduler.enable_prefix_caching),
                "mamba_cache_mode": (deployment.engine.mamba_cache_mode or "none", scheduler.mamba_cache_mode),
                "max_num_scheduled_tokens": (limits.max_num_tokens, scheduler.max_num_scheduled_tokens),
                "max_num_running_reqs": (limits.max_batch_size, scheduler.max_num_running_reqs),
                "max_model_len": (limits.max_model_len, scheduler.max_model_len),
            },
        )
        if scheduler.cache_hit_alignment_tokens % scheduler.hash_block_size:
            yield (
                f"{label}: cache_hit_alignment_tokens: expected a multiple of the hash block "
                f"{scheduler.hash_block_size}, found {scheduler.cache_hit_alignment_tokens}"
            )
        if any(group.kind == "unsupported" for group in scheduler.groups):
            continue
        if any(group.spec_type == "MambaSpec" for group in scheduler.groups):
            blocks = {group.block_size_tokens for group in scheduler.groups if group.spec_type == "MambaSpec"}
            for field, size in (("block_size", scheduler.block_size), ("hash_block_size", scheduler.hash_block_size)):
                if blocks != {size}:
                    yield f"{label}: {field}: expected the recurrent groups' block {sorted(blocks)}, found {size}"
        groups = profile_groups(scheduler.groups, 1)
        startup = startup_blocks_of_request(groups, limits.max_model_len, limits.max_num_tokens)
        concurrency = scheduler.num_blocks / startup
        if abs(concurrency - scheduler.max_concurrency) > 0.01 * concurrency:
            yield (
                f"{label}: max_concurrency: expected {scheduler.num_blocks} blocks / {startup} of a request = "
                f"{concurrency:.2f}, found {scheduler.max_concurrency:.2f}"
            )


def diagnose(request: Request, deployment: ResolvedDeployment, records: list[ProbeRecord]) -> list[str]:
    """Every reason why these records are no profile."""
    found: list[str] = []
    phases = sorted(record.phase for record in records)
    if phases != sorted(deployment.phases):
        found.append(f"phases: expected {sorted(deployment.phases)}, found {phases}")
    for record in records:
        found.extend(check_launch(request, deployment, record))
        for worker in record.workers:
            label = f"{record.phase} worker dp{worker.dp_rank} tp{worker.tp_rank}"
            found.extend(check_worker(deployment, request, label, worker))
        found.extend(check_cache(request.runtime_backend_version, deployment, record))
    geometries = {tuple(scheduler.groups) for record in records for scheduler in record.schedulers}
    if len(geometries) > 1:
        found.append("groups: expected the same geometry in every phase and rank, found several")
    return found


def build_profile(
    request: Request, deployment: ResolvedDeployment, records: list[ProbeRecord], digests: dict[str, str]
) -> Profile:
    """The profile of records without diagnostics: capacity is the smallest over ranks and phases."""
    schedulers = [scheduler for record in records for scheduler in record.schedulers]
    workers = [worker for record in records for worker in record.workers]
    pages = {sum(storage.size_bytes for storage in worker.storages) // worker.num_blocks for worker in workers}
    page = max(pages)
    free = min(scheduler.initial_free_blocks for scheduler in schedulers)
    first = schedulers[0]
    return Profile.model_validate(
        {
            "architecture": deployment.config.architecture,
            "model_config_sha256": deployment.config.sha256,
            "model_revision": deployment.model_revision,
            "runtime_backend_version": request.runtime_backend_version,
            "probe_digest": probe_digest(request, deployment),
            "probe_records_sha256": digests,
            "groups": profile_groups(first.groups, page),
            "free_blocks": free,
            "kv_cache_bytes": free * page,
            "block_size": first.block_size,
            "hash_block_size": first.hash_block_size,
            "cache_hit_alignment_tokens": first.cache_hit_alignment_tokens,
            "enable_prefix_caching": first.enable_prefix_caching,
            "mamba_cache_mode": first.mamba_cache_mode,
            "max_num_tokens": first.max_num_scheduled_tokens,
            "max_batch_size": first.max_num_running_reqs,
            "max_model_len": first.max_model_len,
            "weights_bytes": max(worker.weights_bytes for worker in workers),
            "device_name": workers[0].device_name,
            "cudagraph_capture_sizes": workers[0].cudagraph_capture_sizes,
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--campaign", type=Path, required=True)
    parser.add_argument("--deployment", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("records", type=Path, nargs="+")
    arguments = parser.parse_args()
    request = resolve(read_campaign(arguments.campaign), arguments.campaign)
    if arguments.deployment not in request.deployments:
        raise Refusal("deployment", f"one of {list(request.deployments)}", arguments.deployment, arguments.campaign)
    deployment = request.deployments[arguments.deployment]
    records = [read_model(ProbeRecord, path, "probe record") for path in arguments.records]
    diagnostics = diagnose(request, deployment, records)
    if diagnostics:
        report = arguments.output.with_suffix(".diagnostics.json")
        digest = probe_digest(request, deployment)
        write_model(report, Diagnostics(probe_digest=digest, diagnostics=tuple(diagnostics)))
        for line in diagnostics:
            print(f"incomplete: {line}", file=sys.stderr)
        sys.exit(REFUSED)
    digests = {path.name: sha256(read_bytes(path, "probe record")) for path in arguments.records}
    write_model(arguments.output, build_profile(request, deployment, records, digests))


if __name__ == "__main__":
    run(main)
