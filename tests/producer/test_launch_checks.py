"""Launches that no rule describes are refused by name and value; the engine's ordinary one is not."""

import ast
import copy
import importlib.util
import json
import os
import re
import subprocess
import sys
from functools import reduce
from pathlib import Path
from types import SimpleNamespace

import pytest
from cells import frozen_cell
from jobs import run

from producer.launch_checks import MODELLED, ONLY_IN_LATER_RELEASES, launch_facts, refuse_unmodelled, unmodelled
from producer.resolving import launch_of, probe_digest, read_campaign, resolve
from profiles import group, profile
from schemas.canonical import parse, write_model
from schemas.errors import Refusal
from schemas.observation import ProbeRecord

ROOT = Path(__file__).parents[2]
VLLM_033 = "PASSGRID_VLLM_033"
"""Environment variable that names a folder with the Python files of the vllm 0.33.0 wheel."""

KDA = type("MambaSpec", (SimpleNamespace,), {})
MLA = type("MLAAttentionSpec", (SimpleNamespace,), {})
UNIFORM = type("UniformTypeKVCacheSpecs", (SimpleNamespace,), {})


def ordinary(*specs) -> SimpleNamespace:
    """The scheduler of an ordinary launch, as far as it is asked; by hand, since this is what is promised."""
    specs = specs or (KDA(block_size=2176), KDA(block_size=2176), MLA(block_size=2176))
    return SimpleNamespace(
        block_size=2176,
        hash_block_size=2176,
        use_eagle_block_drop=False,
        num_lookahead_tokens=0,
        num_hash_lookahead_tokens=0,
        mamba_partial_cache_hit=False,
        prefix_replay_tokens=0,
        kv_cache_config=SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs]),
        cache_config=SimpleNamespace(
            block_size=2176,
            enable_prefix_caching=True,
            prefix_cache_retention_interval=0,
            enable_mamba_shared_prefix_checkpoint=False,
            kv_offloading_size=None,
        ),
        scheduler_config=SimpleNamespace(
            async_scheduling=False,
            policy="fcfs",
            enable_chunked_prefill=True,
            long_prefill_token_threshold=0,
            max_num_active_seqs=None,
            prefill_schedule_interval=1,
            scheduler_reserve_full_isl=True,
            watermark=0.0,
        ),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1, prefill_context_parallel_size=1, decode_context_parallel_size=1
        ),
        vllm_config=SimpleNamespace(
            speculative_config=None,
            diffusion_config=None,
            kv_transfer_config=None,
            ec_transfer_config=None,
            engram_config=None,
            offload_config=SimpleNamespace(
                uva=SimpleNamespace(cpu_offload_gb=0), prefetch=SimpleNamespace(offload_group_size=0)
            ),
        ),
    )


def with_value(scheduler: SimpleNamespace, path: str, value: object) -> SimpleNamespace:
    changed = copy.deepcopy(scheduler)
    *parts, name = path.split(".")
    setattr(reduce(getattr, parts, changed), name, value)
    return changed


class KVTransferConfig:
    """A part of the configuration that is no plain value."""

    def __str__(self) -> str:
        return "KVTransferConfig(kv_connector='NixlConnector')"


CASES = [
    ("vllm_config.speculative_config", "SpeculativeConfig(method='mtp')", None),
    ("vllm_config.diffusion_config", "DiffusionConfig(canvas_length=32)", None),
    ("num_lookahead_tokens", 1, 0),
    ("cache_config.enable_prefix_caching", False, True),
    ("use_eagle_block_drop", True, False),
    ("num_hash_lookahead_tokens", 1, 0),
    ("mamba_partial_cache_hit", True, False),
    ("prefix_replay_tokens", 128, 0),
    ("cache_config.prefix_cache_retention_interval", 4352, 0),
    ("cache_config.prefix_cache_retention_interval", None, 0),
    ("cache_config.enable_mamba_shared_prefix_checkpoint", True, False),
    ("vllm_config.kv_transfer_config", KVTransferConfig(), None),
    ("vllm_config.ec_transfer_config", "ECTransferConfig()", None),
    ("cache_config.kv_offloading_size", 4.0, None),
    ("vllm_config.offload_config.uva.cpu_offload_gb", 10.0, 0),
    ("vllm_config.offload_config.prefetch.offload_group_size", 8, 0),
    ("vllm_config.engram_config", SimpleNamespace(cpu_offload=True), False),
    ("scheduler_config.async_scheduling", True, False),
    ("parallel_config.pipeline_parallel_size", 2, 1),
    ("parallel_config.prefill_context_parallel_size", 2, 1),
    ("parallel_config.decode_context_parallel_size", 4, 1),
    ("scheduler_config.policy", "priority", "fcfs"),
    ("scheduler_config.enable_chunked_prefill", False, True),
    ("scheduler_config.long_prefill_token_threshold", 512, 0),
    ("scheduler_config.max_num_active_seqs", 4, None),
    ("scheduler_config.prefill_schedule_interval", 4, 1),
    ("scheduler_config.scheduler_reserve_full_isl", False, True),
    ("scheduler_config.watermark", 0.01, 0.0),
]
"""Attribute, value that is refused, value that is modelled."""


@pytest.mark.parametrize(("path", "value", "modelled"), CASES, ids=[case[0] for case in CASES])
def test_a_launch_that_no_rule_describes_is_refused_by_name_and_value(path: str, value, modelled):
    scheduler = with_value(ordinary(), path, value)
    if path == "vllm_config.engram_config":
        path, value = f"{path}.cpu_offload", True
    with pytest.raises(Refusal) as refused:
        refuse_unmodelled(scheduler, "config/models/glm-5.3-flash")
    assert str(refused.value) == f"launch {path}: expected {modelled}, found {value}: config/models/glm-5.3-flash"


def test_every_setting_has_a_case():
    assert {path.replace("engram_config", "engram_config.cpu_offload") for path, _, _ in CASES} == set(MODELLED)


def test_the_ordinary_launch_is_measured():
    refuse_unmodelled(ordinary(), "model")


def test_a_launch_without_recurrent_groups_may_hash_finer_than_it_schedules():
    refuse_unmodelled(with_value(ordinary(MLA(block_size=2176)), "hash_block_size", 544), "model")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cache_config.block_size": 64}, "launch cache_config.block_size: expected 2176, found 64: model"),
        ({"hash_block_size": 4}, "launch hash_block_size: expected 2176, found 4: model"),
        (
            {"block_size": 4352, "cache_config.block_size": 4352},
            "launch recurrent_block_sizes: expected 4352, found 2176: model",
        ),
    ],
)
def test_blocks_that_differ_are_refused(change: dict[str, int], message: str):
    scheduler = ordinary()
    for path, value in change.items():
        scheduler = with_value(scheduler, path, value)
    with pytest.raises(Refusal) as refused:
        refuse_unmodelled(scheduler, "model")
    assert str(refused.value) == message


@pytest.mark.parametrize("place", [0, 1, 2])
def test_every_recurrent_group_is_asked_for_its_block(place: int):
    specs = [KDA(block_size=2176), KDA(block_size=2176), MLA(block_size=2176)]
    specs.insert(place, UNIFORM(block_size=1088, kv_cache_specs={"layer": KDA(block_size=1088)}))
    with pytest.raises(Refusal, match=r"^launch recurrent_block_sizes: expected 2176, found 1088: model$"):
        refuse_unmodelled(ordinary(*specs), "model")


def test_a_part_that_an_engine_does_not_have_is_recorded_as_absent():
    scheduler = ordinary()
    del scheduler.num_hash_lookahead_tokens  # 0.32.0
    facts = launch_facts(scheduler)
    assert facts["num_hash_lookahead_tokens"] == "absent"
    assert facts["vllm_config.engram_config.cpu_offload"] == "absent"
    assert list(unmodelled(facts)) == []


@pytest.mark.parametrize("path", sorted(set(MODELLED) - set(ONLY_IN_LATER_RELEASES)))
def test_an_attribute_that_no_engine_has_is_never_taken_for_its_value(path: str):
    scheduler = with_value(ordinary(), "vllm_config.engram_config", SimpleNamespace(cpu_offload=False))
    *parts, name = path.split(".")
    delattr(reduce(getattr, parts, scheduler), name)
    with pytest.raises(AttributeError):
        launch_facts(scheduler)


def test_the_facts_are_plain_values_that_a_record_can_hold():
    scheduler = with_value(ordinary(), "vllm_config.kv_transfer_config", KVTransferConfig())
    facts = launch_facts(scheduler)
    assert json.loads(json.dumps(facts)) == facts
    assert facts["vllm_config.kv_transfer_config"] == "KVTransferConfig(kv_connector='NixlConnector')"
    assert facts["recurrent_block_sizes"] == [2176, 2176]


# The attributes are the engine's own: each is looked up in the source of the qualified releases, by its class.

PARTS = {
    "cache_config": "CacheConfig",
    "parallel_config": "ParallelConfig",
    "scheduler_config": "SchedulerConfig",
    "vllm_config": "VllmConfig",
}
"""What `Scheduler.__init__` takes from its argument (v1/core/sched/scheduler.py:97)."""


def attributes(folder: Path) -> dict[str, dict[str, str]]:
    """Class -> attribute -> its annotation: of the configuration's classes, and of the scheduler itself."""
    found: dict[str, dict[str, str]] = {}
    for file in (*sorted((folder / "config").glob("*.py")), folder / "v1" / "core" / "sched" / "scheduler.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef):
                own = found.setdefault(node.name, {})
                for field in node.body:
                    if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                        own[field.target.id] = ast.unparse(field.annotation)
                for set_ in (part for part in ast.walk(node) if isinstance(part, ast.Attribute)):
                    if isinstance(set_.ctx, ast.Store) and isinstance(set_.value, ast.Name) and set_.value.id == "self":
                        own.setdefault(set_.attr, "")
    return found


def missing(folder: Path) -> set[str]:
    """Paths that lead to no attribute in the engine source below `folder`."""
    classes, lost = attributes(folder), set()
    for path in (*MODELLED, "block_size", "hash_block_size", "kv_cache_config", "cache_config.block_size"):
        owner = "Scheduler"
        for name in path.split("."):
            if name not in classes.get(owner, {}):
                lost.add(path)
                break
            words = re.findall(r"\w+", classes[owner][name])
            owner = PARTS.get(name, "") or next((word for word in words if word in classes), "")
    return lost


def test_every_attribute_is_one_of_the_installed_engine():
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("no vllm here")
    (folder,) = spec.submodule_search_locations
    assert missing(Path(folder)) == set(ONLY_IN_LATER_RELEASES)


@pytest.mark.skipif(VLLM_033 not in os.environ, reason=f"{VLLM_033} names no folder with vllm 0.33.0's Python files")
def test_every_attribute_is_one_of_vllm_0_33():
    assert missing(Path(os.environ[VLLM_033]) / "vllm") == set()


# The real scheduler, without a model.

PROFILES = {
    "full": profile(),
    "window": profile(group("SlidingWindowSpec", 128, sliding_window=300), group("FullAttentionSpec", 128)),
    "hybrid": profile(group("MambaSpec", 128), group("FullAttentionSpec", 128)),
    "checkpoint": profile(
        group("MambaSpec", 128, prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=16),
        group("FullAttentionSpec", 128),
    ),
}


def real_scheduler(name: str):
    """vLLM's own scheduler under its defaults; the oracle leaves out what scheduling never asks for."""
    oracle = importlib.import_module("oracle")
    from vllm.config.offload import OffloadConfig

    scheduler = oracle.scheduler_of(PROFILES[name])
    scheduler.vllm_config.offload_config = OffloadConfig()
    scheduler.vllm_config.engram_config = None
    return scheduler


@pytest.mark.parametrize("name", PROFILES)
def test_the_engines_own_defaults_are_measured(name: str):
    pytest.importorskip("vllm.v1.core.sched.scheduler")
    scheduler = real_scheduler(name)
    refuse_unmodelled(scheduler, "model")
    assert launch_facts(scheduler)["recurrent_block_sizes"] == ([128] if name in ("hybrid", "checkpoint") else [])


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("policy", "priority"),
        ("long_prefill_token_threshold", 64),
        ("watermark", 0.25),
        ("max_num_active_seqs", 1),
        ("enable_chunked_prefill", False),
    ],
)
def test_a_setting_of_the_real_configuration_is_found(setting: str, value):
    pytest.importorskip("vllm.v1.core.sched.scheduler")
    scheduler = real_scheduler("hybrid")
    setattr(scheduler.vllm_config.scheduler_config, setting, value)
    with pytest.raises(Refusal, match=f"^launch scheduler_config.{setting}: expected .*, found {value}: model$"):
        refuse_unmodelled(scheduler, "model")


@pytest.mark.skipif(VLLM_033 not in os.environ, reason=f"{VLLM_033} names no folder with vllm 0.33.0's Python files")
def test_the_defaults_of_vllm_0_33_are_measured():
    folder = Path(os.environ[VLLM_033]).resolve()
    code = (
        "import sys, json; sys.path[:0] = ['tests/producer', 'tests', 'workflow/scripts']\n"
        "from test_launch_checks import PROFILES, launch_facts, real_scheduler, unmodelled\n"
        "facts = [launch_facts(real_scheduler(name)) for name in PROFILES]\n"
        "import vllm\n"
        "print(json.dumps([vllm.__version__, facts, [list(unmodelled(found)) for found in facts]]))"
    )
    environment = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    version, facts, refused = json.loads(done.stdout.splitlines()[-1])
    assert version.startswith("0.33.0")
    assert {found["num_hash_lookahead_tokens"] for found in facts} == {0}
    assert refused == [[]] * len(PROFILES)


@pytest.mark.engine
def test_a_launch_that_no_rule_describes_is_probed_and_not_measured(tmp_path: Path):
    """MLA on the CPU: the platform switches prefix caching off. The probe says so, the cell is refused."""
    campaign = ROOT / "tests" / "campaigns" / "campaigns" / "cpu-probes.yaml"
    request = resolve(read_campaign(campaign), campaign)
    deployment = request.deployments["mla"]
    file = ROOT / "tests" / "fixtures" / "probes" / "mla.json"
    probed = parse(ProbeRecord, json.loads(file.read_text()), file)
    (scheduler,) = probed.schedulers
    assert probed.probe_digest == probe_digest(request, deployment)
    assert scheduler.launch["cache_config.enable_prefix_caching"] is False
    assert {setting: found for setting, _, found in unmodelled(scheduler.launch)} == {
        "cache_config.enable_prefix_caching": False,
        "scheduler_config.enable_chunked_prefill": False,
    }
    cell = frozen_cell(**launch_of(request, deployment)).model_copy(update={"model": deployment.model})
    write_model(tmp_path / cell.name / "cell.json", cell)
    done = run(tmp_path / cell.name / "cell.json")
    assert done.returncode == 2, done.stderr[-2000:]
    line = f"launch cache_config.enable_prefix_caching: expected True, found False: {deployment.model}"
    assert f"refused: {line}" in done.stderr
    assert not (tmp_path / cell.name / "repetitions.jsonl").exists()
