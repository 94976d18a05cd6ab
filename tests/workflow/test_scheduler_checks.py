"""What a scheduler says of itself against what it was launched as; records are written by hand, from the configs."""

from pathlib import Path
from typing import Any

import pytest
from process_records import MODELLED_LAUNCH, ROOT, attention_spec, dense_scheduler, glm_scheduler, group

from producer.resolving import read_campaign, resolve
from schemas.canonical import parse
from schemas.errors import Refusal
from schemas.observation import SchedulerRecord
from schemas.request import Request

from scheduler_checks import scheduler_findings

ALIGNMENT = "cache_hit_alignment_tokens: expected the scheduler's block 128, found 256"


@pytest.fixture(autouse=True)
def _in_the_project(monkeypatch):
    monkeypatch.chdir(ROOT)


def request_of(campaign: str) -> Request:
    file = Path(f"config/campaigns/{campaign}.yaml")
    return resolve(read_campaign(file), file)


def findings(campaign: str, deployment: str, record: dict[str, Any], **change: Any) -> list[str]:
    request = request_of(campaign)
    resolved = request.deployments[deployment].model_copy(update=change)
    return list(scheduler_findings(request, resolved, parse(SchedulerRecord, record, "scheduler")))


def dense(**change: Any) -> list[str]:
    return findings("cpu-demo", "dense", dense_scheduler() | change)


def dense_launch(setting: str, value: Any) -> list[str]:
    return dense(launch=dense_scheduler()["launch"] | {setting: value})


def glm(**change: Any) -> list[str]:
    return findings("glm-5.3-flash-gb300-tp4", "tp4", glm_scheduler() | change)


def glm_launch(setting: str, value: Any) -> list[str]:
    return glm(launch=glm_scheduler()["launch"] | {setting: value})


def test_records_as_they_should_be_leave_no_doubt():
    assert dense() == []
    assert glm() == []


@pytest.mark.parametrize(
    ("field", "value", "line"),
    [
        ("unresolved_fields", ["groups.0"], "unresolved_fields: expected none, found groups.0"),
        ("runtime", dense_scheduler()["runtime"] | {"version": "9"}, "runtime.version: expected 0.32.0, found 9"),
        (
            "coordinator",
            "HybridKVCacheCoordinator",
            "coordinator: expected UnitaryKVCacheCoordinator, found HybridKVCacheCoordinator",
        ),
        ("permanent_reserved_block_ids", [], "permanent_reserved_block_ids: expected (0,), found ()"),
        ("permanent_reserved_block_ids", [1], "permanent_reserved_block_ids: expected (0,), found (1,)"),
        ("permanent_reserved_block_ids", [0, 1], "permanent_reserved_block_ids: expected (0,), found (0, 1)"),
        ("watermark_blocks", 3, "watermark_blocks: expected 0, found 3"),
        ("block_size", 256, "block_size: expected 128, the least common multiple of [128], found 256"),
        ("hash_block_size", 64, "hash_block_size: expected 128 of blocks [128], found 64"),
        (
            "cache_hit_alignment_tokens",
            256,
            "cache_hit_alignment_tokens: expected the scheduler's block 128, found 256",
        ),
        ("mamba_cache_mode", "align", "mamba_cache_mode: expected none, found align"),
        ("mamba_cache_mode", "all", "mamba_cache_mode: expected none, found all"),
        (
            "prefix_cache_retention_interval",
            128,
            "launch.cache_config.prefix_cache_retention_interval: expected 128, found 0",
        ),
        (
            "enable_prefix_caching",
            False,
            "launch.cache_config.enable_prefix_caching: expected False, found True",
        ),
        ("max_num_scheduled_tokens", 1024, "max_num_scheduled_tokens: expected 2048, found 1024"),
        ("max_num_running_reqs", 4, "max_num_running_reqs: expected 8, found 4"),
        ("max_model_len", 2048, "max_model_len: expected 4096, found 2048"),
        ("max_concurrency", 0.5, "max_concurrency: expected room for one request of 4096 tokens, found 0.5"),
    ],
)
def test_each_doubt_about_a_scheduler_names_the_field_and_both_values(field: str, value: Any, line: str):
    found = dense(**{field: value})
    assert line in found, found


@pytest.mark.parametrize(
    ("setting", "value", "expected"),
    [
        ("vllm_config.speculative_config", "eagle", None),
        ("vllm_config.diffusion_config", "x", None),
        ("num_lookahead_tokens", 1, 0),
        ("use_eagle_block_drop", True, False),
        ("num_hash_lookahead_tokens", 1, "absent in 0.32.0"),
        ("num_hash_lookahead_tokens", 0, "absent in 0.32.0"),
        ("mamba_partial_cache_hit", True, False),
        ("prefix_replay_tokens", 128, 0),
        ("cache_config.enable_mamba_shared_prefix_checkpoint", True, False),
        ("vllm_config.kv_transfer_config", "x", None),
        ("vllm_config.ec_transfer_config", "x", None),
        ("cache_config.kv_offloading_size", 1.0, None),
        ("vllm_config.offload_config.uva.cpu_offload_gb", 1, 0),
        ("vllm_config.offload_config.prefetch.offload_group_size", 1, 0),
        ("vllm_config.engram_config.cpu_offload", True, False),
        ("scheduler_config.async_scheduling", True, False),
        ("parallel_config.pipeline_parallel_size", 2, 1),
        ("parallel_config.prefill_context_parallel_size", 2, 1),
        ("parallel_config.decode_context_parallel_size", 2, 1),
        ("scheduler_config.policy", "priority", "fcfs"),
        ("scheduler_config.long_prefill_token_threshold", 512, 0),
        ("scheduler_config.max_num_active_seqs", 4, None),
        ("scheduler_config.prefill_schedule_interval", 2, 1),
        ("scheduler_config.scheduler_reserve_full_isl", False, True),
        ("scheduler_config.watermark", 0.1, 0.0),
        ("num_lookahead_tokens", 0.0, 0),
        ("prefix_replay_tokens", False, 0),
        ("parallel_config.pipeline_parallel_size", True, 1),
    ],
)
def test_a_setting_that_no_rule_describes_is_a_finding_by_name_and_value(setting: str, value: Any, expected: Any):
    assert dense_launch(setting, value) == [f"launch.{setting}: expected {expected}, found {value}"]


@pytest.mark.parametrize("setting", MODELLED_LAUNCH)
@pytest.mark.parametrize("version", ["0.32.0", "0.33.0"])
def test_only_what_an_engine_may_not_have_is_absent(version: str, setting: str):
    found = dense_launch(setting, "absent") if version == "0.32.0" else glm_launch(setting, "absent")
    lines = [line for line in found if line.startswith(f"launch.{setting}: expected ")]
    optional = [(version, "vllm_config.engram_config.cpu_offload"), ("0.32.0", "num_hash_lookahead_tokens")]
    if (version, setting) in optional:
        assert found == []
    else:
        assert lines
        assert all(line.endswith(", found absent") for line in lines)


@pytest.mark.parametrize("setting", ["cache_config.enable_prefix_caching", "scheduler_config.enable_chunked_prefill"])
def test_what_may_be_off_is_a_truth_value(setting: str):
    found = dense_launch(setting, "no")
    assert any(line.startswith(f"launch.{setting}: expected True, found no") for line in found), found


def test_launch_facts_are_those_that_are_asked_and_no_others():
    launch = dense_scheduler()["launch"]
    assert dense(launch=launch | {"x": 1}) == ["launch.x: expected no such setting, found 1"]
    without = {name: value for name, value in launch.items() if name != "scheduler_config.policy"}
    assert dense(launch=without) == ["launch.scheduler_config.policy: expected a value, found none"]


@pytest.mark.parametrize(
    ("setting", "value", "line"),
    [
        ("block_size", 64, "launch.block_size: expected 128, found 64"),
        ("cache_config.block_size", 64, "launch.cache_config.block_size: expected 128, found 64"),
        ("hash_block_size", 64, "launch.hash_block_size: expected 128, found 64"),
        ("recurrent_block_sizes", [128], "launch.recurrent_block_sizes: expected (), found (128,)"),
        ("recurrent_block_sizes", None, "launch.recurrent_block_sizes: expected (), found None"),
    ],
)
def test_blocks_of_the_launch_are_those_of_the_record(setting: str, value: Any, line: str):
    found = dense_launch(setting, value)
    assert line in found, found


def mla_on_the_cpu(**change: Any) -> list[str]:
    """The CPU platform switches both off for MLA and raises the budget of a step to a whole request."""
    launch = dense_scheduler()["launch"] | {
        "cache_config.enable_prefix_caching": False,
        "scheduler_config.enable_chunked_prefill": False,
    }
    record = {
        "launch": launch,
        "enable_prefix_caching": False,
        "coordinator": "KVCacheCoordinatorNoPrefixCache",
        "max_num_scheduled_tokens": 4096,
    }
    return dense(**record | change)


def test_prefix_caching_and_chunks_may_be_off_and_then_a_step_holds_a_whole_request():
    assert mla_on_the_cpu() == []
    found = mla_on_the_cpu(max_num_scheduled_tokens=2048)
    assert found == ["max_num_scheduled_tokens: expected 4096, found 2048"]


def test_the_cpu_switches_both_off_or_none():
    found = dense_launch("scheduler_config.enable_chunked_prefill", False)
    line = "launch.scheduler_config.enable_chunked_prefill: expected True, as enable_prefix_caching, found False"
    assert line in found


@pytest.mark.parametrize("field", ["block_size", "hash_block_size"])
def test_block_and_hash_block_are_the_recurrent_groups(field: str):
    found = glm(**{field: 128})
    assert f"{field}: expected the recurrent groups' block 2176, found 128" in found


def test_every_recurrent_group_has_the_one_block():
    groups = glm_scheduler()["groups"]
    launch = glm_scheduler()["launch"] | {"recurrent_block_sizes": [2176, 1088]}
    spec = groups[0]["layer_specs"]["kda"] | {"block_size": 1088}
    found = glm(groups=[*groups, group(["other"], spec, 3)], launch=launch)
    assert "block_size: expected the recurrent groups' block 1088, found 2176" in found
    assert "launch.recurrent_block_sizes: expected 2176, found 1088" in found


@pytest.mark.parametrize(("mode", "lines"), [("none", 0), ("align", 0), ("all", 1)])
def test_a_mode_that_was_asked_for_in_vain_is_kept_by_one_release_and_forgotten_by_the_other(mode: str, lines: int):
    """vLLM 0.32.0 keeps `align` of a model without recurrent state, 0.33.0 does not read the setting any more."""
    engine = request_of("cpu-demo").deployments["hybrid"].engine
    found = findings("cpu-demo", "dense", dense_scheduler() | {"mamba_cache_mode": mode}, engine=engine)
    assert found == ["mamba_cache_mode: expected none or align, found all"] * lines


@pytest.mark.parametrize("mode", ["none", "all"])
def test_recurrent_state_under_prefix_caching_is_aligned(mode: str):
    assert f"mamba_cache_mode: expected align, found {mode}" in glm(mamba_cache_mode=mode)


def test_align_needs_prefix_caching():
    found = glm(enable_prefix_caching=False)
    assert "mamba_cache_mode: expected none, found align" in found


def test_the_scheduler_block_is_the_least_common_multiple_and_the_hash_block_the_greatest_divisor():
    """Blocks of 128 and 192 tokens: both divide 384, and 64 divides both."""
    specs = [attention_spec(128, 65536), attention_spec(192, 65536)]
    groups = [group([f"layer{place}"], spec, 1) for place, spec in enumerate(specs)]
    record = dense_scheduler() | {
        "groups": groups,
        "coordinator": "HybridKVCacheCoordinator",
        "block_size": 384,
        "hash_block_size": 64,
        "cache_hit_alignment_tokens": 384,
        "launch": dense_scheduler()["launch"]
        | {"block_size": 384, "cache_config.block_size": 384, "hash_block_size": 64},
    }
    assert findings("cpu-demo", "dense", record) == []
    found = findings("cpu-demo", "dense", record | {"hash_block_size": 128})
    assert "hash_block_size: expected 64 of blocks [128, 192], found 128" in found
    found = findings("cpu-demo", "dense", record | {"block_size": 192})
    assert "block_size: expected 384, the least common multiple of [128, 192], found 192" in found


def test_concurrency_is_a_number():
    with pytest.raises(Refusal, match="JSON values"):
        dense(max_concurrency=float("inf"))
