"""A single-node Slurm of the tests' own: munged, slurmctld and slurmd, with four fake GPUs and no slurmdbd.

Its daemons are children of the process that starts it and end with it, also when that is killed. What a killed one
left behind all the same (jobs, links, files) goes when the next one starts.
"""

import contextlib
import os
import shutil
import socket
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from string import Template

import psutil
from filelock import FileLock, Timeout

from producer.exclusive import utc_now
from producer.supervise import free_port

TEMPLATES = Path(__file__).parent / "slurm"
ROOT = Path("/tmp/passgrid-slurm")
"""Everything lies below it. Always the same: the next cluster finds what a killed one left. Short: it holds sockets."""

SYSTEM_FOLDER = Path("/etc/slurm")
"""The executor plugin starts a job's step without SLURM_CONF (snakemake_executor_plugin_slurm_jobstep 0.6.1,
__init__.py, `keep_slurm`), so the configuration must be where Slurm looks by itself."""

COMMANDS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "scancel", "srun", "setpriv")


START_SECONDS = 30.0
END_SECONDS = 20.0
DEVICES = 4


class Unavailable(Exception):
    """No cluster can run here, and why."""


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds:.0f} s"
        time.sleep(0.05)


def is_link(link: Path, target: Path) -> bool:
    return link.is_symlink() and link.readlink() == target


def processes_of(root: Path) -> list[psutil.Process]:
    """Processes of a cluster below `root`: they name it on their command line, listen at a socket below it, or are of
    its jobs. A job's processes may outlive it: without cgroups, Slurm loses one whose parent has ended."""
    listening = {socket.pid for socket in psutil.net_connections("unix") if str(socket.laddr).startswith(f"{root}/")}
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            named = any(f"{root}/" in word for word in process.cmdline())
            if named or process.pid in listening or process.environ().get("SLURM_CONF") == str(root / "slurm.conf"):
                found.append(process)
    return found


def end_processes(root: Path) -> None:
    """Kill the processes of a cluster, with everything below them."""
    processes = processes_of(root)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes += [child for child in process.children(recursive=True) if child not in processes]
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=END_SECONDS)


class SlurmCluster:
    """Start with `start`, end with `stop`. One at a time on a machine."""

    def __init__(self, root: Path = ROOT, system_folder: Path = SYSTEM_FOLDER) -> None:
        self.root, self._system_folder = root, system_folder
        self._lock = FileLock(f"{root}.lock", mode=0o666)
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.host = socket.gethostname().split(".")[0]
        self.began = ""
        """UTC, as the producer writes times."""

    @property
    def links(self) -> dict[Path, Path]:
        """Where Slurm looks for its configuration -> the file of this cluster."""
        return {self._system_folder / file.name: self.root / file.name for file in sorted(TEMPLATES.iterdir())}

    def check(self) -> None:
        """Raise Unavailable where no cluster can run."""
        missing = [command for command in COMMANDS if shutil.which(command) is None]
        if missing:
            raise Unavailable(f"not installed: {' '.join(missing)} (slurmctld slurmd slurm-client munge)")
        if os.geteuid() != 0:
            raise Unavailable("slurmd and its device files need root")
        for link, target in self.links.items():
            if (link.is_symlink() or link.exists()) and not is_link(link, target):
                raise Unavailable(f"{link} is another cluster's")

    def start(self) -> None:
        """Until the node is idle.

        Raises:
            Unavailable: Slurm is not installed, not ours here, or another test session runs one.
        """
        self.check()
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise Unavailable(f"another test session runs one below {self.root}") from None
        try:
            self._clean()
            self.began = utc_now()
            self._configure()
            self._start_daemons()
        except BaseException:
            self.stop()
            raise

    def _clean(self) -> None:
        """Whoever ran a cluster here is dead: this process has its lock."""
        end_processes(self.root)
        for link, target in self.links.items():
            if is_link(link, target):
                link.unlink()
        shutil.rmtree(self.root, ignore_errors=True)

    def _configure(self) -> None:
        for name in ("munge", "state", "spool", "log", "dev"):
            (self.root / name).mkdir(parents=True, mode=0o755)
        key = self.root / "munge" / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        for number in range(DEVICES):
            os.mknod(self.root / "dev" / f"gpu{number}", stat.S_IFCHR | 0o666, Path("/dev/null").stat().st_rdev)
        facts = {"root": self.root, "host": self.host, "slurmctld_port": free_port(), "slurmd_port": free_port()}
        self._system_folder.mkdir(exist_ok=True)
        for link, file in self.links.items():
            file.write_text(Template((TEMPLATES / file.name).read_text()).substitute(facts))
            link.symlink_to(file)

    def _start_daemons(self) -> None:
        munge, configuration = self.root / "munge", str(self.root / "slurm.conf")
        files = [f"--{name}-file={munge / name}" for name in ("key", "pid", "log", "seed")]
        self._daemon("munged", "--foreground", "--force", f"--socket={munge / 'socket'}", *files)
        self._wait((munge / "socket").is_socket, "munged")
        self._daemon("slurmctld", "-D", "-c", "-f", configuration)
        self._daemon("slurmd", "-D", "-c", "-f", configuration, "-N", self.host)
        self._wait(lambda: self.node_state() == "idle", "the node")

    def _daemon(self, *command: str) -> None:
        log = (self.root / "log" / f"{command[0]}.log").open("wb")
        # With the process that started it, a daemon ends too.
        command = ("setpriv", "--pdeathsig", "KILL", *command)
        self._daemons.append(subprocess.Popen(command, stdout=log, stderr=log))

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        def over() -> bool:
            return condition() or any(daemon.poll() is not None for daemon in self._daemons)

        try:
            wait_for(over, START_SECONDS, what)
            assert condition(), f"{what}: a daemon ended"
        except AssertionError as error:
            logs = [f"{log}:\n{log.read_text()[-2000:]}" for log in sorted((self.root / "log").iterdir())]
            raise AssertionError("\n".join([str(error), *logs])) from None

    def stop(self) -> None:
        """End its jobs and daemons; nothing of it is left on the machine. One that is not ours is left alone."""
        if not self._lock.is_locked:
            return
        if self._daemons and self._daemons[-1].poll() is None:
            subprocess.run(["scancel", "--user=root"], env=self.environment, check=False, timeout=60)
            with contextlib.suppress(AssertionError):  # a step that does not go is killed below
                wait_for(lambda: not self.steps(), END_SECONDS, "steps")
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(END_SECONDS)
        self._daemons.clear()
        self._clean()
        self._lock.release()

    def steps(self) -> list[Path]:
        """Sockets of the job steps that run."""
        return list((self.root / "spool").glob(f"{self.host}_*.*"))

    @property
    def environment(self) -> dict[str, str]:
        """In which Slurm's commands mean this cluster, wherever its configuration is linked."""
        return {**os.environ, "SLURM_CONF": str(self.root / "slurm.conf")}

    def command(self, *command: str) -> str:
        """What a Slurm command prints."""
        done = self._run(command)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout

    def _run(self, command: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60, check=False)

    def ended(self) -> dict[str, dict[str, str]]:
        """Job id -> what Slurm's completion file says of the job: `JobState`, `Name`, `WorkDir`, `TimeLimit`, ..."""
        file = self.root / "jobcomp.txt"
        lines = file.read_text().splitlines() if file.exists() else []
        jobs = [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in lines]
        return {job["JobId"]: job for job in jobs}

    def node_state(self) -> str:
        """`idle`, `down`, ...; empty while no controller answers."""
        return self._run(("sinfo", "--noheader", "--partition=gpu", "--format=%T")).stdout.strip()
