"""What a cell's digest covers, and what it does not."""

import json
from pathlib import Path

import pytest

from producer.planning import AcceptedProfile, plan_campaign
from producer.resolving import resolve
from schemas.canonical import parse, read_yaml
from schemas.plan import CellIdentity
from schemas.profile import Profile
from schemas.request import Campaign

ROOT = Path(__file__).parents[2]
CAMPAIGN = Path("config/campaigns/cpu-demo.yaml")


@pytest.fixture
def digests(monkeypatch):
    """Digests of the two cells of the demo's dense deployment after a change of the campaign."""
    monkeypatch.chdir(ROOT)

    def of(change=lambda campaign, dense: None) -> dict[str, str]:
        data = json.loads(json.dumps(read_yaml(CAMPAIGN, "campaign")))
        data["deployments"] = {"dense": data["deployments"]["dense"]}
        change(data, data["deployments"]["dense"])
        request = resolve(parse(Campaign, data, CAMPAIGN), CAMPAIGN)
        (name,) = request.deployments
        deployment = request.deployments[name]
        limits = deployment.limits
        profile = Profile.model_validate(
            {
                "architecture": deployment.config.architecture,
                "model_config_sha256": deployment.config.sha256,
                "model_revision": deployment.model_revision,
                "runtime_backend_version": "0.32.0",
                "groups": (
                    {
                        "name": "runtime_group_0",
                        "kind": "attention",
                        "spec_type": "FullAttentionSpec",
                        "num_layers": 4,
                        "block_size_tokens": 128,
                        "page_size_bytes": 262_144,
                    },
                ),
                "free_blocks": 1023,
                "kv_cache_bytes": 1023 * 262_144,
                "block_size": 128,
                "hash_block_size": 128,
                "cache_hit_alignment_tokens": 128,
                "enable_prefix_caching": True,
                "mamba_cache_mode": "none",
                "max_num_tokens": limits.max_num_tokens,
                "max_batch_size": limits.max_batch_size,
                "max_model_len": limits.max_model_len,
                "device_name": "cpu",
            }
        )
        planned = plan_campaign(request, {name: AcceptedProfile(profile, "0" * 64)}, "formal", "campaign")
        return {cell.phase: cell.digest for cell in planned.plan.cells}

    return of


def environment(campaign, dense):
    campaign["environment"]["OMP_NUM_THREADS"] = "2"


def limit(campaign, dense):
    dense["limits"]["max_batch_size"] = 16


def memory(campaign, dense):
    dense["engine"]["kv_cache_memory_bytes"] = 1 << 29


def graphs(campaign, dense):
    dense["engine"].update(enforce_eager=False, graph={"cudagraph_mode": "PIECEWISE"})


def revision(campaign, dense):
    dense["model_revision"] = "another"


def warmups(campaign, dense):
    dense["warmup_iterations"] = 0


@pytest.mark.parametrize("change", [environment, limit, memory, graphs, revision, warmups])
def test_what_decides_the_numbers_of_both_cells(digests, change):
    before, after = digests(), digests(change)
    assert before["prefill"] != after["prefill"]
    assert before["decode"] != after["decode"]


def test_points_decide_the_cell_of_their_phase_alone(digests):
    def one_more(campaign, dense):
        dense["grid"]["decode"]["batch_sizes"] = [1, 2, 3, 4, 8]

    before, after = digests(), digests(one_more)
    assert before["prefill"] == after["prefill"]
    assert before["decode"] != after["decode"]


def words(campaign, dense):
    campaign["description"] = "other words"


def label(campaign, dense):
    campaign.update(backend_version="lab", runtime_backend_version="0.32.0")


def place(campaign, dense):
    campaign["execution"] = {"partition": "gpu", "mem_mb": 1, "cpus_per_task": 64}


def own_place(campaign, dense):
    dense["execution"] = {"partition": "other"}


def name(campaign, dense):
    campaign["deployments"] = {"renamed": campaign["deployments"].pop("dense")}


def spelled_out(campaign, dense):
    dense["topology"] = {"tp": 1, "pp": 1, "dp": 1, "moe_tp": 1, "moe_ep": 1, "cp": 1}
    dense["worker_type"] = "aggregated"


def samples(campaign, dense):
    dense["grid"]["samples"] = {"decode_batch_sizes": 7}


@pytest.mark.parametrize("change", [words, label, place, own_place, name, spelled_out, samples])
def test_what_decides_no_number(digests, change):
    assert digests(change) == digests()


def test_an_absent_optional_field_leaves_old_digests_alone():
    optional = {name for name, field in CellIdentity.model_fields.items() if not field.is_required()}
    assert optional == {"schema_version", "model_sidecar_sha256", "execution_identity", "warmup_iterations", "nodes"}
