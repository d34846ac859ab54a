"""A recording of a terminal as an animated SVG: ``python ci/recording.py`` writes docs/first-run.svg.

It runs the README's first model, once as it is and once with an injected fault, and shows the commands with the first
lines of what they print. Needs an environment with PyTorch and this library.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERIFY = "hyper-parallel verify model my_model.py:case --plan my_model.py:plan --mesh 3"
COMMANDS = (VERIFY, f"{VERIFY} --inject drop-allreduce@2")
COLUMNS, LINE, LETTER, MARGIN = 100, 18, 7.8, 14
SHOWN = 6
"""Lines of output of each command; the last line of each is shown, too."""

SECONDS_PER_COMMAND, SECONDS_PER_LINE, PAUSE = 1.5, 0.15, 2.0


def main() -> int:
    """Record the commands and write the picture; return 0."""
    model = re.search(
        r"```python\n# my_model.py\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL
    )
    if model is None:
        print("recording: README.md has no block of Python that begins with # my_model.py", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "my_model.py").write_text(model[1], encoding="utf-8")
        runs = [(command, output(command, Path(folder))) for command in COMMANDS]
    (ROOT / "docs" / "first-run.svg").write_text(picture(runs), encoding="utf-8")
    return 0


def output(command: str, folder: Path) -> list[str]:
    """Run a command of this environment in a folder; return the lines that it prints."""
    words = [sys.executable, "-m", "hyper_parallel", *shlex.split(command)[1:]]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False, timeout=300).stdout.split(
        "\n"
    )


def picture(runs: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Return the picture of commands and their output, which appears line by line and then stays."""
    lines: list[tuple[str, str, float]] = []
    now = 0.5
    for command, printed in runs:
        wrapped = textwrap.wrap(f"$ {command}", COLUMNS, subsequent_indent="    ", break_on_hyphens=False)
        lines += [("command", part, now) for part in wrapped]
        now += SECONDS_PER_COMMAND
        kept = [line for line in printed if line]
        for line in [*kept[:SHOWN], *(["  ..."] if len(kept) > SHOWN + 1 else []), *kept[SHOWN:][-1:]]:
            kind = "bad" if re.search(r"DIVERGED|FAILED|cause:", line) else "good" if "equal" in line else "plain"
            for part in textwrap.wrap(line, COLUMNS, subsequent_indent="    "):
                lines.append((kind, part, now))
                now += SECONDS_PER_LINE
        lines.append(("plain", "", now))
        now += PAUSE
    width, height = round(COLUMNS * LETTER + 2 * MARGIN), LINE * len(lines) + 2 * MARGIN
    rows = "\n".join(
        f'<text x="{MARGIN}" y="{MARGIN + LINE * (row + 1) - 5}" class="{kind}" style="animation-delay:{start:.2f}s">'
        f"{escape(text)}</text>"
        for row, (kind, text, start) in enumerate(lines)
        if text
    )
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img">
<title>A plan is verified, then broken on purpose and found to diverge</title>
<style>
text {{ font: 13px ui-monospace, Menlo, Consolas, monospace; white-space: pre; animation: appear .1s both; }}
.command {{ fill: #ffffff; font-weight: bold; }} .plain {{ fill: #c9d1d9; }}
.good {{ fill: #7ee787; }} .bad {{ fill: #ff7b72; }}
@keyframes appear {{ from {{ opacity: 0; }} to {{ opacity: 1; }} }}
@media (prefers-reduced-motion: reduce) {{ text {{ animation: none; }} }}
</style>
<rect width="100%" height="100%" rx="8" fill="#0d1117"/>
{rows}
</svg>
"""


if __name__ == "__main__":
    sys.exit(main())
