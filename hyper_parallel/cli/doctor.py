"""``hyper-parallel doctor``: report installed versions, conflicts and fixes. Imports frameworks in other processes."""

from __future__ import annotations

import argparse
import csv
import importlib.util
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from hyper_parallel.cli import devices
from hyper_parallel.cli.output import print_result
from hyper_parallel.platform.select import FRAMEWORKS, INSTALL
from hyper_parallel.platform.tested import PYTHONS, TESTED, newer_than_tested, older_than_supported
from hyper_parallel.transport.device_types import dry_run, has_plugin
from hyper_parallel.verify.report import report_json

__all__ = ["Finding", "add_parser", "device_findings", "findings", "run"]

_DESCRIPTION = """\
Check this environment: Python, the frameworks and their versions, devices, and how simulated and real ranks can
communicate. Each problem comes with the command that fixes it.

Exit status: 0 if nothing is wrong, 1 if something is."""

_EXAMPLES = (
    "hyper-parallel doctor",
    "hyper-parallel doctor --json",
)

_LIMIT = 300.0
"""Seconds after which an import of a framework that has not ended counts as failed."""

_IMPORTED = "imported"
_START = """\
import sys
sys.path[:] = {path!r}
import {name}
print({imported!r})
from hyper_parallel.platform.{name}.platform import build
build()
"""


@dataclass(frozen=True)
class Finding:
    """One fact about this environment.

    Attributes:
        what: the subject, such as ``torch``.
        state: ``ok``, ``absent``, ``newer`` (than all tested versions) or ``wrong``.
        text: the fact.
        fix: a command or advice, or empty.
    """

    what: str
    state: str
    text: str
    fix: str = ""


def add_parser(commands: Any) -> None:
    """Declare the subcommand."""
    subparser = commands.add_parser(
        "doctor",
        help="print what is installed, which versions conflict, and the command that fixes it",
        description=_DESCRIPTION,
        examples=_EXAMPLES,
        guide="docs/versions.md",
    )
    subparser.add_argument("--json", action="store_true", help="print the findings as JSON")
    subparser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the findings; return 0 if nothing is wrong."""
    all_findings = findings()
    ok = all(finding.state != "wrong" for finding in all_findings)
    if arguments.json:
        print_result(report_json({"ok": ok, "findings": [asdict(finding) for finding in all_findings]}))
    else:
        width = max(len(finding.what) for finding in all_findings)
        for finding in all_findings:
            print(f"{finding.state:6}  {finding.what:{width}}  {finding.text}")
            if finding.fix:
                print(f"{'':{width + 10}}{finding.fix}")
    return 0 if ok else 1


def findings() -> list[Finding]:
    """Return all facts about this environment."""
    versions = {name: _version(name) for name in (*FRAMEWORKS, "numpy", "torch_npu", "cloudpickle")}
    with ThreadPoolExecutor() as pool:  # each finding waits for a process
        frameworks = list(pool.map(lambda name: _framework(name, versions), FRAMEWORKS))
    usable = {**versions, **{found.what: None for found in frameworks if found.state == "wrong"}}
    all_findings = [_python(), *frameworks]
    if all(versions[name] is None for name in FRAMEWORKS):
        fix = "one of them is needed: " + ", or ".join(INSTALL.values())
        all_findings.append(Finding("frameworks", "wrong", "neither framework is installed", fix))
    all_findings += [_numpy(versions), *_npu(versions), *_transports(usable), _loopback()]
    return [*all_findings, *device_findings(os.environ)]


def device_findings(environment: Mapping[str, str], folder: Path = Path("/dev")) -> list[Finding]:
    """Return the devices of this machine, and environment variables that contradict what is installed.

    Args:
        environment: the environment variables.
        folder: the folder of device nodes (``/dev``).
    """
    found = []
    for device in ("npu", "cuda"):
        if text := devices.described(device, environment, folder):
            found += [Finding(f"{device} devices", "ok", text), *_builds(device, environment)]
        found += [
            Finding(f"{device} settings", "wrong", text, fix)
            for text, fix in devices.contradictions(device, environment, folder)
        ]
    return found


def _builds(device: str, environment: Mapping[str, str]) -> list[Finding]:
    """Return the installed frameworks that cannot use the devices of this machine, with the fix."""
    torch, found = _version("torch"), []
    if torch is not None and device == "cuda" and torch.endswith("+cpu"):
        text = f"PyTorch {torch} was built without CUDA, so --device cuda is refused"
        found.append(Finding("torch on cuda", "absent", text, "install PyTorch's CUDA build"))
    if torch is not None and device == "npu" and _version("torch_npu") is None:
        text = "torch_npu is not installed, so --device npu is refused"
        found.append(Finding("torch on npu", "absent", text, f"install the torch_npu for PyTorch {torch}"))
    return [*found, *_mindspore_on(device, environment)]


def _mindspore_on(device: str, environment: Mapping[str, str]) -> list[Finding]:
    """Return whether the installed MindSpore can use the devices of this machine; nothing is imported."""
    package, version = importlib.util.find_spec("mindspore"), _version("mindspore")
    if package is None or package.origin is None or version is None:
        return []
    what = f"mindspore on {device}"
    if device == "cuda":
        text = "this library uses MindSpore on cpu and npu, so --device cuda is refused"
        return [Finding(what, "absent", text, "take --platform torch")]
    if not has_plugin(Path(package.origin).parent):
        text = f"MindSpore {version} is the CPU build, so --device npu is refused"
        return [Finding(what, "absent", text, "install the one for Ascend")]
    dry = dry_run(environment)
    if dry is not None:
        return [Finding(what, "wrong", *dry)]
    text = f"MindSpore {version} has its plugin for Ascend, which loads with CANN's libraries; each rank needs a device"
    return [Finding(what, "ok", text)]


def _version(name: str) -> str | None:
    if importlib.util.find_spec(name) is None:
        return None
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "of unknown version"


def _python() -> Finding:
    text = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    oldest, newest = PYTHONS["torch"]  # MindSpore supports fewer; its own finding names them
    if sys.version_info[:2] > newest:
        wheels = f"PyTorch publishes wheels for Python {_dotted(oldest)} to {_dotted(newest)}"
        return Finding("python", "newer", text, wheels)
    return Finding("python", "ok", text)


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _framework(name: str, versions: dict[str, str | None]) -> Finding:
    version = versions[name]
    if version is not None and (older := older_than_supported(name, version)):
        return Finding(name, "wrong", older, INSTALL[name])
    if unusable := _unusable(name):
        return Finding(name, "wrong", *unusable)
    if version is None:
        oldest, newest = PYTHONS[name]
        here = oldest <= sys.version_info[:2] <= newest
        python = f"it has wheels for Python {_dotted(oldest)} to {_dotted(newest)}"
        return Finding(name, "absent", "not installed", f"to verify on it: {INSTALL[name]}" if here else python)
    if newer := newer_than_tested(name, version):
        return Finding(name, "newer", version, newer)
    return Finding(name, "ok", version)


def _unusable(name: str) -> tuple[str, str] | None:
    """Return a problem and its fix if a framework is installed incompletely or cannot be imported; else None."""
    spec = importlib.util.find_spec(name)
    try:
        installed = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        installed = None
    again = f"pip install --force-reinstall '{name}=={installed.version}'" if installed else INSTALL[name]
    if spec is None:
        return (f"metadata of {installed.version}, but no package", again) if installed else None
    if spec.origin is None:
        folder = next(iter(spec.submodule_search_locations or ()))
        return f"{folder} is not a package: it has no __init__.py", f"delete this folder, then: {again}"
    imported, error = _start(name)
    if not error:
        return None
    if imported:
        tested = f"pip install --force-reinstall '{name}=={TESTED[name][-1]}.*'"
        return f"{spec.origin}: this library does not start on it: {error}", tested
    # not ``installed.files``, which leaves out missing files from Python 3.12 on
    record = installed.read_text("RECORD") if installed else None
    files = [Path(row[0]) for row in csv.reader((record or "").splitlines()) if row]
    packages = Path(str(installed.locate_file(""))) if installed else Path()
    gone = [file for file in files if ".so" in file.name and not (packages / file).exists()]
    missing = f"{len(gone)} of its libraries are missing, such as {gone[0]}; " if gone else ""
    return f"{missing}import {name} fails: {error}", again


def _start(name: str) -> tuple[bool, str]:
    """Return whether a process can import ``name``, and the error if it cannot, or if this library then fails; or "".

    The error is the last line that Python prints. torch_npu, which PyTorch imports, is not loaded: it has its own
    finding.
    """
    code = _START.format(path=sys.path, name=name, imported=_IMPORTED)
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, "-c", code]
    try:
        done = subprocess.run(  # noqa: S603 - this interpreter
            command, capture_output=True, text=True, check=False, env=environment, timeout=_LIMIT
        )
    except subprocess.TimeoutExpired:
        return False, f"no end after {_LIMIT:g} s"
    lines = done.stderr.strip().splitlines() or [f"Python ended with status {done.returncode}"]
    return _IMPORTED in done.stdout.splitlines(), lines[-1] if done.returncode else ""


def _numpy(versions: dict[str, str | None]) -> Finding:
    version = versions["numpy"]
    if version is None:
        return Finding("numpy", "wrong", "not installed", "pip install numpy")
    if versions["mindspore"] is not None and version.split(".")[0] not in ("0", "1"):
        text = f"{version}; MindSpore {versions['mindspore']} is built against NumPy 1 and refuses bfloat16 on 2"
        return Finding("numpy", "ok", text, "for bfloat16 on MindSpore: pip install 'numpy<2'")
    return Finding("numpy", "ok", version)


def _npu(versions: dict[str, str | None]) -> list[Finding]:
    if versions["torch_npu"] is None:
        return []
    if importlib.util.find_spec("acl") is None:
        text = f"torch_npu {versions['torch_npu']} without the Ascend toolkit: 'import torch' fails"
        fix = "pip uninstall torch_npu, or export TORCH_DEVICE_BACKEND_AUTOLOAD=0"
        return [Finding("torch_npu", "wrong", text, fix)]
    return [Finding("torch_npu", "ok", str(versions["torch_npu"]))]


def _transports(versions: dict[str, str | None]) -> list[Finding]:
    all_findings = []
    if versions["torch"] is not None:
        all_findings.append(Finding("torch simulated", "ok", "ranks are threads"))
        all_findings.append(Finding("torch processes", "ok", "gloo, forked from a warm process"))
    if versions["mindspore"] is not None:
        all_findings += [_mindspore_simulated(versions), _mindspore_processes(versions)]
    return all_findings


def _mindspore_simulated(versions: dict[str, str | None]) -> Finding:
    if versions["cloudpickle"] is None:
        return Finding("mindspore simulated", "wrong", "cloudpickle is missing", "pip install cloudpickle")
    return Finding("mindspore simulated", "ok", "ranks are warm processes")


def _mindspore_processes(versions: dict[str, str | None]) -> Finding:
    if versions["torch"] is None:
        fix = f"MindSpore's own CPU collectives are incomplete; for PyTorch's: {INSTALL['torch']}"
        return Finding("mindspore processes", "absent", "needs PyTorch's gloo", fix)
    return Finding("mindspore processes", "ok", "PyTorch's gloo, in the same process")


def _loopback() -> Finding:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            return Finding("ports", "ok", f"127.0.0.1 is open, for example port {server.getsockname()[1]}")
    except OSError as error:
        return Finding("ports", "wrong", f"cannot listen on 127.0.0.1: {error}", "real processes need it to meet")
