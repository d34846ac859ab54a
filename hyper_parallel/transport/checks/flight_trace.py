"""Reads the flight records of a world: each rank's last call, the first difference, and a trace for Perfetto."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyper_parallel._text import first_line, printable, ranked

__all__ = ["Flight", "read_flight"]

_NEEDED = {
    "rank": int, "world_size": int, "written": (int, float), "error": (str, type(None)), "doing": str, "calls": list,
}  # fmt: skip
_NEEDED_IN_CALL = {
    "number": int, "sequence": int, "state": str, "started": (int, float), "ended": (int, float, type(None)),
    "site": str, "facts": dict, "kind": str, "operation": str, "ranks": list, "group": str, "text": str,
}  # fmt: skip
_MICROSECONDS = 1e6
_WIDTH = 60
_DIGITS = 20
_LARGEST = 1 << 20  # ranks of a world
_JSON_KINDS = {list: "an array", str: "a string", int: "a number", float: "a number", bool: "a boolean"}

_Key = tuple[tuple[int, ...], str, int]


@dataclass(frozen=True)
class Flight:
    """The records of one world.

    Attributes:
        world_size: number of its ranks.
        records: the record of each rank that left one.
    """

    world_size: int
    records: dict[int, dict[str, Any]]

    def text(self) -> str:
        """The table: ranks that raised, each rank's last call, the first differing call, and the others' activity."""
        lines = [f"{self.world_size} ranks"]
        lines += [f"raised: rank {rank}: {first_line(error)}" for rank, error in self.raised().items()]
        missing = [rank for rank in range(self.world_size) if rank not in self.records]
        lines += [f"no record of {ranked(missing)}"] if missing else []
        difference = self.difference()
        lines += [difference] if difference else []
        lines += [f"  rank {rank}: {self._where(rank)}" for rank in sorted(self.records)]
        for rank, record in sorted(self.records.items()):
            lines += [f"--- rank {rank}: {record['doing'].rstrip()}"] if record["doing"] else []
        return printable("\n".join(lines), keep="\n\t")

    def raised(self) -> dict[int, str]:
        """Per rank that raised or died, the error."""
        return {rank: record["error"] for rank, record in sorted(self.records.items()) if record["error"]}

    def _where(self, rank: int) -> str:
        calls = self.records[rank]["calls"]
        if not calls:
            return "no calls"
        last = calls[-1]
        return f"call {last['number']}, {last['state']}: {last['text']} at {last['site']}"

    def difference(self) -> str | None:
        """The first collective that members call differently, or that some never called while others wait in it."""
        by_key: dict[_Key, dict[int, dict[str, Any]]] = {}
        for rank, record in sorted(self.records.items()):
            for call in record["calls"]:
                if call["kind"] == "collective":
                    key = (tuple(call["ranks"]), call["group"], call["sequence"])
                    by_key.setdefault(key, {})[rank] = call
        for key, calls in sorted(by_key.items(), key=lambda item: min(call["started"] for call in item[1].values())):
            absent = [rank for rank in key[0] if rank not in calls and not self._forgot(rank, key)]
            if absent or len({(call["operation"], json.dumps(call["facts"])) for call in calls.values()}) > 1:
                return _described(key, calls, absent)
        return None

    def _forgot(self, rank: int, key: _Key) -> bool:
        """Whether the record of ``rank`` is missing, or begins after that collective."""
        record = self.records.get(rank)
        if record is None:
            return True
        here = [call["sequence"] for call in record["calls"] if (tuple(call["ranks"]), call["group"]) == key[:2]]
        begins = record["calls"][0]["number"] if record["calls"] else 0
        return begins > 0 and (not here or min(here) > key[2])

    def chrome(self) -> dict[str, Any]:
        """The calls as Chrome's trace format, which Perfetto reads: a process per rank, one bar per call."""
        events: list[dict[str, Any]] = []
        for rank, record in sorted(self.records.items()):
            events.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}})
            for call in record["calls"]:
                end = record["written"] if call["ended"] is None else call["ended"]
                shown = {
                    "state": call["state"],
                    "site": call["site"],
                    "sequence": call["sequence"],
                    "text": call["text"],
                }
                times = {"ts": call["started"] * _MICROSECONDS, "dur": max(0.0, end - call["started"]) * _MICROSECONDS}
                bar = {"ph": "X", "name": call["operation"], "cat": call["kind"], "pid": rank, "tid": 0}
                events.append(bar | times | {"args": {**call["facts"], **shown}})
            if record["error"]:
                when = {"ph": "i", "s": "p", "pid": rank, "tid": 0, "ts": record["written"] * _MICROSECONDS}
                events.append(
                    {**when, "name": first_line(record["error"])[:_WIDTH], "args": {"error": record["error"]}}
                )
        return {"traceEvents": events, "displayTimeUnit": "ms"}


def read_flight(folder: Path) -> Flight:
    """Read the records in a folder.

    Args:
        folder: named by ``HP_FLIGHT_FOLDER`` when the world ran.

    Raises:
        ValueError: there are no records, a file is not a record, or the records belong to different worlds.
    """
    if not folder.is_dir():
        problem = "is not a folder" if folder.exists() else "does not exist"
        msg = f"{folder} {problem}; name the folder that HP_FLIGHT_FOLDER named during the run"
        raise ValueError(msg)
    records: dict[int, dict[str, Any]] = {}
    for path in sorted(folder.glob("rank-*.json")):
        record = _read(path)
        if path.name != f"rank-{record['rank']}.json":
            msg = f"{path} is not a flight record: it has the record of rank {record['rank']}"
            raise ValueError(msg)
        records[record["rank"]] = record
    if not records:
        msg = (
            f"{folder} has no flight record (rank-*.json): set HP_FLIGHT_FOLDER to this folder and run the ranks again"
        )
        raise ValueError(msg)
    sizes = {record["world_size"] for record in records.values()}
    if len(sizes) > 1 or max(records) >= max(sizes) or min(records) < 0:
        msg = f"{folder} has records of ranks {sorted(records)} of worlds of {sorted(sizes)} ranks; empty it"
        raise ValueError(msg)
    return Flight(sizes.pop(), records)


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():  # reading a pipe would block
        msg = f"{path} is not a flight record: it is not a regular file"
        raise ValueError(msg)
    try:
        text = path.read_text(encoding="utf-8")
        record = json.loads(text, parse_constant=_refuse, parse_float=_finite, parse_int=_small)
    except (OSError, ValueError, RecursionError) as error:
        msg = f"{path} is not a flight record: {error}"
        raise ValueError(msg) from error
    problem = _problem(record, _NEEDED)
    calls = [] if problem else record["calls"]
    problem = problem or next(filter(None, (_problem(call, _NEEDED_IN_CALL) for call in calls)), None)
    if problem is None and not all(type(rank) is int for call in calls for rank in call["ranks"]):
        problem = "a call whose ranks are not numbers"
    if problem is None and record["world_size"] > _LARGEST:
        problem = f"a world of more than {_LARGEST} ranks"
    if problem:
        msg = f"{path} is not a flight record: it has {problem}; it is damaged, or another version wrote it"
        raise ValueError(msg)
    plain: dict[str, Any] = record
    return plain


def _problem(content: object, needed: dict[str, Any]) -> str | None:
    if not isinstance(content, dict):
        return f"{_JSON_KINDS.get(type(content), 'null')} instead of an object"
    wrong = [
        name
        for name, kind in needed.items()
        if not isinstance(content.get(name, ...), kind) or isinstance(content[name], bool)
    ]
    return f"no {', '.join(wrong)}" if wrong else None


def _refuse(name: str) -> float:
    """Reject NaN and infinities, which JSON does not have and readers of the trace do not accept."""
    msg = f"{name} is not a number"
    raise ValueError(msg)


def _finite(text: str) -> float:
    """Parse a number; reject one that overflows to infinity."""
    value = float(text)
    return value if math.isfinite(value) else _refuse(text)


def _small(text: str) -> int:
    """Parse an integer; reject one with more digits than a time or a rank can have."""
    return int(text) if len(text) <= _DIGITS else int(_refuse(text[:_DIGITS] + "..."))


def _described(key: _Key, calls: dict[int, dict[str, Any]], absent: list[int]) -> str:
    ranks, group, sequence = key
    named = f" in group {group}" if group else ""
    ranks_of: dict[str, list[int]] = {}
    for rank, call in calls.items():
        ranks_of.setdefault(f"{call['text']} at {call['site']}", []).append(rank)
    lines = [f"first difference: collective {sequence} of ranks {ranks}{named}"]
    lines += [f"  {ranked(members)} called {text}" for text, members in ranks_of.items()]
    lines += [f"  {ranked(absent)} never called it"] if absent else []
    return "\n".join(lines)
