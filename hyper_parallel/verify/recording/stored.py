"""Reads a recording: the files of all ranks in one folder."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyper_parallel._text import shortened
from hyper_parallel.verify.engine.wording import count_words, ranks_words
from hyper_parallel.verify.frameworks.contract.records import Run
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.recording.debug_mode import is_log, logs_in, read_log
from hyper_parallel.verify.recording.file import RankRecording, file_of_rank, read_rank
from hyper_parallel.verify.recording.msprobe import is_dump, read_dump

__all__ = ["Recording", "read_recording"]

_FILE = re.compile(r"rank-(\d+)\.jsonl")


@dataclass
class Recording:
    """A recording.

    Attributes:
        folder: folder of the recording.
        label: ``A`` or ``B``.
        ranks: content of each rank's file, in the order of ranks.
        is_dump: whether this is a dump that msprobe has written.
        is_log: whether this is a log of PyTorch's DebugMode.
    """

    folder: Path
    label: str
    ranks: list[RankRecording]
    is_dump: bool = False
    is_log: bool = False

    @property
    def run(self) -> Run:
        """The recorded run, whose values are fingerprints."""
        return Run([rank.records for rank in self.ranks])

    @property
    def header(self) -> dict[str, Any]:
        """The header of rank 0."""
        return self.ranks[0].header

    @property
    def framework(self) -> str:
        """The framework of the program."""
        return str(self.header.get("framework", "torch")).partition(" ")[0]

    @property
    def words(self) -> str:
        """Description of the recording, with folder, program, framework, hosts and number of ranks."""
        if self.is_dump:
            return f"dump of msprobe {self.folder} of {self.framework}, {count_words('rank', len(self.ranks))}"
        if self.is_log:
            return f"log of DebugMode {self.folder}, {count_words('rank', len(self.ranks))}"
        hosts = sorted({str(rank.header.get("host", "")) for rank in self.ranks})
        command = " ".join(map(str, self.header.get("command", ())))
        of = f" of {command}" if command else ""
        framework, host = self.header.get("framework", "torch"), "host" if len(hosts) == 1 else "hosts"
        ranks = count_words("rank", len(self.ranks))
        return f"recording {self.folder}{of} on {framework}, {host} {shortened(hosts)}, {ranks}"

    @property
    def steps(self) -> set[int]:
        """The steps of which every rank has records."""
        return set.intersection(*(rank.steps for rank in self.ranks))

    def notes(self) -> list[str]:
        """Return sentences about what the recording lacks."""
        found = []
        cut = [rank.records.rank for rank in self.ranks if rank.cut]
        if cut:
            found.append(f"{self.label}: the last record of {ranks_words(cut)} was cut off, and dropped")
        killed = [rank.records.rank for rank in self.ranks if rank.end is None]
        if killed:
            found.append(
                f"{self.label}: {ranks_words(killed)} did not end the recording: killed, or still running; what was "
                "written until then is compared"
            )
        ends = [rank.end for rank in self.ranks if rank.end is not None]
        left = {reason: count for end in ends for reason, count in end.get("left out", {}).items()}
        found += [f"{self.label}: not recorded: {reason}" for reason in left]
        raised = dict.fromkeys(str(end["by"]) for end in ends if end.get("by") != "the end of the block")
        if raised:
            found.append(f"{self.label}: the program ended by {', '.join(raised)}")
        if any(end.get("uncompiled") for end in ends):
            found.append(f"{self.label}: compiled functions ran uncompiled, since their modules were recorded")
        return found


def read_recording(folder: str | Path, label: str) -> Recording:
    """Return the recording in a folder, which may also be a dump of msprobe or have logs of DebugMode.

    Args:
        folder: folder written by :func:`~hyper_parallel.verify.record_run`, ``hyper-parallel record`` or msprobe, or
            with logs of ranks, ``rank-0.log``; or the log of one rank.
        label: ``A`` or ``B``, for messages.

    Raises:
        InputError: (a ValueError) the folder has no recording, or one of a different format or files of several runs;
            or files of ranks are missing or damaged.
    """
    path = Path(folder)
    if is_log(path):
        return Recording(path, label, [read_log(path, label)], is_log=True)
    logs = logs_in(path)
    names = sorted(each.name for each in path.iterdir() if _FILE.fullmatch(each.name))
    dumped = not names and is_dump(path)
    if logs and not names and not dumped:
        ranks = [read_log(logs[rank], label, rank, max(logs) + 1) for rank in sorted(logs)]
        _check_ranks(path, label, ranks, logs[min(logs)].suffix)
        return Recording(path, label, ranks, is_log=True)
    if not names and not dumped:
        msg = (
            f"{label}: {folder} is a folder, but not a recording: it has no file rank-0.jsonl; `hyper-parallel record "
            "-o FOLDER -- torchrun ... train.py` makes a recording; a dump of msprobe has folders such as step0, and "
            "logs of DebugMode are files such as rank-0.log"
        )
        raise InputError(msg)
    ranks = read_dump(path, label) if dumped else [read_rank(path / name, label) for name in names]
    ranks.sort(key=lambda rank: rank.records.rank)
    if not dumped:
        _check_ranks(path, label, ranks)
    empty = [rank.records.rank for rank in ranks if not rank.records.records]
    if empty:
        reasons = [reason for rank in ranks for reason in (rank.end or {}).get("left out", ())] if dumped else []
        why = ", ".join(dict.fromkeys(reasons)) or "the program was killed before it trained"
        msg = f"{label}: {folder} has no record of {ranks_words(empty)}: {why}"
        raise InputError(msg)
    return Recording(path, label, ranks, dumped)


def _check_ranks(folder: Path, label: str, ranks: Sequence[RankRecording], suffix: str = ".jsonl") -> None:
    sizes = {rank.header["world_size"] for rank in ranks}
    if len(sizes) > 1:
        msg = f"{label}: {folder} has files of runs on {' and '.join(map(str, sorted(sizes)))} ranks; keep those of one"
        raise InputError(msg)
    size = sizes.pop()
    numbers = [rank.records.rank for rank in ranks]
    missing = sorted(set(range(size)) - set(numbers))
    if missing or len(numbers) > size or len(set(numbers)) < len(numbers):
        files = [file_of_rank(Path(), rank).with_suffix(suffix).name for rank in missing]
        names = shortened(files) or "other ranks' files"
        msg = (
            f"{label}: {folder} has {len(numbers)} of the files of {size} ranks; missing: {names}; ranks on other "
            "hosts wrote theirs there: copy them into one folder"
        )
        raise InputError(msg)
