"""Devices of this machine, without a framework: number, driver, toolkit, and contradictory environment variables."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from hyper_parallel.transport.device_types import VISIBLE

__all__ = ["contradictions", "described", "present", "require_settings"]

_NODES = {"cuda": r"nvidia(\d+)", "npu": r"davinci(\d+)"}
_TOOLKIT = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
_RANGES = {"HCCL_CONNECT_TIMEOUT": (120, 7200, 120), "HCCL_IF_BASE_PORT": (0, 65520, 60000)}
"""Minimum, maximum and usual value; later versions of CANN require a port of at least 1024."""

_SECONDS = 10.0
_QUERY = ("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")


def present(device: str, folder: Path = Path("/dev")) -> list[int]:
    """Return the numbers of the machine's devices of this type, including hidden ones."""
    names = [re.fullmatch(_NODES[device], path.name) for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(name[1]) for name in names if name is not None)


def contradictions(device: str, environment: Mapping[str, str], folder: Path = Path("/dev")) -> list[tuple[str, str]]:
    """Return contradictions among a device type's variables, with the fix.

    Args:
        device: ``cuda`` or ``npu``.
        environment: environment variables.
        folder: folder of the device nodes.
    """
    found = _hidden(device, environment, present(device, folder))
    if device != "npu":
        return found
    if present(device, folder) and not any(environment.get(name) for name in _TOOLKIT):
        text = f"there is a driver and no toolkit: neither {_TOOLKIT[0]} nor {_TOOLKIT[1]} is set"
        found.append((text, "source the set_env.sh of the CANN toolkit"))
    return found + _hccl(environment)


def _hccl(environment: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return contradictions among HCCL's variables, and invalid values."""
    found = []
    links = ("HCCL_INTRA_PCIE_ENABLE", "HCCL_INTRA_ROCE_ENABLE")
    if all(environment.get(name) == "1" for name in links):
        found.append((f"{links[0]}=1 and {links[1]}=1: HCCL takes one of them", f"unset {links[0]} or {links[1]}"))
    if environment.get("HCCL_WHITELIST_DISABLE") == "0" and not environment.get("HCCL_WHITELIST_FILE"):
        text = "HCCL_WHITELIST_DISABLE=0 asks for a list of addresses, and HCCL_WHITELIST_FILE names none"
        found.append((text, "set HCCL_WHITELIST_FILE to the list, or HCCL_WHITELIST_DISABLE=1"))
    table = environment.get("RANK_TABLE_FILE")
    if table and environment.get("CM_CHIEF_IP"):
        text = f"RANK_TABLE_FILE={table} and CM_CHIEF_IP={environment['CM_CHIEF_IP']}: HCCL takes the cluster from one"
        found.append((text, "unset RANK_TABLE_FILE or CM_CHIEF_IP"))
    elif table and not Path(table).is_file():
        found.append((f"RANK_TABLE_FILE={table}: there is no such file", "unset RANK_TABLE_FILE, or name the file"))
    for name, (low, high, usual) in _RANGES.items():
        text = environment.get(name, str(usual))
        if not (text.isascii() and text.isdecimal() and low <= int(text) <= high):
            problem = f"{name}={text}: HCCL takes whole numbers from {low} to {high}"
            found.append((problem, f"unset {name}, which makes it {usual}"))
    return found


def _hidden(device: str, environment: Mapping[str, str], devices: list[int]) -> list[tuple[str, str]]:
    """Return the problem of a list of visible devices: missing or repeated numbers."""
    name = VISIBLE[device]
    text = environment.get(name, "")
    numbers = [part.strip() for part in text.split(",")]
    if not devices or not all(number.isascii() and number.isdecimal() for number in numbers):
        return []  # the driver checks other machines, names of devices and -1
    missing = [number for number in numbers if int(number) not in devices]
    if missing:
        has = ",".join(map(str, devices))
        return [(f"{name}={text}: there is no device {', '.join(missing)}; there are {has}", f"export {name}={has}")]
    if len(set(map(int, numbers))) < len(numbers):
        kept = ",".join(dict.fromkeys(numbers))
        return [(f"{name}={text} names a device twice", f"export {name}={kept}")]
    return []


def require_settings(device: str, environment: Mapping[str, str] | None = None) -> None:
    """Check that the variables of a device type do not contradict each other.

    Raises:
        ValueError: they contradict each other; the message has the facts and the fix in one line.
    """
    if device == "cpu":
        return
    for text, fix in contradictions(device, os.environ if environment is None else environment):
        msg = f"--device {device}: {text}; {fix}"
        raise ValueError(msg)


def described(device: str, environment: Mapping[str, str], folder: Path = Path("/dev")) -> str:
    """Return the number of devices, and facts that are available without a framework; empty without a device."""
    devices = present(device, folder)
    if not devices:
        return ""
    facts = _nvidia() if device == "cuda" else _ascend(environment)
    return f"{len(devices)} device{'s' if len(devices) > 1 else ''}" + (f": {facts}" if facts else "")


def _nvidia() -> str:
    """Return names, memory and driver as reported by NVIDIA's own tool; empty without the tool."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "nvidia-smi is not on the path, so names, memory and driver are unknown"
    try:
        done = subprocess.run(  # noqa: S603 - no argument comes from a user
            [tool, *_QUERY], capture_output=True, text=True, timeout=_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"nvidia-smi does not answer ({type(error).__name__})"
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    return "; ".join(f"{lines.count(line)} x {line}" for line in dict.fromkeys(lines))


def _ascend(environment: Mapping[str, str]) -> str:
    """Return the version of the driver and the folder of the toolkit."""
    driver = Path("/usr/local/Ascend/driver/version.info")
    line = re.search(r"^Version=(.+)$", driver.read_text(errors="replace"), re.MULTILINE) if driver.is_file() else None
    toolkit = next(filter(None, map(environment.get, _TOOLKIT)), "not set up")
    return f"driver {line[1] if line else 'unknown'}, toolkit {toolkit}"
