"""Import of the CPU engine's real records; each expectation was worked out by hand from the model's config."""

import json
from pathlib import Path

import pytest

from producer.resolving import probe_digest, read_campaign, resolve
from schemas.canonical import parse
from schemas.errors import Refusal
from schemas.observation import ProbeRecord

from import_profile import build_profile, diagnose

ROOT = Path(__file__).parents[2]
CAMPAIGN = Path("config/campaigns/cpu-demo.yaml")
MIB = 1 << 20


@pytest.fixture
def request_(monkeypatch):
    monkeypatch.chdir(ROOT)
    return resolve(read_campaign(CAMPAIGN), CAMPAIGN)


def record(name: str) -> dict:
    return json.loads((ROOT / "tests" / "fixtures" / "probes" / f"{name}.json").read_text())


def imported(request_, name: str, change=lambda data: None):
    """Diagnostics, and the profile when there are none, of a prefill and a decode record."""
    deployment = request_.deployments[name]
    prefill, decode = record(name), record(name) | {"phase": "decode"}
    change(prefill)
    records = [parse(ProbeRecord, data, name) for data in (prefill, decode)]
    found = diagnose(request_, deployment, records)
    return found, None if found else build_profile(request_, deployment, records, {})


@pytest.mark.parametrize(
    ("name", "page", "blocks", "block", "kinds"),
    [
        # K and V of 2 heads x 64 x 2 bytes x 128 tokens = 64 KiB a layer; 4 layers share a block of 256 KiB.
        ("dense", 4 * 64 * 1024, 1024, 128, [("FullAttentionSpec", None)]),
        # 6 layers in 3 groups of 2: a block is 2 layers' pages.
        ("sliding", 2 * 64 * 1024, 2048, 128, [("SlidingWindowSpec", 512)] * 2 + [("FullAttentionSpec", None)]),
        # One attention layer, block 256: 128 KiB; the three states are padded to it.
        ("hybrid", 128 * 1024, 2048, 256, [("MambaSpec", None)] * 3 + [("FullAttentionSpec", None)]),
    ],
)
def test_real_records_import_complete(request_, name, page, blocks, block, kinds):
    diagnostics, profile = imported(request_, name)
    assert diagnostics == []
    assert profile.page_size_bytes == page
    assert page * blocks == 256 * MIB
    assert profile.free_blocks == blocks - 1
    assert profile.block_size == profile.hash_block_size == block
    assert [(group.spec_type, group.sliding_window) for group in profile.groups] == kinds


def test_the_weights_are_counted_before_repacking(request_):
    _, profile = imported(request_, "dense")
    hidden, inner, head, vocabulary = 256, 768, 64, 8192
    attention = hidden * (4 + 2 + 2) * head + 4 * head * hidden + 2 * head
    layer = attention + 3 * hidden * inner + 2 * hidden
    assert profile.weights_bytes == 2 * (4 * layer + hidden + vocabulary * hidden)


def set_worker(field, value):
    return lambda data: data["workers"][0].update({field: value})


def set_scheduler(field, value):
    return lambda data: data["schedulers"][0].update({field: value})


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda d: d.update(probe_digest="0" * 64), "prefill: probe_digest: expected"),
        (lambda d: d["launch"].update(system="other"), "prefill: launch: expected"),
        (lambda d: d.update(workers=[]), "worker ranks (dp, tp, pp): expected [(0, 0, 0)], found []"),
        (lambda d: d.update(unresolved_fields=["x"]), "unresolved_fields: expected (), found ('x',)"),
        (set_worker("runtime_version", "0.32.1"), "runtime_version: expected 0.32.0, found 0.32.1"),
        (set_worker("dtype", "float32"), "dtype: expected bfloat16, found float32"),
        (set_worker("cache_dtype", "fp8"), "cache_dtype: expected one of ('auto', 'bfloat16'), found 'fp8'"),
        (set_worker("async_scheduling", True), "async_scheduling: expected False, found True"),
        (set_worker("enable_prefix_caching", False), "enable_prefix_caching: expected True, found False"),
        (set_worker("weights_bytes", 0), "weights_bytes: expected a positive count, found 0"),
        (set_worker("num_blocks", 1000), "storages: expected bytes divisible by 1000 blocks"),
        (set_worker("layer_tensors", {}), "expected a bound tensor of model.layers.0.self_attn.attn, found none"),
        (lambda d: d["workers"][0]["tensor_allocations"][0].update(size=1), "last page: expected below 1"),
        (lambda d: d["workers"][0]["storages"][0].update(size_bytes=1024), "expected a view inside 1024 bytes"),
        (set_scheduler("initial_free_blocks", 1000), "reserved blocks: expected 1, found 24"),
        (set_scheduler("mamba_cache_mode", "all"), "mamba_cache_mode: expected none, found all"),
        (set_scheduler("max_concurrency", 64.0), "1024 blocks / 32 of a request = 32.00, found 64.00"),
        (set_scheduler("watermark_blocks", 3), "watermark_blocks: expected 0, found 3"),
        (set_scheduler("runtime_version", "9"), "scheduler dp0: runtime_version: expected 0.32.0, found 9"),
        (set_scheduler("async_scheduling", True), "scheduler dp0: async_scheduling: expected False, found True"),
        (set_scheduler("num_blocks", 512), "num_blocks: expected 1024 of worker tp0, found 512"),
        (set_worker("cudagraph_mode", "FULL"), "cudagraph_mode: expected NONE of an eager launch, found FULL"),
        (
            lambda d: d["workers"][0]["layer_tensors"]["model.layers.0.self_attn.attn"][0].update(element_size_bytes=4),
            "model.layers.0.self_attn.attn: expected elements of 2 bytes, found [4]",
        ),
        (
            lambda d: d["workers"][0]["layer_tensors"]["model.layers.0.self_attn.attn"][0].update(storage_id="none"),
            "expected a view inside 0 bytes",
        ),
        (
            lambda d: d["workers"][0]["groups"][0].update(block_size_tokens=16),
            "groups: expected those of worker dp0 tp0 with blocks [16], found others with blocks [128]",
        ),
        (
            lambda d: d["schedulers"][0]["groups"][0].update(kind="unsupported", spec_type="RSWASpec"),
            "unsupported runtime cache spec RSWASpec",
        ),
    ],
)
def test_each_doubt_is_a_diagnostic_and_no_profile(request_, change, line):
    diagnostics, profile = imported(request_, "dense", change)
    assert profile is None
    assert any(line in diagnostic for diagnostic in diagnostics), diagnostics


@pytest.mark.parametrize("field", ["block_size", "hash_block_size"])
def test_a_scheduler_whose_block_is_not_the_recurrent_groups_is_a_diagnostic(request_, field):
    """vllm#54076, #51113: align mode split by the wrong group's block."""
    diagnostics, profile = imported(request_, "hybrid", set_scheduler(field, 128))
    assert profile is None
    assert any(f"{field}: expected the recurrent groups' block [256], found 128" in line for line in diagnostics)


@pytest.mark.parametrize(
    "change",
    [set_worker("num_blocks", 0), set_worker("groups", []), set_scheduler("hash_block_size", 0)],
)
def test_a_record_that_cannot_be_is_refused_when_it_is_read(change):
    data = record("dense")
    change(data)
    with pytest.raises(Refusal):
        parse(ProbeRecord, data, "dense")


def test_capacity_is_the_smallest_and_the_count_is_no_geometry(request_):
    deployment = request_.deployments["dense"]
    prefill, decode = record("dense"), record("dense") | {"phase": "decode"}
    scheduler = decode["schedulers"][0]
    scheduler.update(num_blocks=512, initial_free_blocks=511, max_concurrency=16.0)
    worker = decode["workers"][0]
    worker.update(num_blocks=512)
    records = [parse(ProbeRecord, data, "dense") for data in (prefill, decode)]
    assert diagnose(request_, deployment, records) == []
    assert build_profile(request_, deployment, records, {}).free_blocks == 511


def parallel_records(change) -> tuple:
    """The request of the two-rank campaign, its deployment, and the real records of both phases, changed."""
    campaign = Path("config/campaigns/cpu-parallel.yaml")
    request = resolve(read_campaign(campaign), campaign)
    prefill, decode = record("data"), record("data") | {"phase": "decode"}
    change(prefill)
    return request, request.deployments["data"], [parse(ProbeRecord, data, "data") for data in (prefill, decode)]


def test_ranks_size_their_caches_independently_and_the_smaller_counts(request_):
    """vllm#46106: replicas thousands of blocks apart, all else equal."""

    def change(data):
        for worker, scheduler, blocks in zip(data["workers"], data["schedulers"], (512, 351), strict=True):
            startup = scheduler["num_blocks"] / scheduler["max_concurrency"]
            size = worker["storages"][0]["size_bytes"] // 512 * blocks
            worker.update(num_blocks=blocks)
            scheduler.update(num_blocks=blocks, initial_free_blocks=blocks - 1, max_concurrency=blocks / startup)
            if blocks != 512:
                worker["storages"][0]["size_bytes"] = size
                for allocation in worker["tensor_allocations"]:
                    allocation["size"] = size
                worker["layer_tensors"] = {
                    layer: [tensor | {"shape": [blocks, *tensor["shape"][1:]], "storage_offset_bytes": 0}]
                    for layer, (tensor,) in worker["layer_tensors"].items()
                }
                for allocation in worker["tensor_allocations"]:
                    allocation["layer_stride"] = size // len(allocation["layers"])

    request, deployment, records = parallel_records(change)
    assert diagnose(request, deployment, records) == []
    assert build_profile(request, deployment, records, {}).free_blocks == 350


def test_ranks_with_other_blocks_are_a_diagnostic_with_both_values(request_):
    """vllm#51752: the rank, the group and both values, where the engine's own error points elsewhere."""

    def change(data):
        data["workers"][1]["groups"][0].update(block_size_tokens=16)

    found = diagnose(*parallel_records(change))
    line = "groups: expected those of worker dp1 tp0 with blocks [16], found others with blocks [128]"
    assert [diagnostic for diagnostic in found if diagnostic.endswith(line)] == [
        f"prefill scheduler dp{rank}: {line}" for rank in (0, 1)
    ]


def test_a_missing_rank_is_a_diagnostic(request_):
    found = diagnose(*parallel_records(lambda data: data["workers"].pop()))
    assert "prefill: worker ranks (dp, tp, pp): expected [(0, 0, 0), (1, 0, 0)], found [(0, 0, 0)]" in found, found


def test_the_real_records_of_two_workers_and_of_two_ranks_import_complete(request_):
    """64 MiB a worker. Tensor parallel: one KV head a worker of 4 layers, so 64 KiB x 2 a block of 128 tokens."""
    campaign = Path("config/campaigns/cpu-parallel.yaml")
    request = resolve(read_campaign(campaign), campaign)
    for name, page in (("tensor", 4 * 2 * 128 * 64 * 2), ("data", 2 * 2 * 2 * 128 * 64 * 2)):
        records = [parse(ProbeRecord, record(name) | {"phase": phase}, name) for phase in ("prefill", "decode")]
        assert diagnose(request, request.deployments[name], records) == []
        profile = build_profile(request, request.deployments[name], records, {})
        assert (profile.page_size_bytes, profile.free_blocks) == (page, (64 * MIB) // page - 1)


def test_a_missing_phase_is_a_diagnostic(request_):
    deployment = request_.deployments["dense"]
    found = diagnose(request_, deployment, [parse(ProbeRecord, record("dense"), "dense")])
    assert "phases: expected ['decode', 'prefill'], found ['prefill']" in found


def test_the_fixtures_are_of_the_campaign_as_it_stands(request_):
    for campaign in (CAMPAIGN, CAMPAIGN.with_name("cpu-parallel.yaml")):
        request = resolve(read_campaign(campaign), campaign)
        for name, deployment in request.deployments.items():
            assert record(name)["probe_digest"] == probe_digest(request, deployment), (
                f"cp results/{campaign.stem}/probe/{name}-*/prefill.json tests/fixtures/probes/{name}.json"
            )
