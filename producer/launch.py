"""Run a producer command where its deployment's `execution` block says: here, or in a container.

Argument vectors all the way: nothing a campaign says passes through a shell, and the value of a passed environment
variable stands in no argument and no file.
"""

import argparse
import os
import sys
from pathlib import Path

from producer.nodes import launch_words
from producer.resolving import read_campaign
from producer.source_digest import producer_digest
from schemas.errors import Refusal, run
from schemas.plan import deployment_of
from schemas.request import Container, Execution

JOB_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "NVIDIA_VISIBLE_DEVICES",
    "SLURM_JOB_ID",
    "SLURM_JOB_GPUS",
    "SLURM_STEP_GPUS",
    "SLURM_NODEID",
    "SLURM_STEP_NODELIST",
    "SLURM_STEP_NUM_NODES",
    "SLURM_STEP_NUM_TASKS",
)
"""What a job knows of its devices and its place. A container with a clean environment gets these too."""

SEPARATORS = ",:"
"""What container runtimes read as the end of a mount's path."""


def inner_command(container: Container, digest: str, command: list[str]) -> list[str]:
    """What the image's own python runs inside: the checks of the container, then the command."""
    mounts = [argument for mount in container.mounts for argument in ("--mount", mount.split(":", 1)[1])]
    return ["python", "-m", "producer.inside", "--producer", digest, *mounts, "--", *command]


def apptainer(container: Container, execution: Execution, project: str, inner: list[str]) -> list[str]:
    """`apptainer exec` (its manual page): a clean environment, the project's folder, the mounts, GPUs if asked for."""
    gpus = ["--nv"] if execution.gres is not None else []
    binds = [argument for mount in (f"{project}:{project}", *container.mounts) for argument in ("--bind", mount)]
    return ["apptainer", "exec", "--cleanenv", *gpus, *binds, "--pwd", project, container.image, *inner]


def pyxis(container: Container, execution: Execution, project: str, inner: list[str]) -> list[str]:
    """`srun` with Pyxis (its wiki, Usage): a task a node in the container, on all that the job has."""
    mounts = ",".join((f"{project}:{project}", *container.mounts))
    passed = ",".join((*JOB_VARIABLES, *execution.environment))
    return [
        *(launch_words(execution) or ["srun", "--overlap", "--ntasks=1"]),
        f"--container-image={container.image}",
        f"--container-mounts={mounts}",
        f"--container-workdir={project}",
        f"--container-env={passed}",
        "--no-container-mount-home",
        *inner,
    ]


def command_of(
    execution: Execution, project: str, digest: str, command: list[str], again: list[str] | None = None
) -> list[str]:
    """The argument vector of a producer command (`producer.<module>`, its arguments) under an execution block.

    `again` is this launch itself, to be run on each node of several: what Slurm tells a task of its place is known
    there alone. Absent on such a node.
    """
    container = execution.container
    if container is not None and container.runtime == "pyxis":
        return pyxis(container, execution, project, inner_command(container, digest, command))
    if again is not None and execution.nodes > 1:
        return [*launch_words(execution), *again]
    if container is not None:
        return apptainer(container, execution, project, inner_command(container, digest, command))
    return [sys.executable, "-m", *command]


def environment_of(execution: Execution, environment: dict[str, str], file: Path) -> dict[str, str]:
    """The environment of the process that is started: Apptainer takes what it passes on from variables of its own.

    Raises:
        Refusal: a variable that the campaign passes is not set here.
    """
    for name in execution.environment:
        if name not in environment:
            raise Refusal(f"execution.environment.{name}", "a variable of this job", "none", file)
    if execution.container is None or execution.container.runtime != "apptainer":
        return environment
    passed = (*execution.environment, *(name for name in JOB_VARIABLES if name in environment))
    return environment | {f"APPTAINERENV_{name}": environment[name] for name in passed}


def execution_of(file: Path, deployment: str) -> Execution:
    campaign = read_campaign(file)
    if deployment not in campaign.deployments:
        raise Refusal("deployment", f"one of {', '.join(campaign.deployments)}", deployment, file)
    return campaign.execution_of(deployment)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--campaign", type=Path, required=True, help="campaign file")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--deployment")
    which.add_argument("--cell", help="name of one of the deployment's cells")
    parser.add_argument("--on-node", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("command", nargs="+", help="-- producer.<module> and its arguments")
    arguments = parser.parse_args()
    execution = execution_of(arguments.campaign, arguments.deployment or deployment_of(arguments.cell))
    project = str(Path.cwd())
    if execution.container is not None and any(separator in project for separator in SEPARATORS):
        raise Refusal("project folder", f"a path without {' and '.join(SEPARATORS)}", project, arguments.campaign)
    again = None if arguments.on_node else [sys.executable, "-m", "producer.launch", "--on-node", *sys.argv[1:]]
    command = command_of(execution, project, producer_digest(), arguments.command, again)
    environment = environment_of(execution, dict(os.environ), arguments.campaign)
    try:
        os.execvpe(command[0], command, environment)  # noqa: S606 (no shell is the point)
    except OSError as error:
        found = f"{command[0]}: {error.strerror}"
        raise Refusal("container runtime", "one that this machine has", found, arguments.campaign) from None


if __name__ == "__main__":
    run(main)
