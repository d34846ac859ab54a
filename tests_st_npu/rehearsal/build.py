"""Builds the rehearsal device: a folder that makes ``import torch`` register it when the folder is on the path.

Needs g++ (or ``CXX``) and the headers in PyTorch's wheel; neither Python's headers nor ninja. Folders are kept by the
hash of the sources, of PyTorch's version and of the compiler's, so each is built once on a machine.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

__all__ = ["CannotBuildError", "build", "environment"]

_SOURCES = Path(__file__).parent
_MODULE = "hp_rehearsal_npu"
_ENTRY_POINTS = f"[torch.backends]\nrehearsal_npu = {_MODULE}:start\n"
_METADATA = "Metadata-Version: 2.1\nName: hp-rehearsal-npu\nVersion: 1.0\n"
_SECONDS = 600


class CannotBuildError(Exception):
    """This machine lacks what the build needs; the message says what."""


def build() -> Path:
    """Build the device, unless it is there already; return its folder.

    Raises:
        CannotBuildError: no compiler, or no PyTorch.
        RuntimeError: the compiler failed; the message ends with what it printed.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        msg = f"no C++ compiler: {os.environ.get('CXX', 'g++')} is not on the path; install g++ or set CXX"
        raise CannotBuildError(msg)
    try:
        import torch
    except ImportError as error:
        msg = "no PyTorch, whose headers the device is compiled with"
        raise CannotBuildError(msg) from error
    folder = _cache() / f"rehearsal-{_digest(compiler, torch.__version__)}"
    if not (folder / "rehearsal_device.so").exists():
        _build_in(folder, compiler, Path(torch.__file__).parent)
    return folder


def environment(devices: int) -> dict[str, str]:
    """Return the variables with which a Python process has ``devices`` rehearsal devices.

    Raises:
        CannotBuildError: see :func:`build`.
        RuntimeError: see :func:`build`.
    """
    path = [str(build()), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(path), "HP_REHEARSAL_DEVICES": str(devices)}


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "hyper_parallel"


def _digest(compiler: str, version: str) -> str:
    """A name for what is built of these sources by this compiler for this PyTorch."""
    digest = hashlib.sha256(version.encode())
    digest.update(subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout)
    for source in sorted(_SOURCES.iterdir()):
        if source.suffix in (".h", ".cpp", ".py"):
            digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def _build_in(folder: Path, compiler: str, torch_folder: Path) -> None:
    """Build beside ``folder`` and rename, so that no other process sees half of it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        beside = Path(name) / "made"
        information = beside / "hp_rehearsal_npu-1.0.dist-info"
        information.mkdir(parents=True)
        (information / "METADATA").write_text(_METADATA, encoding="utf-8")
        (information / "entry_points.txt").write_text(_ENTRY_POINTS, encoding="utf-8")
        shutil.copyfile(_SOURCES / "npu.py", beside / f"{_MODULE}.py")
        _compile(compiler, torch_folder, beside / "rehearsal_device.so")
        if not folder.exists():
            try:
                beside.rename(folder)
            except OSError:
                if not (folder / "rehearsal_device.so").exists():  # else another process was first
                    raise


def _compile(compiler: str, torch_folder: Path, target: Path) -> None:
    include = torch_folder / "include"
    command = [compiler, "-std=c++20", "-O1", "-fPIC", "-shared", "-w", f"-I{include}"]
    command += [f"-I{include / 'torch/csrc/api/include'}", str(_SOURCES / "operators.cpp"), "-o", str(target)]
    command += [f"-L{torch_folder / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    if done.returncode:
        msg = f"{' '.join(command)} failed:\n{done.stderr[-4000:]}"
        raise RuntimeError(msg)
