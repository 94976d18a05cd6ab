"""The report, in a real browser."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import in_ci

pytestmark = pytest.mark.demo
QUIET = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(scope="module")
def report(demo: Path) -> Path:
    return (demo / "current" / "report.html").resolve()


def test_it_is_self_contained(report: Path):
    page = re.sub(r"<script>.*?</script>", "", report.read_text(), flags=re.S)
    assert not re.search(r"""(?:src|href)\s*=\s*["']?https?:""", page)


def test_a_browser_draws_every_figure(report: Path, tmp_path: Path):
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None and not in_ci():
        pytest.skip("no Chromium here; CI installs one")
    assert browser, "CI has to install chromium"
    command = [browser, *QUIET, f"--user-data-dir={tmp_path}", "--virtual-time-budget=20000", "--dump-dom"]
    done = subprocess.run([*command, report.as_uri()], capture_output=True, text=True, timeout=180, check=False)
    page = done.stdout
    # Two figures a cell (latency and spread), six cells, and the time of all.
    assert len(re.findall(r'class="[^"]*js-plotly-plot', page)) == 13
    titles = ["Prefill", "Decode", "Spread of the samples: prefill", "Where the time went"]
    for title in titles:
        assert re.search(rf'<text class="gtitle"[^>]*>{title}</text>', page), title
    # Sliding window, second panel of the prefill figure: a line per prefix is drawn as a path.
    assert page.count('class="scatterlayer') >= 6
    for name in ("dense", "sliding", "hybrid"):
        assert f'<h2 id="{name}">{name}</h2>' in page
    assert page.count('<td class="recorded">recorded</td>') == 6
