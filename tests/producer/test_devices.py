"""A job got exactly the devices that it asked for, or no engine is loaded."""

from pathlib import Path

import pytest

from producer.devices import check_devices, granted_by_slurm, named_gpus
from producer.exclusive import devices_of
from schemas.errors import Refusal
from schemas.launch import Topology

FILE = Path("cells/prefill-dense-0/cell.json")
ONE, TWO, FOUR = Topology(), Topology(tp=2, moe_tp=1), Topology(dp=4, moe_ep=4)


@pytest.mark.parametrize(
    ("environment", "names"),
    [
        ({}, None),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, ("0", "1")),
        ({"CUDA_VISIBLE_DEVICES": " 3 , 1"}, ("3", "1")),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8932f937-d72c,MIG-41b7"}, ("GPU-8932f937-d72c", "MIG-41b7")),
        ({"CUDA_VISIBLE_DEVICES": ""}, ()),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, ()),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, ()),
        ({"CUDA_VISIBLE_DEVICES": "2,-1,3"}, ("2",)),  # CUDA reads no further
        ({"SLURM_STEP_GPUS": "2,3", "SLURM_JOB_GPUS": "0,1,2,3"}, ("2", "3")),
        ({"SLURM_JOB_GPUS": "2"}, ("2",)),
        ({"SLURM_JOB_GPUS": "2", "CUDA_VISIBLE_DEVICES": "0"}, ("0",)),  # a cgroup counts from 0
    ],
)
def test_the_gpus_that_somebody_chose_for_this_process(environment, names):
    assert named_gpus(environment) == names


JOB = {"SLURM_JOB_ID": "7"}


@pytest.mark.parametrize(
    ("device", "topology", "environment", "machine"),
    [
        # In a job exactly the deployment's, wherever the number comes from.
        ("cuda", ONE, JOB | {"CUDA_VISIBLE_DEVICES": "0"}, 8),
        ("cuda", FOUR, JOB | {"SLURM_JOB_GPUS": "0,1,2,3"}, 8),
        ("cuda", TWO, JOB, 2),
        # Without a scheduler a machine may have more than one deployment needs.
        ("cuda", TWO, {}, 8),
        ("cuda", TWO, {"CUDA_VISIBLE_DEVICES": "4,5,6"}, 8),
        # An engine on the CPU needs none; the fake ones of a test are counted.
        ("cpu", TWO, JOB, 0),
        ("cpu", TWO, JOB | {"CUDA_VISIBLE_DEVICES": "0,1"}, 0),
        ("cpu", TWO, {"CUDA_VISIBLE_DEVICES": "0,1,2"}, 0),
        ("cpu", TWO, {}, 0),
    ],
)
def test_devices_that_will_do(device, topology, environment, machine):
    check_devices(device, topology, FILE, environment=environment, count=lambda: machine)


@pytest.mark.parametrize(
    ("device", "topology", "environment", "machine", "line"),
    [
        ("cuda", ONE, JOB | {"CUDA_VISIBLE_DEVICES": "0,1"}, 8, "1 GPU for tp 1 x dp 1, found 2 (0,1)"),
        ("cuda", FOUR, JOB | {"SLURM_JOB_GPUS": "0"}, 8, "4 GPUs for tp 1 x dp 4, found 1 (0)"),
        # No gres, on a node whose GPUs everybody sees.
        ("cuda", ONE, JOB, 8, "1 GPU for tp 1 x dp 1, found 8 (0,1,2,3,4,5,6,7)"),
        ("cuda", ONE, JOB, 0, "1 GPU for tp 1 x dp 1, found none"),
        ("cuda", ONE, {"CUDA_VISIBLE_DEVICES": ""}, 8, "at least 1 GPU for tp 1 x dp 1, found none"),
        ("cuda", TWO, {}, 1, "at least 2 GPUs for tp 2 x dp 1, found 1 (0)"),
        ("cpu", ONE, JOB | {"CUDA_VISIBLE_DEVICES": "2,3"}, 0, "1 GPU for tp 1 x dp 1, found 2 (2,3)"),
        ("cpu", TWO, JOB | {"SLURM_STEP_GPUS": "2"}, 0, "2 GPUs for tp 2 x dp 1, found 1 (2)"),
    ],
)
def test_other_devices_are_refused(device, topology, environment, machine, line):
    with pytest.raises(Refusal) as refusal:
        check_devices(device, topology, FILE, environment=environment, count=lambda: machine)
    assert str(refusal.value) == f"devices: expected {line}: {FILE}"


@pytest.mark.parametrize(
    ("environment", "granted"),
    [
        (JOB | {"SLURM_JOB_GPUS": "0"}, True),
        (JOB | {"CUDA_VISIBLE_DEVICES": "0"}, True),  # all that a task of an array keeps
        (JOB, False),
        ({"CUDA_VISIBLE_DEVICES": "0"}, False),
    ],
)
def test_devices_are_locked_where_slurm_does_not_keep_them_apart(environment, granted):
    assert granted_by_slurm(environment) == granted


def test_locks_are_of_the_devices_that_are_used(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert devices_of("cuda", 2) == ["gpu-0", "gpu-1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6,7")
    assert devices_of("cuda", 2) == ["gpu-5", "gpu-6"]
    assert devices_of("cpu", 2) == ["cpu"]


def test_each_of_two_nodes_has_half_of_the_gpus():
    """Tensor parallel 8 on two nodes: four on each."""
    job = {"SLURM_JOB_ID": "7"}
    check_devices("cuda", Topology(tp=8), FILE, nodes=2, environment=job | {"CUDA_VISIBLE_DEVICES": "0,1,2,3"})
    with pytest.raises(
        Refusal, match=r"expected 4 GPUs for tp 8 x dp 1 on each of 2 nodes, found 8 \(0,1,2,3,4,5,6,7\)"
    ):
        check_devices(
            "cuda", Topology(tp=8), FILE, nodes=2, environment=job | {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}
        )
