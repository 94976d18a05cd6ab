"""The judging half installs with plain pip, without vLLM, and judges."""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, Workspace

pytestmark = pytest.mark.demo


def test_a_laptop_without_vllm_verifies_publishes_and_reports(finished: Workspace, tmp_path_factory):
    venv: Path = tmp_path_factory.mktemp("judging") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    install = [str(venv / "bin" / "pip"), "install", "--quiet", str(ROOT)]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    listed = subprocess.run([str(venv / "bin" / "pip"), "list"], capture_output=True, text=True, check=True).stdout
    assert "vllm" not in listed
    assert "torch" not in listed

    for name in ("merged.json", "evidence.json"):
        for file in (finished.root / "results/cpu-demo/cells").glob(f"*/{name}"):
            file.unlink()
    run = f"PATH={venv}/bin:$PATH snakemake"
    done = subprocess.run(["bash", "-c", run], cwd=finished.root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert "formal: ready (6 cells)" in done.stdout + done.stderr
