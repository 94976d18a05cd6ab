"""A campaign on the tests' own Slurm: whatever happens to a job or its driver, nothing is measured twice or lost.

One cell suffers one blow after another, and each run goes on where the last was struck (`story`). The tests say what
each blow left behind. A driver that saw a job fail takes up to a minute to end (the plugin's next question is the later
the longer nothing ended well), so each has a folder of its own, with the same results, and the next begins meanwhile.
"""

import json
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import yaml
from cluster import SlurmCluster, wait_for
from conftest import ROOT, Workspace, copy_project
from goldens import PROBES, write_records

from producer.attempts import read_attempts
from producer.journal import read_journal
from schemas.canonical import read_model, short
from schemas.native import CellReceipt, read_struct
from schemas.plan import FrozenCell

pytestmark = pytest.mark.engine

GRID = {
    "prefill": {"new_tokens": [512, 1024], "batch_sizes": [1, 2], "prefix_blocks": [0, 1, 2, 4]},
    "decode": {"contexts": [64, 256], "batch_sizes": [1, 2]},
}
POINTS = {"prefill": 16, "decode": 4}
EXECUTION = {"partition": "gpu", "gres": "gpu:h200:1", "mem_mb": 4000, "runtime": "30m"}
FILES = ("progress.json", "claim.json", "attempts.jsonl", "repetitions.jsonl")
PATIENCE = 600.0
"""Seconds for what takes some twenty on a quiet machine: engines of others may come first."""


@pytest.mark.demo
def test_every_engine_of_the_demo_was_a_slurm_job(slurm: SlurmCluster, demo: Path):
    """In Slurm's own book. A demo that an earlier session measured is in another book."""
    files = sorted(demo.glob("cells/*/attempts.jsonl")) + sorted(demo.glob("probe/*/*.attempts.jsonl"))
    assert len(files) == 12  # three deployments, two phases, a probe and a cell each
    attempts = [attempt for file in files for attempt in read_attempts(file)]
    if min(attempt["started_at"] for attempt in attempts) < slurm.began:
        pytest.skip("the demo was measured before this session")
    assert [attempt["code"] for attempt in attempts] == [0] * 12
    book = slurm.ended()
    jobs = [book[attempt["slurm_job_id"]] for attempt in attempts]
    assert len({job["JobId"] for job in jobs}) == 12
    assert {(job["JobState"], job["Partition"], job["WorkDir"]) for job in jobs} == {("COMPLETED", "gpu", str(ROOT))}
    for file, job in zip(files[:6], jobs[:6], strict=True):
        assert (ROOT / f"results/slurm-logs/rule_collect_cell/_{file.parent.name}/{job['JobId']}.log").exists()


class Driver:
    """A running `snakemake --profile slurm`; `first` is the seconds before its first question to Slurm."""

    def __init__(self, root: Path, *arguments: str, first: int = 10) -> None:
        self.root, self._log = root, root / f"driver-{time.monotonic_ns()}.log"
        command = ["snakemake", "--profile", "slurm", "--slurm-init-seconds-before-status-checks", str(first)]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen([*command, *arguments], cwd=root, stdout=log, stderr=subprocess.STDOUT)

    @property
    def output(self) -> str:
        return self._log.read_text()

    @property
    def jobs(self) -> list[str]:
        """Slurm's ids of the jobs that this driver submitted, those of an array by their tasks."""
        single = re.findall(r"has been submitted with SLURM jobid (\d+) ", self.output)
        arrays = re.findall(r"SLURM job ID (\d+)\. The individual task IDs are (\d+)-(\d+)\.", self.output)
        return single + [f"{job}_{task}" for job, low, high in arrays for task in range(int(low), int(high) + 1)]

    @property
    def failures(self) -> list[str]:
        """What it says of each job that failed."""
        return re.findall(r"^    message: (SLURM-job .*? SLURM status is: '\w+'\.)", self.output, re.M)

    def wait(self) -> int:
        return self.process.wait(timeout=PATIENCE)


class Cell(NamedTuple):
    """The files of a cell as they were at one moment."""

    progress: dict[str, Any]
    claim: dict[str, Any] | None
    attempts: list[dict[str, Any]]
    journal: bytes

    @property
    def points(self) -> int:
        return sum(line.startswith(b'{"kind":"point"') for line in self.journal.split(b"\n")[:-1])

    @property
    def sessions(self) -> int:
        """Engines that came up."""
        return self.journal.count(b'{"kind":"session"')


class Campaign(Workspace):
    """One model, two cells, planned and not measured."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._clones = 0

    def folder(self, phase: str) -> Path:
        (plan,) = (self.root / "results/tiny").glob("plan-*/plan.json")
        (name,) = [cell["name"] for cell in json.loads(plan.read_text())["cells"] if cell["phase"] == phase]
        return self.root / "results/tiny/cells" / name

    def look(self, phase: str = "prefill") -> Cell:
        progress, claim, attempts, journal = (self.folder(phase) / name for name in FILES)
        return Cell(
            json.loads(progress.read_text()) if progress.exists() else {},
            json.loads(claim.read_text()) if claim.exists() else None,
            read_attempts(attempts),
            journal.read_bytes() if journal.exists() else b"",
        )

    def target(self, phase: str, file: str = "evidence.json") -> str:
        return str((self.folder(phase) / file).relative_to(self.root))

    def driver(self, *arguments: str, first: int = 10) -> Driver:
        """A driver in a folder of its own, which shares the results."""
        self._clones += 1
        root = self.root.with_name(f"{self.root.name}-{self._clones}")
        root.mkdir()
        copy_project(root)
        (root / "results").symlink_to(self.root / "results")
        for name in ("config/config.yaml", "config/campaigns/tiny.yaml"):
            (root / name).write_bytes((self.root / name).read_bytes())
        return Driver(root, *arguments, first=first)

    def status(self, phase: str = "prefill") -> dict[str, Any]:
        """What `status` says of a cell."""
        done = self.script("status", "--campaign", "config/campaigns/tiny.yaml", "--json")
        assert done.returncode == 0, done.stderr
        (cell,) = [cell for cell in json.loads(done.stdout)["cells"] if cell["phase"] == phase]
        return cell

    def job(self) -> psutil.Process:
        """The process that measures the prefill cell."""
        claim = self.look().claim
        assert claim is not None
        return psutil.Process(claim["pid"])

    def engine(self) -> psutil.Process:
        """Its engine."""
        (rank,) = [process for process in self.job().children() if "producer.measure_rank" in process.cmdline()]
        return rank


def tiny_campaign(root: Path) -> Campaign:
    """The demo's dense model, with the engine that the committed probe records are of, so that no probe runs."""
    root.mkdir()
    copy_project(root)
    campaign = yaml.safe_load((ROOT / "config/campaigns/cpu-demo.yaml").read_text())
    deployments = {"dense": campaign["deployments"]["dense"] | {"grid": GRID}}
    campaign |= {"campaign": "tiny", "deployments": deployments, "execution": EXECUTION}
    (root / "config/campaigns/tiny.yaml").write_text(yaml.safe_dump(campaign, sort_keys=False))
    (root / "config/config.yaml").write_text("campaign: tiny\n")
    record = json.loads((PROBES / "dense.json").read_text())
    folder = root / "results/tiny/probe" / f"dense-{short(record['probe_digest'])}"
    write_records("dense", [folder / f"{phase}.json" for phase in POINTS])
    tiny = Campaign(root)
    done = tiny.snakemake("plan")
    assert done.returncode == 0, done.stdout + done.stderr
    return tiny


class Blow(NamedTuple):
    """A run that was struck: its driver and job, and the cell before the run, at the blow, and after the job; what
    `status` said at the blow and after the job."""

    driver: Driver
    job: str
    before: Cell
    struck: Cell
    after: Cell
    told_then: dict[str, Any]
    told: dict[str, Any]


class Story:
    """The blows, by name, in their order; then the run that nothing happens to."""

    def __init__(self, cluster: SlurmCluster, tiny: Campaign) -> None:
        self.cluster, self.tiny = cluster, tiny
        self.blows: dict[str, Blow] = {}
        self.locked: subprocess.CompletedProcess[str]
        self.restarted: Driver
        self.held: Cell
        self.told_held: dict[str, Any]
        self.last: Driver

    def blow(
        self, name: str, strike: Callable[[Driver], object], *arguments: str, points: int = 1, waits: bool = True
    ) -> Blow:
        """Run the prefill cell and strike when it has `points` more; `waits` for Slurm to be done with the job."""
        before = self.tiny.look()
        driver = self.tiny.driver(*arguments)

        def due() -> bool:
            assert driver.process.poll() is None, driver.output
            return len(driver.jobs) > 0 and self.tiny.look().points >= before.points + points

        wait_for(due, PATIENCE, name)
        struck, told_then = self.tiny.look(), self.tiny.status()
        strike(driver)
        claim = struck.claim or {}
        job = claim.get("slurm_job_id", driver.jobs[0])
        if waits:
            wait_for(lambda: self.is_over(job), PATIENCE, f"{name}: end of job {job}")
            # Slurm forgets a job before its processes have ended, and one that is killed at once claims after the blow.
            pids = {held["pid"] for held in (struck.claim, self.tiny.look().claim) if held is not None}
            wait_for(lambda: not any(map(psutil.pid_exists, pids)), PATIENCE, f"{name}: end of the process")
        self.blows[name] = Blow(driver, job, before, struck, self.tiny.look(), told_then, self.tiny.status())
        return self.blows[name]

    def is_over(self, job: str) -> bool:
        states = "--states=PENDING,RUNNING,COMPLETING"
        return self.cluster.command("squeue", "--noheader", states, f"--jobs={job}") == ""

    def state(self, job: str) -> str:
        """What Slurm says became of a job."""
        return self.cluster.command("squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={job}").strip()

    def of_job(self, job: str, field: str) -> str:
        """A field of `scontrol show job`."""
        return re.search(rf"\b{field}=(\S+)", self.cluster.command("scontrol", "show", "job", job))[1]


@pytest.fixture(scope="module")
def refused(slurm: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Campaign, Driver]]:
    """Drivers whose jobs are refused: of devices, by a cell and by a probe, and of capacity, with retries."""
    tiny = tiny_campaign(tmp_path_factory.mktemp("refused") / "tiny")
    # A profile of a machine with more memory: only the engine can find out.
    (profile,) = (tiny.root / "results/tiny/profile").glob("dense-*.json")
    facts = json.loads(profile.read_text())
    more = {"free_blocks": 2000, "kv_cache_bytes": facts["kv_cache_bytes"] // facts["free_blocks"] * 2000}
    profile.write_text(json.dumps(facts | more))
    shutil.rmtree(next((tiny.root / "results/tiny").glob("plan-*")))
    assert tiny.snakemake("plan").returncode == 0
    fresh = tiny_campaign(tmp_path_factory.mktemp("fresh") / "tiny")
    (probe,) = (fresh.root / "results/tiny/probe").glob("*/decode.json")
    probe.unlink()

    def gres(rule: str, value: str) -> tuple[str, ...]:
        return ("--set-resources", f"{rule}:gres={value}", "--")

    return {
        "cell": (tiny, tiny.driver(*gres("collect_cell", "gpu:2"), tiny.target("prefill"))),
        "probe": (fresh, fresh.driver(*gres("probe", "gpu:h200:4"), str(probe.relative_to(fresh.root)))),
        "capacity": (tiny, tiny.driver("--retries", "2", *gres("collect_cell", "gpu:1"), tiny.target("decode"))),
    }


@pytest.fixture(scope="module")
def story(slurm: SlurmCluster, refused: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Story:
    """Every blow that a cluster has for a cell. Some four minutes."""
    tiny = tiny_campaign(tmp_path_factory.mktemp("story") / "tiny")
    story = Story(slurm, tiny)
    prefill, node = tiny.target("prefill"), f"NodeName={slurm.host}"

    def time_limit(driver: Driver) -> None:
        assert story.of_job(driver.jobs[0], "TimeLimit") == "02:00:00"
        tiny.engine().suspend()  # or the cell would be measured before Slurm looks, twice a minute
        slurm.command("scontrol", "update", f"JobId={driver.jobs[0]}", "EndTime=now+1")

    def node_failure(driver: Driver) -> None:
        slurm.command("scontrol", "update", node, "State=DOWN", "Reason=test")
        wait_for(lambda: story.is_over(driver.jobs[0]), PATIENCE, "node failure")
        slurm.command("scontrol", "update", node, "State=RESUME")

    def kill_driver(driver: Driver) -> None:
        tiny.engine().suspend()  # so that the orphan still runs when the next job comes
        driver.process.kill()
        driver.process.wait()

    story.blow(
        "cancelled",
        lambda driver: slurm.command("scancel", tiny.look().claim["slurm_job_id"]),
        *("--slurm-array-jobs", "collect_cell", "--latency-wait", "5", "--", prefill, tiny.target("decode")),
    )
    story.blow("time limit", time_limit, "--set-resources", "collect_cell:runtime=120", "--", prefill)
    # The node takes every job with it: the other cell's, and those that are refused, are over by then.
    others = [story.blows["cancelled"].driver, *(driver for _, driver in refused.values())]
    wait_for(lambda: all(story.is_over(job) for driver in others for job in driver.jobs), PATIENCE, "other jobs")
    story.blow("node failure", node_failure, "--", prefill)
    story.blow("memory", lambda driver: None, "--set-resources", "collect_cell:mem_mb=700", "--", prefill, points=0)
    story.blow("interrupted", lambda driver: driver.process.send_signal(signal.SIGINT), "--", prefill)
    story.blow("failed", lambda driver: tiny.engine().kill(), "--", prefill)

    orphan = story.blow("killed", kill_driver, "--", prefill, waits=False)
    again = Workspace(orphan.driver.root)
    story.locked = again.snakemake("--profile", "slurm", "--", prefill)
    unlocked = again.snakemake("--unlock")
    assert unlocked.returncode == 0, unlocked.stderr
    story.restarted = Driver(again.root, "--", prefill, first=5)
    wait_for(lambda: len(story.restarted.jobs) == 1, PATIENCE, "restart")
    wait_for(lambda: story.is_over(story.restarted.jobs[0]), PATIENCE, "the restarted job")
    story.held, story.told_held = tiny.look(), tiny.status()
    tiny.engine().resume()
    wait_for(lambda: story.is_over(orphan.job), PATIENCE, "the orphan")
    story.restarted.wait()
    story.last = Driver(again.root, first=2)
    story.last.wait()
    return story


def check_state(cell: Cell, state: str, reason: str | None = None) -> None:
    """What a person is told of the prefill cell."""
    assert cell.progress["state"] == state
    assert cell.progress.get("reason") == reason
    assert cell.progress["points"] == 16


FAILED = "SLURM-job '{job}' failed, SLURM status is: '{state}'."
NODE_FAILED = "SLURM-job '{job}' failed due to a node failure, SLURM status is: '{state}'."


@pytest.mark.parametrize(
    ("name", "state", "message", "told", "reason", "code"),
    [
        ("cancelled", "CANCELLED", FAILED, "stopped", "stopped by SIGTERM", 143),
        ("time limit", "TIMEOUT", FAILED, "stopped", "stopped by SIGTERM", 143),
        ("node failure", "NODE_FAIL", NODE_FAILED, "stopped", "stopped by SIGTERM", 143),
        ("interrupted", "CANCELLED", None, "stopped", "stopped by SIGTERM", 143),
        ("failed", "FAILED", FAILED, "failed", "rank 0 was ended by SIGKILL", 1),
        # Killed at once: it left its claim, which is nobody's, and no word. Slurm's log has it.
        ("memory", "FAILED", FAILED, "starting", None, None),
    ],
)
def test_a_blow_is_told_and_costs_no_point(
    story: Story, name: str, state: str, message: str | None, told: str, reason: str | None, code: int | None
):
    blow = story.blows[name]
    assert story.state(blow.job) == state
    assert blow.driver.wait() == 1
    failures = [failure for failure in blow.driver.failures if f"'{blow.job}'" in failure]
    assert failures == ([message.format(job=blow.job, state=state)] if message else [])
    assert ("Terminating processes on user request" in blow.driver.output) == (name == "interrupted")
    check_state(blow.after, told, reason)
    assert (blow.after.claim is None) == (code is not None)
    attempt = blow.after.attempts[-1]
    assert (attempt["slurm_job_id"], attempt.get("code")) == (blow.job, code)
    kept = f"{blow.after.points} of 16 points are measured and kept"
    if code == 143:
        assert attempt["reason"] == f"stopped by SIGTERM: {kept}"
        assert blow.after.progress["points_done"] == blow.after.points
    # Whole lines that were there are there, byte for byte.
    for earlier in (blow.before, blow.struck):
        whole = earlier.journal[: earlier.journal.rfind(b"\n") + 1]
        assert blow.after.journal.startswith(whole)
    # `status` says the same, and that the next run goes on.
    assert blow.told["state"] == ("interrupted" if name == "memory" else told)
    assert (blow.told["collect"], blow.told["points_done"]) == (True, blow.after.points)
    assert blow.told["why"] == reason or name == "memory"
    if name != "memory":
        # A rank writes its points itself; that it measures, its supervisor writes within a second.
        assert blow.told_then["state"] in ("running", "claimed")
        assert blow.told_then["job_id"] == blow.job
        assert blow.told_then["points_done"] >= blow.struck.points
    gained = blow.after.points - blow.before.points
    assert gained == 0 if name == "memory" else gained >= 1
    assert blow.after.sessions - blow.before.sessions == (0 if name == "memory" else 1)


def test_a_job_above_its_memory_is_named_in_slurms_log_alone(story: Story):
    blow = story.blows["memory"]
    (log,) = (story.tiny.root / "results/slurm-logs").glob(f"rule_collect_cell/*/{blow.job}.log")
    assert re.search(r"exceeded memory limit \(\d+ > 734003200\), being killed", log.read_text())  # 700 MB
    assert story.of_job(blow.job, "MinMemoryNode") == "700M"


def test_an_array_fails_more_than_it_should_and_still_measures_once(story: Story):
    """The plugin judges every task of an array by the files of the first one, and removes those when a task fails
    (snakemake-executor-plugin-slurm#447): a cell that was measured is collected again, without an engine."""
    blow = story.blows["cancelled"]
    array, task = blow.job.split("_")
    assert blow.driver.jobs == [f"{array}_1", f"{array}_2"]
    other = f"{array}_{3 - int(task)}"
    assert story.state(other) == {"1": "COMPLETED", "2": "FAILED"}[other[-1]]
    decode = story.tiny.look("decode")
    assert (decode.points, decode.sessions) == (4, 1)
    assert [attempt["slurm_job_id"] for attempt in decode.attempts] == [other, *story.last.jobs]
    assert [attempt["code"] for attempt in decode.attempts] == [0, 0]


def test_an_interrupted_driver_leaves_nothing_in_the_queue(story: Story):
    blow = story.blows["interrupted"]
    assert story.state(blow.job) == "CANCELLED"
    assert blow.driver.jobs == [blow.job]


def test_a_killed_driver_leaves_its_job_and_a_second_one_is_told_whose_it_is(story: Story):
    orphan = story.blows["killed"]
    assert orphan.driver.process.returncode == -signal.SIGKILL
    assert story.locked.returncode == 1
    assert "Error: Directory cannot be locked." in story.locked.stdout + story.locked.stderr
    # The second job found the first at work, measured nothing, and left no trace in the cell.
    (second,) = story.restarted.jobs
    assert story.state(second) == "FAILED"
    assert story.restarted.failures == [FAILED.format(job=second, state="FAILED")]
    held = [line for line in story.restarted.output.splitlines() if line.startswith("held: ")]
    assert len(held) == 1
    assert f'"slurm_job_id":"{orphan.job}"' in held[0]
    assert story.held.claim == orphan.after.claim
    assert story.held.journal == orphan.after.journal
    assert story.held.attempts == orphan.after.attempts
    check_state(story.held, "measuring")
    assert (story.told_held["state"], story.told_held["job_id"]) == ("running", orphan.job)
    # The first one finished the cell.
    assert story.state(orphan.job) == "COMPLETED"


def test_the_next_run_completes_and_every_point_was_measured_once(story: Story):
    assert story.last.wait() == 0, story.last.output
    assert "published 20 rows" in story.last.output  # 16 prefill and 4 decode
    folder = story.tiny.folder("prefill")
    cell = read_model(FrozenCell, folder / "cell.json", "cell")
    journal = read_journal(folder / "repetitions.jsonl", cell.digest)
    assert sorted(line.benchmark_id for line in journal.points) == list(range(1, 17))
    # One engine start each but for the job without memory, the one that found the cell held, and the last run.
    assert len(journal.sessions) == 6
    receipt = read_struct(CellReceipt, folder / "receipt.json", "receipt")
    gained = [blow.after.points - blow.before.points for name, blow in story.blows.items() if name != "memory"]
    assert [session.points for session in receipt.sessions][:5] == gained[:5]
    assert sum(session.points for session in receipt.sessions) == 16
    final = story.tiny.look()
    jobs = [attempt["slurm_job_id"] for attempt in final.attempts]
    assert jobs[:7] == [blow.job for blow in story.blows.values()]
    assert [attempt.get("code") for attempt in final.attempts][:7] == [143, 143, 143, None, 143, 1, 0]
    check_state(final, "finished")
    assert [story.tiny.status(phase)["state"] for phase in POINTS] == ["judged", "judged"]
    assert final.claim is None
    drivers = [*(blow.driver for blow in story.blows.values()), story.restarted, story.last]
    assert all(story.is_over(job) for driver in drivers for job in driver.jobs)


def test_a_job_sees_the_devices_it_asked_for(story: Story):
    blow = story.blows["failed"]
    assert story.of_job(blow.job, "TresPerNode") == "gres:gpu:h200:1"


@pytest.mark.parametrize(
    ("which", "gres", "devices"), [("cell", "gpu:2", "2 (0,1)"), ("probe", "gpu:h200:4", "4 (0,1,2,3)")]
)
def test_a_job_with_other_devices_is_refused_before_an_engine_is_loaded(
    story: Story, refused: dict[str, tuple[Campaign, Driver]], which: str, gres: str, devices: str
):
    campaign, driver = refused[which]
    assert driver.wait() == 1
    (job,) = driver.jobs
    assert story.of_job(job, "TresPerNode") == f"gres:{gres}"
    lines = [line for line in driver.output.splitlines() if line.startswith("refused: ")]
    file = campaign.target("prefill", "cell.json") if which == "cell" else "config/campaigns/tiny.yaml"
    assert lines == [f"refused: devices: expected 1 GPU for tp 1 x dp 1, found {devices}: {file}"]
    assert "Initializing a V1 LLM engine" not in driver.output
    if which == "cell":
        refusal = lines[0].removeprefix("refused: ")
        check_state(campaign.look(), "failed", refusal)
        assert [(attempt["code"], attempt["reason"]) for attempt in campaign.look().attempts] == [(2, refusal)]


def test_retries_submit_a_refused_cell_three_times_and_start_one_engine(
    story: Story, refused: dict[str, tuple[Campaign, Driver]]
):
    campaign, driver = refused["capacity"]
    assert driver.wait() == 1
    assert len(driver.jobs) == 3  # --retries 2, by the driver; the job itself is told --retries 0
    assert [story.of_job(job, "TresPerNode") for job in driver.jobs] == ["gres:gpu:1"] * 3
    assert driver.output.count("Trying to restart job") == 2
    name = campaign.folder("decode").name
    refusal = f"engine free blocks: expected at least 2000 of the accepted profile, found 1023: {name}"
    file = campaign.target("decode", "attempts.jsonl")
    assert [line for line in driver.output.splitlines() if line.startswith("refused: ")] == [
        f"refused: {refusal}",
        f"refused: attempt 2: expected no refusal before it, found {refusal}: {file}",
        f"refused: attempt 3: expected no refusal before it, found {refusal}: {file}",
    ]
    # show-failed-logs prints the log of every attempt.
    assert driver.output.count("Initializing a V1 LLM engine") == 1
    attempts = campaign.look("decode").attempts
    assert [(attempt["attempt"], attempt["code"], attempt["reason"]) for attempt in attempts] == [
        (number, 2, refusal) for number in (1, 2, 3)
    ]
    assert [attempt["slurm_job_id"] for attempt in attempts] == driver.jobs
    assert campaign.look("decode").points == 0
