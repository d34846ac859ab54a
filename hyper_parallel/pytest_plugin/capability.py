"""Devices of this machine, devices that a run requires, and the closed list of reasons to skip a test."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import NoReturn

import pytest

from hyper_parallel.transport.device_types import VISIBLE

__all__ = ["DEVICES", "SkipReason", "count_devices", "reason_of", "requirement", "skip_without"]

DEVICES = ("cpu", "npu", "cuda")

_NODES = {"npu": "davinci", "cuda": "nvidia"}
_REASON = re.compile(r"\[([a-z-]+)\]")


class SkipReason(str, Enum):
    """The only reasons to skip a test; the message of a skip begins with one of them in brackets."""

    NO_DEVICE = "no-device"
    TOO_FEW_DEVICES = "too-few-devices"
    NO_FRAMEWORK = "no-framework"
    NO_TRANSPORT = "no-transport"
    NO_TOOL = "no-tool"
    OTHER_PYTHON = "other-python"


@dataclass(frozen=True)
class Requirement:
    """A number of devices that a run requires, as in ``npu:8``; with fewer, the run fails."""

    device: str
    devices: int


def count_devices(device: str, folder: Path = Path("/dev")) -> int:
    """Count the devices of ``device`` that this process may use; CPU counts as unlimited.

    No framework is imported. If PyTorch is imported already and sees more devices than there are device nodes, its
    number is used.
    """
    if device == "cpu":
        return 1 << 16
    prefix = _NODES[device]
    present = len([path for path in folder.glob(f"{prefix}*") if path.name[len(prefix) :].isdigit()])
    visible = os.environ.get(VISIBLE[device])
    if visible is not None:
        present = min(present, len([number for number in visible.split(",") if number.strip() not in {"", "-1"}]))
    engine = getattr(sys.modules.get("torch"), device, None)
    return present if engine is None else max(present, engine.device_count())


def requirement(text: str, source: str) -> Requirement | None:
    """Parse ``npu:8`` or ``npu``; an empty text has no requirement."""
    if not text:
        return None
    device, _, devices = text.partition(":")
    if device not in _NODES or not (devices or "1").isdigit() or int(devices or "1") < 1:
        msg = (
            f"{source}={text}: expected {' or '.join(_NODES)}, with the number of devices after a colon, such as npu:8"
        )
        raise pytest.UsageError(msg)
    return Requirement(device, int(devices or "1"))


def skip_without(reason: SkipReason, detail: str) -> NoReturn:
    """Skip the running test for a reason of the closed list."""
    pytest.skip(f"[{reason.value}] {detail}")


def reason_of(text: str) -> str | None:
    """Return the reason of the closed list at the start of a skip's message, or None."""
    match = _REASON.match(text.removeprefix("Skipped: "))
    known = {reason.value for reason in SkipReason}
    return match.group(1) if match is not None and match.group(1) in known else None
