"""Which GPUs this process was given, and whether they are as many as its deployment asked for."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from schemas.errors import Refusal
from schemas.launch import Topology

SLURM_GPUS = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS")
"""Set by Slurm in a job that was given GPUs (sbatch(1), srun(1), output environment variables)."""


def named_gpus(environment: Mapping[str, str]) -> tuple[str, ...] | None:
    """The GPUs that somebody chose for this process, by index or UUID; None when nobody did.

    CUDA_VISIBLE_DEVICES is what the engine obeys, and CUDA reads it up to the first name that is none (`-1`,
    Slurm's `NoDevFiles`). A gres without device files leaves it unset; then Slurm's own variables count.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        visible = next((environment[name] for name in SLURM_GPUS if name in environment), None)
    if visible is None:
        return None
    names: list[str] = []
    for name in visible.split(","):
        if not name.strip().isdigit() and not name.strip().startswith(("GPU-", "MIG-")):
            break
        names.append(name.strip())
    return tuple(names)


def granted_by_slurm(environment: Mapping[str, str]) -> bool:
    """Whether this is a Slurm job with GPUs of its own. A task of an array keeps of Slurm's variables only its job id
    (snakemake_executor_plugin_slurm_jobstep 0.6.1, `keep_slurm`), so those of `SLURM_GPUS` cannot be asked."""
    return "SLURM_JOB_ID" in environment and named_gpus(environment) is not None


def count_gpus() -> int:
    """GPUs of this machine as its driver counts them, 0 without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 0
    return int(pynvml.nvmlDeviceGetCount())


def check_devices(
    device: str,
    topology: Topology,
    file: Path,
    nodes: int = 1,
    environment: Mapping[str, str] = os.environ,
    count: Callable[[], int] = count_gpus,
) -> None:
    """Refuse to start an engine on other GPUs than its deployment asked for, of which each node has an equal part.

    A Slurm job must have exactly the deployment's: one too many is idle and somebody else's, and `gres` was lost or
    overwritten on the way. On a machine without a scheduler there may be more. An engine on the CPU needs none; a job
    that was given GPUs all the same must have been given as many as its `gres` may say.

    Raises:
        Refusal: `devices`, with how many were found and which.
    """
    expected, in_job = topology.gpus // nodes, "SLURM_JOB_ID" in environment
    found = named_gpus(environment)
    if device == "cpu":
        if not in_job or not found:
            return
    elif found is None:
        found = tuple(str(index) for index in range(count()))
    if len(found) == expected or (len(found) > expected and not in_job):
        return
    gpus = f"{'' if in_job else 'at least '}{expected} GPU{'s' if expected > 1 else ''}"
    where = f" on each of {nodes} nodes" if nodes > 1 else ""
    what = f"{gpus} for tp {topology.tp} x dp {topology.dp}{where}"
    raise Refusal("devices", what, f"{len(found)} ({','.join(found)})" if found else "none", file)
