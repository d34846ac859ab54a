"""Pages in headless Chromium, run as a command if it is installed."""

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)

# Results leave the page as JSON in an attribute, which --dump-dom prints.
_PROBE = """
<script>
addEventListener("load", () => {
  let found;
  try { found = (() => { %s })(); } catch (error) { found = { error: String(error) }; }
  document.documentElement.dataset.found = JSON.stringify(found);
});
</script></body>"""

_FRAME = """<!doctype html><html><body style="margin:0"><iframe width="%d" height="900" style="border:0"></iframe>
<script>
const frame = document.querySelector("iframe");
frame.addEventListener("load", () => {
  const root = frame.contentDocument.documentElement;
  document.documentElement.dataset.found = root.dataset.found;
});
frame.srcdoc = %s;
</script></body></html>"""


def _chromium(folder: Path, *options: str) -> str:
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
               "--disable-dev-shm-usage", f"--user-data-dir={folder / 'profile'}", *options]  # fmt: skip
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


def _scheme(dark: bool) -> str:
    return f"--blink-settings=preferredColorScheme={0 if dark else 1}"


def ask(folder: Path, page: str, script: str, *, width: int = 1280, dark: bool = False):
    """Return the result of a function body inside the loaded page, in a window of this width."""
    probed = str(page).replace("</body>", _PROBE % script)  # not of Markup, which would escape the probe
    # A window has a minimum width, a frame has none.
    (folder / "probe.html").write_text(_FRAME % (width, json.dumps(probed).replace("</", "<\\/")), encoding="utf-8")
    options = ("--window-size=1600,1000", "--virtual-time-budget=3000", "--dump-dom")
    document = _chromium(folder, _scheme(dark), *options, (folder / "probe.html").as_uri())
    result = re.search(r'data-found="([^"]*)"', document)
    assert result, document[:2000]
    return json.loads(unescape(result[1]))


def screenshot(folder: Path, page: str, *, dark: bool = False, size: tuple[int, int] = (1280, 900)) -> bytes:
    """Return the page as PNG."""
    (folder / "shot.html").write_text(page, encoding="utf-8")
    path = folder / f"{'dark' if dark else 'light'}.png"
    options = (f"--window-size={size[0]},{size[1]}", f"--screenshot={path}")
    _chromium(folder, _scheme(dark), *options, (folder / "shot.html").as_uri())
    return path.read_bytes()
