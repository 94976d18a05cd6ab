import pytest

from schemas.canonical import parse
from schemas.errors import Refusal
from schemas.launch import Topology, strategy
from schemas.request import Campaign, Deployment

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
        ({"precision": {"kv_cache": "fp16"}}, "precision.kv_cache"),
        ({"warmup_iterations": True}, "warmup_iterations: expected a valid integer, found True"),
        ({"warmup_iterations": "0"}, "warmup_iterations: expected a valid integer, found '0'"),
        ({"warmup_iterations": -1}, "greater than or equal to 0"),
        ({"grid": {}, "points": "p.json"}, "a grid or points, not both"),
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


@pytest.mark.parametrize("gres", ["gpu:4", "gpu:h200:4", "gpu:1g.10gb:1"])
def test_gres_in_its_one_form(gres):
    """tests/workflow/test_slurm.py shows what Slurm makes of the two."""
    assert campaign(execution={"gres": gres}).execution.gres == gres


@pytest.mark.parametrize("gres", ["'gpu:h200:4'", '"gpu:4"', "gpu", "gpu:0", "h200:4", "gpu:h200:4 ", "gpu:4\n"])
def test_gres_in_another_form_is_refused_with_the_right_one(gres):
    with pytest.raises(Refusal) as refusal:
        campaign(execution={"gres": gres})
    assert str(refusal.value).startswith(
        "execution.gres: expected gpu:<n> or gpu:<type>:<n> without quotes of its own, like gpu:4 or gpu:h200:4, found"
    )


def test_the_editors_schema_is_that_of_the_model():
    from write_schema import FILE, schema_text

    assert FILE.read_text() == schema_text(), "python workflow/scripts/write_schema.py"


def graph(**settings):
    engine = {"gpu_memory_utilization": 0.9, "graph": settings}
    return DEPLOYMENT | {"engine": engine, "worker_type": "aggregated"}


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"cudagraph_capture_sizes": [2, 1]}, "cudagraph_capture_sizes a strictly increasing list"),
        ({"cudagraph_capture_sizes": [0, 1]}, "greater than or equal to 1"),
        ({"cudagraph_capture_sizes": []}, "cudagraph_capture_sizes a strictly increasing list"),
        ({"cudagraph_capture_sizes": [1], "cudagraph_mode": "NONE"}, "no cudagraph_capture_sizes with cudagraph_mode"),
        ({"cudagraph_capture_sizes": [1, 8], "max_cudagraph_capture_size": 4}, "max_cudagraph_capture_size 8"),
        ({"max_cudagraph_capture_size": 4}, "cudagraph_capture_sizes for max_cudagraph_capture_size"),
        ({"max_prefill_cudagraph_size": 64}, "prefill_cudagraph_policy explicit for max_prefill_cudagraph_size"),
        (
            {"cudagraph_capture_sizes": [1], "prefill_cudagraph_policy": "explicit"},
            "prefill_cudagraph_policy runtime for cudagraph_capture_sizes",
        ),
        ({"cudagraph_mode": "PARTIAL"}, "cudagraph_mode"),
    ],
)
def test_graph_settings_that_contradict_each_other(settings, line):
    with pytest.raises(Refusal, match=line):
        parse(Deployment, graph(**settings), "c.yaml")


def test_capture_sizes_need_a_role():
    deployment = graph(cudagraph_capture_sizes=[1, 2])
    del deployment["worker_type"]
    with pytest.raises(Refusal, match="a worker_type for cudagraph_capture_sizes"):
        parse(Deployment, deployment, "c.yaml")


def test_the_explicit_list_is_cut_at_its_largest_prefill():
    deployment = parse(Deployment, graph(prefill_cudagraph_policy="explicit", max_prefill_cudagraph_size=300), "c.yaml")
    sizes = deployment.engine.graph.capture_sizes
    assert sizes[:5] == (1, 2, 4, 8, 16)
    assert sizes[-4:] == (248, 256, 272, 288)
    assert len(parse(Deployment, graph(prefill_cudagraph_policy="explicit"), "c").engine.graph.capture_sizes) == 99


def test_eager_launches_have_no_graphs():
    engine = {"gpu_memory_utilization": 0.9, "enforce_eager": True, "graph": {"cudagraph_mode": "FULL"}}
    with pytest.raises(Refusal, match="cudagraph_mode NONE with enforce_eager, not FULL"):
        parse(Deployment, DEPLOYMENT | {"engine": engine}, "c.yaml")
