#!/usr/bin/env python3
"""Install packages into the environment of the Python that runs this, as `pip install` would, but sharing files.

    python ci/install.py [options of pip install] torch==2.13.0 ...

Nine environments of tox hold one framework or both, 1 to 4 GB each. uv, where it is installed, links a package's files
into each of them from one copy: 4 GB in all instead of 20, and under a second instead of 40. It reads no settings of
pip's, so this hands them over. Without uv, or where it fails, pip installs.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

SHARED = Path(__file__).resolve().parents[1] / ".tox" / "shared"  # hard links need the same file system

# pip's name of a setting -> uv's option; the value of a list is separated by blanks.
OPTIONS = {
    "find-links": "--find-links",
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "trusted-host": "--allow-insecure-host",
}
SWITCHES = {"no-index": "--no-index", "pre": "--prerelease=allow"}
# pip's name of a setting -> the variable in which uv looks for it.
VARIABLES = {"cert": "SSL_CERT_FILE", "default-timeout": "UV_HTTP_TIMEOUT", "timeout": "UV_HTTP_TIMEOUT"}
# pip takes the best version of all indexes; uv alone would take the first index that has any.
LIKE_PIP = ["--index-strategy", "unsafe-best-match", "--link-mode", "hardlink"]


def settings(listing: str) -> dict[str, str]:
    """What ``pip config list`` says: the name without its section, and the value; the environment comes last and wins.

    Raises:
        ValueError: a line is not of the form ``section.name='value'``.
    """
    values: dict[str, str] = {}
    lines = [line for line in listing.splitlines() if line]
    for line in sorted(lines, key=lambda text: (text.startswith(":env:"), text.startswith("install."))):
        name, text = line.split("=", 1)
        values[name.rsplit(".", 1)[1]] = ast.literal_eval(text)
    return values


def options(values: dict[str, str]) -> list[str]:
    """Return the options of uv that mean the same as pip's settings."""
    true = {"1", "true", "yes", "on", "t", "y"}
    if values.get("no-index", "").lower() in true:  # pip then asks no index, whatever else is set
        values = {name: value for name, value in values.items() if not name.endswith("index-url")}
    pairs = [(option, value) for name, option in OPTIONS.items() for value in values.get(name, "").split()]
    switches = [switch for name, switch in SWITCHES.items() if values.get(name, "").lower() in true]
    return [*(word for pair in pairs for word in pair), *switches]


def with_uv(uv: str, args: list[str]) -> bool:
    """Install with uv; return whether it succeeded."""
    pip = [sys.executable, "-I", "-m", "pip", "config", "list"]
    listing = subprocess.run(pip, check=False, capture_output=True, text=True)
    if listing.returncode:
        return False
    values = settings(listing.stdout)
    variables = {variable: values[name] for name, variable in VARIABLES.items() if name in values}
    env = {"UV_CACHE_DIR": str(SHARED), **variables, **os.environ}
    command = [uv, "pip", "install", "--python", sys.executable, *LIKE_PIP, *options(values), *args]
    return subprocess.run(command, check=False, env=env).returncode == 0


def main(args: list[str]) -> int:
    """Install, and return the exit status of the tool that did it."""
    uv = shutil.which("uv")
    if uv is not None:
        if with_uv(uv, args):
            return 0
        print("install: uv failed (its message is above); pip tries", file=sys.stderr, flush=True)
    # --no-compile: a framework has thousands of modules, and a run imports few; it saves about a third of the time.
    command = [sys.executable, "-I", "-m", "pip", "install", "--no-compile", *args]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
