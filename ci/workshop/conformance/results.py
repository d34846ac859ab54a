"""Results of the contract's checks and of memory measurements, as data: written as JSON, and shown on a page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from hyper_parallel.errors import RankFailedError
from hyper_parallel.verify.report import report_json
from hyper_parallel.verify.report_files import write_text
from workshop.conformance.inventory import MEMBERS

__all__ = ["ContractOutcome", "Footprint", "examine", "load", "measure"]

_ALL = tuple(MEMBERS)
_LIMITS = {"checkpoint": 0.5, "selective": 0.9, "swap": 0.5}
_SECONDS, _GROWTH, _SCRATCH = 2, 4 << 20, 2 << 20


@dataclass(frozen=True)
class ContractOutcome:
    """The result of one run of the contract's checks.

    Attributes:
        platform: name of the framework.
        device: device type on which tensors were made.
        launch: ``simulated`` or ``processes``.
        world_size: number of ranks.
        members: per member ``served``, ``gap: `` and the ledger's reason, or ``failed: `` and what failed.
        gaps: the framework's gap ledger, an entry per line.
        written: time of the run, in UTC.
    """

    platform: str
    device: str
    launch: str
    world_size: int
    members: dict[str, str]
    gaps: list[dict[str, Any]] = field(default_factory=list)
    written: str = ""

    @property
    def ok(self) -> bool:
        """Whether every checked member works, or is refused as the gap ledger says."""
        return bool(self.members) and not self.failures()

    def failures(self) -> dict[str, str]:
        """Return the members that failed, and how."""
        return {name: state for name, state in self.members.items() if state.startswith("failed: ")}

    @property
    def names(self) -> tuple[str, str, str]:
        """The framework, device and launch."""
        return self.platform, self.device, self.launch

    def text(self) -> str:
        """Return how many members are served, and a line per member that is not, with its reason."""
        served = sum(state == "served" for state in self.members.values())
        head = f"{' / '.join(self.names)}, {self.world_size} ranks: {served} of {len(self.members)} served"
        rest = [f"  {member}: {state}" for member, state in self.members.items() if state != "served"]
        return "\n".join([head, *rest])

    def write(self, folder: Path) -> Path:
        """Write ``contract-<framework>-<device>-<launch>.json`` into ``folder``."""
        return _write(self, folder / f"contract-{'-'.join(self.names)}.json")


@dataclass(frozen=True)
class Footprint:
    """Memory added by a training step, per activation mode, and by building a model.

    Attributes:
        platform: name of the framework.
        peaks: bytes by mode: ``plain``, ``checkpoint``, ``selective`` (which keeps the matrix products), ``swap``.
        written: time of the run, in UTC.
        building: the measurements of :func:`.footprint.building`.
    """

    platform: str
    peaks: dict[str, int]
    written: str = ""
    building: dict[str, float] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether every mode takes at most its part of plain training, and building stays within its limits."""
        return all(self.holds(mode) for mode in self.peaks if mode != "plain") and not self.excess()

    def excess(self) -> list[str]:
        """Return the limits that building exceeds."""
        if not self.building:
            return []
        of, above = self.building, self.building["filling"] - self.building["shard"]
        limits = {
            f"more than {_SECONDS} s": of["seconds"] > _SECONDS,
            f"growth of more than {_GROWTH >> 20} MiB": of["grown"] > _GROWTH,
            f"more than {_SCRATCH >> 20} MiB in addition to the shard": above > _SCRATCH,
        }
        return [text for text, exceeded in limits.items() if exceeded]

    def built(self) -> str:
        """Return a line about building."""
        of, mib = self.building, float(1 << 20)
        return (
            f"{of['parameters'] / (1 << 30):.1f} GiB of parameters over 8 simulated ranks are laid out in "
            f"{of['seconds']:.2f} s of computing, growing a process by {of['grown'] / mib:.1f} MiB; a shard of "
            f"{of['shard'] / mib:.1f} MiB is filled in {of['filling'] / mib:.1f} MiB"
        )

    def text(self) -> str:
        """Return every mode's part of plain training, and a line about building if it was measured."""
        shares = ", ".join(f"{mode} {share:.2f}{self._over_limit(mode)}" for mode, share in self.shares().items())
        lines = [f"{self.platform} / cpu: activations in memory, of plain: {shares}"]
        if self.building:
            excess = self.excess()
            lines.append(f"{self.platform} / cpu: {self.built()}{' (' + ', '.join(excess) + ')' if excess else ''}")
        return "\n".join(lines)

    def _over_limit(self, mode: str) -> str:
        return "" if mode == "plain" or self.holds(mode) else f" (more than {self.limit(mode):.2f})"

    def holds(self, mode: str) -> bool:
        """Return whether ``mode`` takes at most :meth:`limit` of plain training."""
        return self.peaks[mode] <= self.limit(mode) * self.peaks["plain"]

    @staticmethod
    def limit(mode: str) -> float:
        """Return the part of plain training that ``mode`` may take."""
        return _LIMITS[mode]

    def shares(self) -> dict[str, float]:
        """Return every mode's part of plain training."""
        return {mode: peak / self.peaks["plain"] for mode, peak in self.peaks.items()}

    def write(self, folder: Path) -> Path:
        """Write ``footprint-<framework>.json`` into ``folder``."""
        return _write(self, folder / f"footprint-{self.platform}.json")


def examine(
    platform_name: str,
    world_size: int = 3,
    launch: str = "simulated",
    facets: Sequence[str] = _ALL,
    seed: int = 0,
    device: str = "cpu",
) -> ContractOutcome:
    """Run the checks of ``facets``; a check that fails is part of the result, and the others still run.

    Args:
        platform_name: ``torch`` or ``mindspore``.
        world_size: number of ranks, at least two.
        launch: ``simulated`` or ``processes``.
        facets: names of facets; all by default.
        seed: of the data of all ranks.
        device: ``cpu``, ``cuda`` or ``npu``: where tensors are.
    """
    from hyper_parallel.platform.select import platform_named

    platform = platform_named(platform_name)
    return ContractOutcome(
        platform_name,
        device,
        launch,
        world_size,
        _states(platform_name, world_size, launch, facets, seed, device),
        [{**asdict(gap), "devices": list(gap.devices)} for gap in platform.gaps],
        _now(),
    )


def measure(platform_name: str) -> Footprint:
    """Return the footprint of a framework; see :mod:`.footprint`."""
    from workshop.conformance.footprint import building, footprints

    return Footprint(platform_name, footprints(platform_name), _now(), building(platform_name))


def load(folder: Path) -> tuple[list[ContractOutcome], list[Footprint]]:
    """Return all results in ``folder``.

    Raises:
        ValueError: a file with the name of a result contains something else.
    """
    outcomes = [_read(path, ContractOutcome) for path in sorted(folder.glob("contract-*.json"))]
    return outcomes, [_read(path, Footprint) for path in sorted(folder.glob("footprint-*.json"))]


def _states(
    platform_name: str, world_size: int, launch: str, facets: Sequence[str], seed: int, device: str
) -> dict[str, str]:
    """Return the state of each member; if the facets fail together each is run alone, because an error ends a world."""
    from workshop.conformance.suite import run_contract

    try:
        return run_contract(platform_name, world_size, launch, facets, seed, device)
    except RankFailedError as error:
        if len(facets) == 1:
            return dict.fromkeys(MEMBERS[facets[0]], f"failed: {_reason(error)}")
    states: dict[str, str] = {}
    for facet in facets:
        states.update(_states(platform_name, world_size, launch, [facet], seed, device))
    return states


def _reason(error: RankFailedError) -> str:
    """Return the error of the rank that failed first, in one line."""
    failures: Mapping[int, BaseException] = getattr(error, "failures", {})
    texts = [f"rank {rank}: {type(failure).__name__}: {failure}" for rank, failure in failures.items()]
    return " ".join((texts or [str(error)])[0].split())


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _write(result: ContractOutcome | Footprint, path: Path) -> Path:
    return write_text(path, report_json(asdict(result)) + "\n")


def _read(path: Path, result_type: Any) -> Any:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, Mapping):
            raise TypeError("it is not an object")  # noqa: TRY301 - one message for every wrong content
        result = result_type(**{name: value for name, value in content.items() if name != "header"})
        result.ok  # noqa: B018 - reads the values that a page shows
    except (OSError, ValueError, TypeError, AttributeError, KeyError, ZeroDivisionError) as error:
        msg = f"{path} is not a result of `python ci/workshop contract` ({error}); delete it, or run that again"
        raise ValueError(msg) from error
    return result
