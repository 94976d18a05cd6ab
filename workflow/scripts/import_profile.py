"""Import probe records as a profile, believing nothing: one doubt is a diagnostic, and no profile is made."""

import argparse
import gc
import sys
from pathlib import Path

from producer.resolving import probe_digest, read_campaign, resolve
from schemas.canonical import parse, read_model, recording_reads, write_model
from schemas.errors import REFUSED, Refusal, run
from schemas.observation import ProbeRecord, Settings
from schemas.profile import Diagnostics, Profile
from schemas.request import Request, ResolvedDeployment

from cache_groups import profile_groups
from probe_checks import diagnose
from spec_pages import pool_page_bytes

RECORDS = "probe records"
"""In the place of a file's name, of what comes from several."""


def _memory(settings: Settings) -> dict[str, float | int]:
    """What the size of the cache came from: bytes, or else a part of the device."""
    if settings.kv_cache_memory_bytes is not None:
        return {"kv_cache_memory_bytes": settings.kv_cache_memory_bytes}
    return {"gpu_memory_utilization": settings.gpu_memory_utilization}


def build_profile(
    request: Request, deployment: ResolvedDeployment, records: list[ProbeRecord], digests: dict[str, str]
) -> Profile:
    """The profile of records without diagnostics: capacity is the smallest over ranks and phases.

    Raises:
        Refusal: what no profile can hold.
    """
    schedulers = [scheduler for record in records for scheduler in record.schedulers]
    workers = [worker for record in records for worker in record.workers]
    first, worker = schedulers[0], workers[0]
    page = pool_page_bytes(worker.cache)
    free = min(scheduler.initial_free_blocks for scheduler in schedulers)
    try:
        groups = profile_groups(request.runtime_backend_version, worker.cache, page)
    except ValueError as problem:
        raise Refusal("cache.groups", "groups that a profile can hold", problem, RECORDS) from None
    return parse(
        Profile,
        {
            "architecture": deployment.config.architecture,
            "model_config_sha256": deployment.config.sha256,
            "model_revision": deployment.model_revision,
            "runtime_backend_version": request.runtime_backend_version,
            "probe_digest": probe_digest(request, deployment),
            "probe_records_sha256": digests,
            "groups": [group.model_dump(mode="json", exclude_none=True) for group in groups],
            "free_blocks": free,
            "kv_cache_bytes": free * page,
            "block_size": first.block_size,
            "hash_block_size": first.hash_block_size,
            "cache_hit_alignment_tokens": first.cache_hit_alignment_tokens,
            "enable_prefix_caching": first.enable_prefix_caching,
            "enable_chunked_prefill": worker.settings.enable_chunked_prefill,
            "mamba_cache_mode": first.mamba_cache_mode,
            **_memory(worker.settings),
            "max_num_tokens": first.max_num_scheduled_tokens,
            "max_batch_size": first.max_num_running_reqs,
            "max_model_len": first.max_model_len,
            "weights_bytes": max(worker.model.weights_bytes for worker in workers),
            "device_name": worker.hardware.device_name,
            "cudagraph_capture_sizes": worker.settings.compilation.cudagraph_capture_sizes,
        },
        RECORDS,
    )


def read_records(files: list[Path]) -> tuple[list[ProbeRecord], dict[str, str]]:
    """The records, and by file name the sha256 of the bytes that they were read from.

    Raises:
        Refusal: a file that holds no record, or two files with one name.
    """
    names = [file.name for file in files]
    for file in files:
        if names.count(file.name) > 1:
            raise Refusal("probe records", "files of different names", f"{names.count(file.name)} of one", file)
    with recording_reads() as reads:
        records = [read_model(ProbeRecord, file, "probe record") for file in files]
    return records, {file.name: reads[str(file)] for file in files}


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
    gc.disable()  # records refer to nothing above them, and a collection would walk through all of them
    records, digests = read_records(arguments.records)
    report = arguments.output.with_suffix(".diagnostics.json")
    diagnostics = diagnose(request, deployment, records)
    if diagnostics:
        digest = probe_digest(request, deployment)
        write_model(report, Diagnostics(probe_digest=digest, diagnostics=tuple(diagnostics)))
        for line in diagnostics:
            print(f"incomplete: {line}", file=sys.stderr)
        sys.exit(REFUSED)
    write_model(arguments.output, build_profile(request, deployment, records, digests))
    report.unlink(missing_ok=True)


if __name__ == "__main__":
    run(main)
