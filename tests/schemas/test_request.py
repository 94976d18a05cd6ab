import pytest

from schemas.canonical import parse
from schemas.errors import Refusal
from schemas.request import Campaign, Deployment, Topology, strategy

DEPLOYMENT = {
    "model": "m",
    "model_revision": "abc",
    "limits": {"max_model_len": 4096},
    "engine": {"gpu_memory_utilization": 0.9},
}


@pytest.mark.parametrize(
    ("topology", "is_moe", "expected"),
    [
        ({}, False, "single"),
        ({"tp": 4}, False, "tp"),
        ({"dp": 2}, False, None),
        ({"tp": 4, "moe_tp": 4}, False, None),
        ({}, True, "single"),
        ({"tp": 4, "moe_tp": 4}, True, "pure_tp"),
        ({"tp": 4, "moe_ep": 4}, True, "tep"),
        ({"dp": 4, "moe_ep": 4}, True, "dep"),
        ({"tp": 2, "dp": 2, "moe_ep": 4}, True, None),
    ],
)
def test_strategy_of_a_topology(topology, is_moe, expected):
    assert strategy(Topology(**topology), is_moe) == expected


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"model_revision": "main"}, "immutable model_revision"),
        ({"model_revision": None}, "model_revision for a checkpoint with weights"),
        ({"limits": {"max_model_len": 64, "max_num_tokens": 8, "max_batch_size": 9}}, "at least max_batch_size 9"),
        ({"engine": {}}, "exactly one of kv_cache_memory_bytes and gpu_memory_utilization"),
        ({"topology": {"pp": 2}}, "topology.pp"),
        ({"grid": {"prefill": {"new_tokens": [64, 64]}}}, "strictly increasing"),
        ({"grid": {"decode": {"contexts": [1]}}}, "greater than or equal to 2"),
        ({"precision": {"kv_cache": "half"}}, "precision.kv_cache"),
    ],
)
def test_a_deployment_that_no_launch_has_is_refused(change, line):
    with pytest.raises(Refusal, match=line):
        parse(Deployment, DEPLOYMENT | change, "c.yaml")


def campaign(**change):
    base = {"campaign": "c", "system": "s", "backend_version": "0.33.0", "deployments": {"d": DEPLOYMENT}}
    return parse(Campaign, base | change, "c.yaml")


@pytest.mark.parametrize("label", ["", ".", "..", "a/b", "a b", "a\\b"])
def test_a_label_is_a_path_component(label):
    with pytest.raises(Refusal, match="backend_version"):
        campaign(backend_version=label)


@pytest.mark.parametrize("gres", ["gpu:4", "gpu:h200:4"])
def test_gres_in_its_one_form(gres):
    assert campaign(execution={"gres": gres}).execution.gres == gres


@pytest.mark.parametrize("gres", ["'gpu:h200:4'", "gpu", "gpu:0", "h200:4"])
def test_gres_in_another_form_is_refused(gres):
    with pytest.raises(Refusal, match=r"execution.gres"):
        campaign(execution={"gres": gres})


def test_the_editors_schema_is_that_of_the_model():
    from write_schema import FILE, schema_text

    assert FILE.read_text() == schema_text(), "python workflow/scripts/write_schema.py"
