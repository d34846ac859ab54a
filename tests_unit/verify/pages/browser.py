"""Pages in headless Chromium, run as a command if it is installed."""

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
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

# A window has a minimum width, frames have none; pages are loaded one after the other.
_FRAMES = """<!doctype html><html><body style="margin:0"><iframe width="%d" height="900" style="border:0"></iframe>
<script>
const pages = %s, found = {};
const frame = document.querySelector("iframe");
const names = Object.keys(pages);
const load = () => {
  if (!names.length) { document.documentElement.dataset.found = JSON.stringify(found); return; }
  frame.srcdoc = pages[names[0]];
};
frame.addEventListener("load", () => {
  const data = frame.contentDocument.documentElement.dataset.found;
  if (data === undefined) return;
  found[names.shift()] = JSON.parse(data);
  load();
});
load();
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
    return ask_all(folder, {"page": page}, script, width=width, dark=dark)["page"]


def ask_all(folder: Path, pages: Mapping[str, str], script: str, *, width: int, dark: bool):
    """Return the results of a function body inside each page by name; one browser loads all of them."""
    # not of Markup, which would escape the probe
    probed = {name: str(page).replace("</body>", _PROBE % script) for name, page in pages.items()}
    (folder / "probe.html").write_text(_FRAMES % (width, json.dumps(probed).replace("</", "<\\/")), encoding="utf-8")
    options = ("--window-size=1600,1000", f"--virtual-time-budget={3000 * len(pages)}", "--dump-dom")
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
