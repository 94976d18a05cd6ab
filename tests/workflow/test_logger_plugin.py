"""`--logger passgrid`: Snakemake's dry runs and runs as JSON lines, held against what it prints of the same one."""

import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections import Counter
from pathlib import Path

import pytest
from conftest import ROOT, Workspace

from snakemake_logger_plugin_passgrid import canonical_reason

GLM = ("--config", "campaign=glm-5.3-flash-gb300-tp4")
GPU = ("--config", "campaign=qwen3-8b-h200")
FILE = "lines.jsonl"
INTO_FILE = ("--logger", "passgrid", "--logger-passgrid-file", FILE)
KEYS = {
    "totals": {"event", "jobs", "total"},
    "job": {"event", "rule", "wildcards", "input", "output", "log", "reason", "resources", "threads"},
    "started": {"event", "jobid", "time"},
    "finished": {"event", "jobid", "time"},
    "job_error": {"event", "jobid", "time", "rule", "output", "log"},
    "error": {"event", "exception", "message"},
}
SOMETIMES = {"job": {"message", "checkpoint"}, "job_error": {"message", "external_jobid"}}
OF_A_RUN = {"jobid", "local"}


def parsed(text: str, run: bool = False) -> list[dict]:
    """Every line, each of the shape that is documented and written canonically."""
    lines = []
    for raw in text.splitlines():
        line = json.loads(raw)
        assert raw == json.dumps(line, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        expected = KEYS[line["event"]] | (OF_A_RUN if run and line["event"] == "job" else set())
        assert expected <= line.keys() <= expected | SOMETIMES.get(line["event"], set()), line
        lines.append(line)
    return lines


def jobs(lines: list[dict]) -> list[dict]:
    return [line for line in lines if line["event"] == "job"]


def settings(words: str) -> list[str]:
    """`a=1, b=2` -> its parts, in one order."""
    return sorted(words.split(", "))


@pytest.mark.parametrize("arguments", [(), ("smoke", *GLM), GPU], ids=["demo", "glm", "gpu"])
def test_the_lines_say_what_the_text_says(project: Workspace, arguments):
    done = project.snakemake("-n", *INTO_FILE, *arguments)
    assert done.returncode == 0, done.stderr
    lines = parsed((project.root / FILE).read_text())
    (totals,) = [line for line in lines if line["event"] == "totals"]
    table = re.search(r"^Job stats:\n.*\n-.*\n((?:\w+ +\d+\n)+)", done.stdout, re.M)[1]
    printed = {rule: int(number) for rule, number in re.findall(r"^(\w+) +(\d+)$", table, re.M)}
    assert totals["jobs"] | {"total": totals["total"]} == printed
    assert Counter(job["rule"] for job in jobs(lines)) == totals["jobs"]
    # Of a job with a message Snakemake prints the message and the reason alone.
    told = [job for job in jobs(lines) if "message" not in job]
    assert Counter(re.findall(r"^(?:rule|checkpoint) (\w+):$", done.stdout, re.M)) == Counter(
        job["rule"] for job in told
    )
    assert sorted(settings(words) for words in re.findall(r"^    wildcards: (.*)$", done.stdout, re.M)) == sorted(
        sorted(f"{name}={value}" for name, value in job["wildcards"].items()) for job in told if job["wildcards"]
    )
    assert Counter(re.findall(r"^Job \d+: (.*)$", done.stdout, re.M)) == Counter(
        job["message"].splitlines()[0] for job in jobs(lines) if "message" in job
    )
    for kind in ("input", "output", "log"):
        shown = [file for text in re.findall(rf"^    {kind}: (.*)$", done.stdout, re.M) for file in text.split(", ")]
        assert Counter(shown) == Counter(file for job in told for file in job[kind])


def parts(reason: str) -> list[str]:
    """Labels and files of a reason, in one order."""
    return sorted(re.split("[,;:] ", reason))


def test_a_reason_is_whole(project: Workspace):
    """The last target waits for every file that another job makes, and says so of each."""
    done = project.snakemake("-n", *INTO_FILE, *GLM)
    assert done.returncode == 0, done.stderr
    lines = jobs(parsed((project.root / FILE).read_text()))
    (last,) = [job for job in lines if job["rule"] == "all"]
    made = {file for job in lines for file in job["output"]}
    waited_for = sorted(made & set(last["input"]))
    assert last["reason"] == f"Input files updated by another job: {', '.join(waited_for)}"
    printed = re.findall(r"^(?:    reason|Reason): (.*)$", done.stdout, re.M)
    assert sorted(map(parts, printed)) == sorted(parts(job["reason"]) for job in lines)


def test_resources_are_those_that_a_rule_asks_for(project: Workspace):
    lines = jobs(parsed(project.snakemake("-n", "--cores", "8", "--logger", "passgrid", *GPU).stdout))
    (probe,) = [
        job
        for job in lines
        if job["rule"] == "probe" and job["wildcards"]["deployment"] == "tp2" and job["wildcards"]["phase"] == "decode"
    ]
    asked = {"gres": "gpu:2", "runtime": 120, "mem_mb": 64000, "slurm_partition": "gpu", "cpus_per_task": 8}
    assert asked.items() <= probe["resources"].items()
    assert not {"tmpdir", "_cores", "_nodes", "mem_mib"} & probe["resources"].keys()
    assert probe["threads"] == 8


def test_standard_output_holds_the_lines_and_nothing_else(project: Workspace):
    done = project.snakemake("-n", "--logger", "passgrid", *GLM)
    assert done.returncode == 0, done.stderr
    assert {line["event"] for line in parsed(done.stdout)} == {"totals", "job"}
    assert str(project.root) not in done.stdout


def test_two_dry_runs_have_the_same_lines(project: Workspace):
    texts = []
    for seed in ("1", "2", "3"):
        done = subprocess.run(
            ["snakemake", "-n", "--logger", "passgrid", *GLM],
            cwd=project.root, env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True,
        )  # fmt: skip
        texts.append(sorted(done.stdout.splitlines()))
    assert texts[0] == texts[1] == texts[2]
    assert len(texts[0]) > 5


def test_a_run_says_what_starts_and_ends(project: Workspace):
    done = project.snakemake("plan", *INTO_FILE, *GLM)
    assert done.returncode == 0, done.stderr
    lines = parsed((project.root / FILE).read_text(), run=True)
    ran = {job["jobid"]: job["rule"] for job in jobs(lines)}
    assert sorted(ran.values()) == ["plan", "plan_campaign", "resolve_request"]
    assert all(job["local"] for job in jobs(lines))
    times = {}
    for event in ("started", "finished"):
        times[event] = {line["jobid"]: line["time"] for line in lines if line["event"] == event}
        assert times[event].keys() == ran.keys()
    assert all(times["started"][jobid] <= times["finished"][jobid] for jobid in ran)
    # What Snakemake writes for people is written all the same, and names the file.
    assert "rule plan_campaign" in done.stderr
    assert f"Complete log(s): {project.root / FILE}" in done.stderr


def test_nothing_to_do_is_a_line_too(project: Workspace):
    assert project.snakemake("plan", *GLM).returncode == 0
    done = project.snakemake("plan", "-n", "--logger", "passgrid", *GLM)
    assert parsed(done.stdout) == [{"event": "totals", "jobs": {}, "total": 0}]


def test_a_job_that_fails_is_named_with_its_log(project: Workspace):
    """Nobody accepted this profile: a real job that refuses."""
    project.edit("config/campaigns/glm-5.3-flash-gb300-tp4.yaml", "tp4: 8613ad6f", "tp4: 00000000")
    done = project.snakemake("plan", *INTO_FILE, *GLM)
    assert done.returncode == 1
    lines = parsed((project.root / FILE).read_text(), run=True)
    (failed,) = [line for line in lines if line["event"] == "job_error"]
    assert failed["rule"] == "accept"
    assert failed["jobid"] in [job["jobid"] for job in jobs(lines) if job["rule"] == "accept"]
    (log,) = failed["log"]
    assert "refused: acceptance.tp4" in (project.root / log).read_text()
    assert failed["jobid"] not in [line["jobid"] for line in lines if line["event"] == "finished"]
    command, end = [line for line in lines if line["event"] == "error"]
    assert "accept.py" in command["message"]
    assert end["exception"] == "WorkflowError"
    assert "At least one job did not complete successfully." in end["message"]


def test_an_error_of_a_dry_run_is_a_line_and_a_word_to_the_person(project: Workspace):
    done = project.snakemake("-n", "no-such-file", "--logger", "passgrid")
    assert done.returncode == 1
    (line,) = parsed(done.stdout)
    assert line["exception"] == "MissingRuleException"
    assert "No rule to produce no-such-file" in line["message"]
    assert "No rule to produce no-such-file" in done.stderr


def test_a_refused_campaign_leaves_standard_output_empty(project: Workspace):
    done = project.snakemake("-n", "--logger", "passgrid", "--config", "campaign=none")
    assert (done.returncode, done.stdout) == (2, "")
    assert "refused: campaign: expected a readable file" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("plan", "--logger", "passgrid"), "expected a file for the lines of a run, found none: command line"),
        (
            ("-n", "--logger", "passgrid", "--logger-passgrid-file", "none/lines.jsonl"),
            "expected a file to write, found No such file or directory: none/lines.jsonl",
        ),
    ],
)
def test_lines_that_have_nowhere_to_go_are_refused_before_anything_starts(project: Workspace, arguments, line):
    done = project.snakemake(*arguments)
    assert done.returncode == 2
    assert f"refused: --logger-passgrid-file: {line}\n" in done.stderr
    assert not (project.root / "results").exists()


def test_a_reader_that_stops_early_is_no_error(project: Workspace):
    command = "set -o pipefail; snakemake -n --logger passgrid --config campaign=qwen3-8b-h200 | head -n 1"
    done = subprocess.run(["bash", "-c", command], cwd=project.root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert parsed(done.stdout)[0]["event"] == "totals"
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("Missing output files: b, a", "Missing output files: a, b"),
        ("Updated input files: z, y; Code has changed since last execution",
         "Updated input files: y, z; Code has changed since last execution"),
        ("Missing output files: b; Input files updated by another job: z, y",
         "Missing output files: b; Input files updated by another job: y, z"),
        ("Missing output files: b (in storage), a (in storage)", "Missing output files: a, b"),
        ("Missing output files: odd, name, b", "Missing output files: odd, name, b"),  # one file is "odd, name"
        ("Forced execution", "Forced execution"),
        ("", ""),
    ],
)  # fmt: skip
def test_only_lists_of_files_are_put_in_order(reason: str, expected: str):
    assert canonical_reason(reason, {"input": ["y", "z"], "output": ["a", "b", "odd, name"]}) == expected


def test_the_wheel_and_an_editable_install_hold_the_plugin(tmp_path: Path):
    """Both as pip builds them; Snakemake finds a plugin below a folder of the module path and nowhere else."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert "snakemake_logger_plugin_passgrid" in settings["packages"]
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "schemas", "producer", "snakemake_logger_plugin_passgrid"):
        (source / name).symlink_to(ROOT / name)
    build = "import sys; from setuptools import build_meta as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"
    for hook in ("build_wheel", "build_editable"):
        target = tmp_path / hook
        target.mkdir()
        done = subprocess.run(
            [sys.executable, "-c", build, hook, str(target)], cwd=source, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        (wheel,) = target.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            if hook == "build_wheel":
                assert "snakemake_logger_plugin_passgrid/__init__.py" in names
            else:
                (path,) = [name for name in names if name.endswith(".pth")]
                assert archive.read(path).decode().strip() == str(source)
