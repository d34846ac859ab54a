r"""Pages as PNG for the README: ``python ci/screenshots.py PAGE.html:NAME:WIDTHxHEIGHT ...`` writes docs/NAME.png.

What the README shows was made by, in the root of the checkout::

    hyper-parallel verify model --platform torch --scenario 2x2-rms-tied --steps 12 --inject unreduced-norm-grad \
        --html reports/diverged.html
    tox -e ops-torch,ops-mindspore && python ci/workshop coverage html
    python ci/screenshots.py reports/diverged.html:diverged:960x1015 \
        coverage_reports/operators.html:operators:1280x800

Chromium must be installed (Debian: ``apt-get install chromium``). A picture of more than 150 KB is refused: it would be
in every clone for ever.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
LIMIT = 150 * 1024


def main(asked: list[str]) -> int:
    """Write every picture in the arguments; return 0, or 2 after one line with the mistake."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None or not asked:
        print("screenshots: " + ("Chromium is not installed" if asked else str(__doc__)), file=sys.stderr)
        return 2
    for request in asked:
        page, _, rest = request.partition(":")
        name, _, size = rest.partition(":")
        problem = shoot(browser, Path(page).resolve(), ROOT / "docs" / f"{name}.png", size.replace("x", ","))
        if problem:
            print(f"screenshots: {problem}", file=sys.stderr)
            return 2
    return 0


def shoot(browser: str, page: Path, target: Path, size: str) -> str:
    """Write a picture of the upper part of a page; return the problem, or nothing."""
    if not page.is_file():
        return f"{page} is not there; write it first"
    target.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as profile:
        command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                   f"--user-data-dir={profile}", "--blink-settings=preferredColorScheme=1",
                   f"--window-size={size}", f"--screenshot={target}", page.as_uri()]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode or not target.exists():
        return f"{browser} failed: {done.stderr.strip()[-500:]}"
    if target.stat().st_size > LIMIT:
        return f"{target} has {target.stat().st_size} bytes, more than {LIMIT}: ask for less of the page"
    print(f"{target.relative_to(ROOT)}: {target.stat().st_size} bytes")
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
