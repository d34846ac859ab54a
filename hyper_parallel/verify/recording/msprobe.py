"""Reads a dump of Ascend's msprobe as a recording: inputs, outputs and gradients of modules and functions.

A dump consists of files such as ``step0/rank0/dump.json``, or ``step0/proc123/dump.json`` if the process joined no
process group. Under ``data`` it has, in the order of execution, ``Module.PATH.CLASS.forward.CALL`` (``Cell`` in
MindSpore) and ``Functional.linear.CALL.forward``, each with its tensors. A tensor has dtype, shape, ``Max``, ``Min``,
``Mean`` and ``Norm``, and in dumps of the task ``tensor`` the name of a file with the elements.

| in the dump | record |
|---|---|
| ``output`` of a module's forward | output of the module |
| ``parameters`` of a module's forward, ``parameters_grad`` | weight before the step, gradient |
| arguments, and results of functions | value, but the first argument in a step is the step's input |
| ``input`` and ``output`` of backward | gradients of outputs and of inputs |

Calls of a function are counted per calling module (``construct.json``), so additional calls in other modules do not
shift the call numbers.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hyper_parallel._text import shortened
from hyper_parallel.platform.select import get_torch_platform
from hyper_parallel.verify.engine.wording import ranks_words
from hyper_parallel.verify.frameworks import harness_of
from hyper_parallel.verify.frameworks.contract.fingerprint import (
    LARGEST,
    LEAST,
    NORM,
    NOT_FINITE,
    NUMBERS,
    SUM,
    Fingerprint,
    fingerprint_of,
)
from hyper_parallel.verify.frameworks.contract.records import Pending, RankRecords, Record, Region
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.recording.file import RankRecording

__all__ = ["is_dump", "read_dump"]

_STEP = re.compile(r"step(\d+)")
_RANK = re.compile(r"rank(\d*)|proc\d+")
_MODULE = re.compile(r"(?:Module|Cell)\.(.+)\.[^.]+\.(forward|backward|parameters_grad)(?:\.(\d+))?")
_FUNCTION = re.compile(r"(.+)\.\d+\.(forward|backward)")
_WRAPPERS = re.compile(r"^(?:module\.)+|\b(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_FRAMEWORKS = {"pytorch": "torch", "mindspore": "mindspore"}
_TASKS = ("statistics", "tensor")
_SITE = re.compile(r"File (.+), line (\d+), in ")
_STATISTICS = ("Max", "Min", "Mean", "Norm")
_NO_STATISTICS = "values of which the dump has no statistics, such as checksums alone, float8 or complex numbers"


def is_dump(folder: Path) -> bool:
    """Return whether a folder has subfolders named like those of steps, as a dump has."""
    return any(_STEP.fullmatch(each.name) and each.is_dir() for each in folder.iterdir())


def read_dump(folder: Path, label: str) -> list[RankRecording]:
    """Return the dump of each rank as a recording.

    Args:
        folder: folder that contains the folders of steps.
        label: ``A`` or ``B``, for messages.

    Raises:
        InputError: (a ValueError) ranks of a step are missing, a file is damaged, or the dump is of an unknown kind.
    """
    found = [(int(name[1]), each) for each in folder.iterdir() if (name := _STEP.fullmatch(each.name))]
    steps = {step: _ranks(path, label) for step, path in sorted(found)}
    ranks = sorted({rank for own in steps.values() for rank in own})
    for step, own in steps.items():
        missing = sorted(set(range(ranks[-1] + 1)) - set(own))
        if missing:
            msg = (
                f"{label}: {folder} has no dump of {ranks_words(missing)} in step{step}; all ranks must dump the same "
                "steps; copy what other hosts wrote into this folder"
            )
            raise InputError(msg)
    return [_rank(rank, {step: own[rank] for step, own in steps.items()}, len(ranks), label) for rank in ranks]


def _ranks(folder: Path, label: str) -> dict[int, Path]:
    """Return the folders of all ranks in a step, by rank."""
    found = {each: name for each in folder.iterdir() if (name := _RANK.fullmatch(each.name)) and each.is_dir()}
    own = {int(name[1] or 0): each for each, name in found.items()}
    if not own:
        msg = f"{label}: {folder} has no folder of a rank, such as {folder.name}/rank0, so it is not a dump of msprobe"
        raise InputError(msg)
    if len(own) < len(found):
        names = shortened(sorted(each.name for each in found))
        msg = (
            f"{label}: {folder} has several folders for one rank: {names}; processes that joined no world have no "
            "numbers: keep the folder of one run"
        )
        raise InputError(msg)
    return own


def _rank(rank: int, folders: Mapping[int, Path], size: int, label: str) -> RankRecording:
    left_out: Counter[str] = Counter()
    calls: Counter[tuple[str, str, int]] = Counter()
    records: list[Record] = []
    header: dict[str, Any] = {}
    for step, folder in folders.items():
        dump = _Dump(folder, label, step, step == 0 or step - 1 in folders, left_out)
        header = {"rank": rank, "world_size": size, "framework": dump.framework}
        for record in dump.records():
            records.append(replace(record, call=calls[record.key[:3]]))
            calls[record.key[:3]] += 1
    end = {"by": "the end of the block", "left out": dict(left_out)}
    return RankRecording(header, RankRecords(rank, records), end, steps=set(folders))


@dataclass
class _Dump:
    """The dump of a rank in a step.

    Attributes:
        folder: folder of ``dump.json``.
        label: ``A`` or ``B``.
        step: number of the step.
        follows: whether the previous step was dumped or does not exist, so that weights can be recorded as those after
            it.
        left_out: number of skipped values, by reason.
    """

    folder: Path
    label: str
    step: int
    follows: bool
    left_out: Counter[str]

    def __post_init__(self) -> None:
        path = self.folder / "dump.json"
        if not path.is_file():
            msg = f"{self.label}: {self.folder} has no dump.json; levels L0, L1 and mix of msprobe write it"
            raise InputError(msg)
        found = self._json(path)
        task, framework, data = (found.get(name) for name in ("task", "framework", "data"))
        if task not in _TASKS or framework not in _FRAMEWORKS or not isinstance(data, dict):
            msg = (
                f"{self.label}: {path} is a dump of an unknown format: task {task!r}, framework {framework!r}, level "
                f"{found.get('level')!r}; dumps of the tasks {' and '.join(_TASKS)} of pytorch and mindspore are read"
            )
            raise InputError(msg)
        self.framework, self._data = _FRAMEWORKS[framework], data
        construct, stack = (self._json(self.folder / name) for name in ("construct.json", "stack.json"))
        self._parents = {name: parent[0] if isinstance(parent, list) else parent for name, parent in construct.items()}
        try:
            self._sites = {name: _site(lines) for names, lines in stack.values() for name in names}
        except (AttributeError, TypeError, ValueError):
            msg = f"{self.label}: {self.folder / 'stack.json'} is damaged: msprobe did not write it; delete it"
            raise InputError(msg) from None

    def _json(self, path: Path) -> dict[str, Any]:
        """Return the content of a file; empty if msprobe was configured not to write it."""
        try:
            found = json.loads(path.read_bytes()) if path.is_file() else {}
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            msg = (
                f"{self.label}: {path} is damaged: it is not a JSON object; the run was killed, or the copy is "
                "incomplete"
            )
            raise InputError(msg)
        return found

    def records(self) -> Iterator[Record]:
        """Yield the records of the step in the order of execution, but weights before all other values."""
        found = [record for name, entry in self._data.items() for record in self._entry(name, entry)]
        first = next((each for each in found if each.kind == "value" and each.name.startswith("input ")), None)
        found.sort(key=lambda each: each.kind != "weight" and not each.name.startswith("parameter "))
        for each in found:
            yield replace(each, kind="input", name=each.name.partition(" of ")[2]) if each is first else each

    def _entry(self, name: str, entry: Mapping[str, Any]) -> list[Record]:
        try:
            return list(self._records(name, entry))
        except InputError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError):
            path = self.folder / "dump.json"
            msg = f"{self.label}: {path} is damaged: its entry {name} is not a record of tensors"
            raise InputError(msg) from None

    def _records(self, name: str, entry: Mapping[str, Any]) -> Iterator[Record]:
        module, function = _MODULE.fullmatch(name), _FUNCTION.fullmatch(name)
        forward = f"{name.removesuffix('.backward')}.forward" if name.endswith(".backward") else name
        caller = module or _MODULE.fullmatch(self._parents.get(forward) or "")
        path = _WRAPPERS.sub("", caller[1]) if caller else ""
        if module:
            what, label = module[2], path
        elif function:
            what, label = function[2], f"{function[1]} in {path}" if path else function[1]
        else:
            self.left_out["entries whose names are neither modules nor functions"] += 1
            return
        for kind, own, tensor in self._tensors(what, "output" if module else "value", label, entry):
            if kind == "weight" and module and module[3] not in (None, "0"):
                continue  # later calls have the same weights
            words = (kind, own, path, self.step)
            if kind == "weight":
                words = (
                    (kind, own, path, self.step - 1) if self.follows else ("value", f"parameter {own}", path, self.step)
                )
            value = self._fingerprint(tensor)
            if value is None:
                self.left_out[_NO_STATISTICS] += 1
            else:
                yield Record(*words, 0, value, _pending(tensor, value.shape), self._sites.get(name, ""))

    def _tensors(
        self, what: str, result: str, label: str, entry: Mapping[str, Any]
    ) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
        """Yield kind, name and description of each tensor of an entry."""
        if what == "parameters_grad":
            for name, tree in entry.items():
                yield from (("gradient", f"{label}.{name}", tensor) for _, tensor in _leaves("", tree))
            return
        if what == "backward":
            for which, of in (("input", "output"), ("output", "input")):  # the inputs are gradients of outputs
                for place, tensor in _leaves("", entry.get(which) or []):
                    yield "gradient", f"{of} {place} of {label}", tensor
            return
        for name, tensor in entry.get("parameters", {}).items():
            yield from (("weight", f"{label}.{name}", each) for _, each in _leaves("", tensor))
        for which in ("input_args", "input_kwargs"):
            for place, tensor in _leaves("", entry.get(which) or []):
                yield "value", f"input {place} of {label}", tensor
        results = entry.get("output") or []
        for place, tensor in _leaves("", results):
            yield result, label if len(results) == 1 and place == "0" else f"{label}[{place}]", tensor

    def _fingerprint(self, tensor: Mapping[str, Any]) -> Fingerprint | None:
        """Return the fingerprint of a tensor from its numbers in the dump; None if the dump has no numbers of it."""
        shape, dtype = tuple(int(size) for size in tensor["shape"]), str(tensor["dtype"]).rpartition(".")[2].lower()
        given = {name: float(tensor[name]) for name in _STATISTICS if tensor.get(name) is not None}
        size = int(np.prod(shape, dtype=np.int64))
        whole = self._elements(tensor.get("data_name"), shape)
        if whole is None and (not size or (size == 1 and "Max" in given)) and not dtype.startswith("complex"):
            whole = np.full(shape, given.get("Max", 0.0))
        if whole is not None:
            return replace(fingerprint_of(whole, dtype), whole=whole)
        numbers = np.full(len(NUMBERS), np.nan)
        if not dtype.startswith("complex"):  # complex tensors have statistics of magnitudes
            numbers[LEAST], numbers[LARGEST] = given.get("Min", np.nan), given.get("Max", np.nan)
            numbers[NOT_FINITE] = 0 if np.isfinite(numbers[[LEAST, LARGEST]]).all() else np.nan
        if dtype.startswith(("float", "bfloat")):  # frameworks sum integers in float32
            # the norm of finite numbers may overflow in half precision
            numbers[NORM] = given["Norm"] if np.isfinite(given.get("Norm", np.nan)) else np.nan
            numbers[SUM] = size * given["Mean"] if np.isfinite(given.get("Mean", np.nan)) else np.nan
        known = {place for place in (NORM, SUM, NOT_FINITE) if not np.isnan(numbers[place])}
        known |= {LEAST, LARGEST} if "Max" in given and "Min" in given and not dtype.startswith("complex") else set()
        return Fingerprint(numbers, shape, dtype, known=tuple(sorted(known))) if known else None

    def _elements(self, name: str | None, shape: tuple[int, ...]) -> Any | None:
        """Return the elements of a tensor from the file ``name``; None if there is no such file."""
        path = self.folder / "dump_tensor_data" / Path(name or "none").name
        if not name or not path.is_file():
            if name:
                self.left_out["elements of tensors whose files are missing"] += 1
            return None
        try:
            # by default, numpy.load refuses objects
            array = np.load(path) if path.suffix == ".npy" else harness_of(get_torch_platform()).saved_array(path)
        except (ValueError, EOFError, OSError) as error:
            msg = f"{self.label}: {path} is not a complete file of one tensor; nothing of it was executed"
            raise InputError(msg) from error
        if array.shape != shape:
            msg = f"{self.label}: {path} has the shape {list(array.shape)}, and dump.json says {list(shape)}"
            raise InputError(msg)
        return array.astype(np.float32) if array.dtype == np.float16 else array


def _leaves(place: str, tree: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the tensors of nested arguments or results, each with its position, such as ``0`` or ``0.mask``."""
    if isinstance(tree, dict) and "dtype" in tree and "shape" in tree:
        yield place, tree
    elif isinstance(tree, (dict, list)):
        for key, item in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _leaves(f"{place}.{key}" if place else str(key), item)


def _pending(tensor: Mapping[str, Any], shape: tuple[int, ...]) -> Region | None:
    """Return a region with the pending reduction of a Partial DTensor; None for other tensors."""
    partial = [each["Partial"]["reduce_op"] for each in tensor.get("placements", ()) if "Partial" in each]
    return Region(shape, (0,) * len(shape), (Pending(str(partial[0]), ()),)) if partial else None


def _site(lines: Any) -> str:
    """Return ``file:line`` of the innermost stack frame outside installed packages; empty if there is none."""
    found = (_SITE.match(line) for line in lines if "site-packages" not in line.partition(", line ")[0])
    return next((f"{Path(line[1]).name}:{line[2]}" for line in found if line), "")
