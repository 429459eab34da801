"""No page of the site is wider than the window of a desktop, a tablet or a phone."""

from __future__ import annotations

import functools
import html
import json
import re
import runpy
import shutil
import subprocess
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WIDTHS = (1400, 820, 390)
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
FLAGS += " --disable-component-update --disable-sync --virtual-time-budget=600000 --window-size=1500,1000 --dump-dom"
MEASURE = """<!doctype html><pre id="found"></pre><script>
async function measure() {
  const found = [];
  for (const [page, width] of CASES) {
    const frame = document.createElement("iframe");
    frame.width = width; frame.height = 900; frame.style.border = 0; frame.src = page;
    const loaded = new Promise(done => frame.onload = done);
    document.body.append(frame);
    await loaded;
    const root = frame.contentDocument.documentElement;
    found.push([page, width, root.scrollWidth, frame.contentDocument.title]);
    frame.remove();
  }
  document.getElementById("found").textContent = JSON.stringify(found);
}
measure();
</script>"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="measures pages in chromium, which is not installed")
def test_no_page_is_wider_than_its_window(tmp_path):
    pytest.importorskip("furo", reason="needs the extra `docs`")
    pytest.importorskip("myst_nb", reason="needs the extra `docs`")
    site = tmp_path / "site"
    build = [sys.executable, "-m", "sphinx", "-q", "-b", "html", "-c", "docs", ".", str(site)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    pages = sorted(str(page.relative_to(site)) for page in site.rglob("*.html") if page != site / "index.html")
    cases = json.dumps([(page, width) for page in pages for width in WIDTHS])
    (site / "measure.html").write_text(MEASURE.replace("CASES", cases))
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        address = f"http://127.0.0.1:{server.server_port}/measure.html"
        command = [BROWSER, *FLAGS.split(), f"--user-data-dir={tmp_path / 'profile'}", address]
        dom = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout
    finally:
        server.shutdown()
        server.server_close()
    found = json.loads(html.unescape(re.search(r'<pre id="found">(.*?)</pre>', dom, re.DOTALL)[1]))
    assert len(found) == len(WIDTHS) * len(pages) > 0 and all(title for *_, title in found)
    assert [row for row in found if row[2] > row[1]] == []


@pytest.mark.slow
def test_the_start_page_says_what_its_picture_shows():
    pytest.importorskip("sklearn", reason="the picture's data are scikit-learn's")
    panels = runpy.run_path(str(ROOT / "docs" / "start.py"))["draw"]().axes
    shown = [float(panel.get_title("left").split()[-1]) for panel in panels[:2]]
    said = re.search(r"falls from ([\d.]+) to ([\d.]+)\.", (ROOT / "docs" / "index.md").read_text())
    assert shown == pytest.approx([float(number) for number in said.groups()], abs=0.05)
