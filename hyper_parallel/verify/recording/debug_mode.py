"""Reads a log of PyTorch's DebugMode as a recording: inputs and outputs of operators, by the hashes of their tensors.

A log is the text that ``DebugMode.debug_string()`` returns after a run inside ``DebugMode.log_tensor_hashes()``. Each
call has a line with shapes and ``# {'hash': ...}``; a module has a line above its calls, which are indented::

    [nn.Mod] GPT.head
      aten::mm(t: f32[4, 8], t: f32[8, 3])  ->  t: f32[4, 3]  # {'input_hash': ((9.1, 4.2), {}), 'hash': 3.9}

Each tensor becomes a record of the kind ``call`` with one or two numbers. The hash ``norm`` is the sum of magnitudes in
float64. Divided by the square root of the number of elements, it is at most the 2-norm, and for two tensors it differs
by at most the 2-norm of their difference. So it is used in place of the 2-norm. The hash ``hash_tensor`` is a 64-bit
hash of the elements' bits, which is stored as two numbers.
"""

from __future__ import annotations

import ast
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hyper_parallel.verify.frameworks.contract.fingerprint import CHOSEN, NORM, NUMBERS, Fingerprint
from hyper_parallel.verify.frameworks.contract.records import RankRecords, Record
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.recording.file import RankRecording

__all__ = ["is_log", "logs_in", "read_log"]

_FILE = re.compile(r"rank-(\d+)\.(?:log|txt)")
_CALL = re.compile(r"([\w.:]+)\((.*?)\)(?:  ->  (.*?))?(?:  # (\{.*\}))?")
_KERNEL = re.compile(r"\[triton\] ([\w.]+)\((.*)\)")
_HASHES = re.compile(r"# (pre|post)-kernel hashes: \{(.*)\}")
_SCOPE = re.compile(r"\[(nn\.Mod|record function|annotate|[^\]]*\(compile[^\]]*\))[^\]]*\] (.+)")
_SITE = re.compile(r"# File: (.+):(\d+) in ")
_PLACED = re.compile(r"redistribute_input( \[\w+\] )?\(|-> output: ")
_TENSOR = re.compile(r"\b[df]?t(?:\$\d+)?: (\w+)\[([\d, ]*)\]")
_NOT_FINITE = re.compile(r"\b(?:nan|inf)\b")
_DTYPES = {"f": "float", "bf": "bfloat", "i": "int", "u": "uint", "c": "complex", "b": "bool"}
_OPTIMIZER = "Optimizer.step#"
_NO_NUMBER = "tensors whose hash is neither a number nor several"


def is_log(path: Path) -> bool:
    """Return whether a path may be a log of DebugMode: a file with suffix ``.log`` or ``.txt``."""
    return path.suffix in (".log", ".txt") and path.is_file()


def logs_in(folder: Path) -> dict[int, Path]:
    """Return the logs in a folder, such as ``rank-0.log``, by rank."""
    return {int(name[1]): each for each in folder.iterdir() if (name := _FILE.fullmatch(each.name))}


def read_log(path: Path, label: str, rank: int = 0, size: int = 1) -> RankRecording:
    """Return the content of a rank's log as a recording.

    Args:
        path: path of the log.
        label: ``A`` or ``B``, for messages.
        rank: the rank of the log.
        size: number of ranks.

    Raises:
        InputError: (a ValueError) the file is not a log of DebugMode, or has no hash.
    """
    log = _Log()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        lines = ["(bytes that are not text)"]
    for number, line in enumerate(lines, 1):
        if not log.take(line):
            msg = (
                f"{label}: {path}, line {number}, is not from a log of DebugMode: {line.strip()[:60]!r}; write what "
                "debug_mode.debug_string() returns to the file, and nothing else"
            )
            raise InputError(msg)
    if not log.records:
        msg = (
            f"{label}: {path} is a log of DebugMode without hashes of tensors, so there is nothing to compare; run the "
            "program inside of `with DebugMode() as debug_mode, DebugMode.log_tensor_hashes(hash_inputs=True):`"
        )
        raise InputError(msg)
    header = {"rank": rank, "world_size": size, "framework": "torch"}
    end = {"by": "the end of the block", "left out": dict(log.left_out)}
    return RankRecording(header, RankRecords(rank, log.records), end, steps={record.step for record in log.records})


@dataclass
class _Log:
    """The state of reading a log line by line.

    Attributes:
        records: records of the tensors so far.
        left_out: number of skipped tensors, by reason.
        step: number of optimizer steps that have started.
    """

    records: list[Record] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    step: int = 0
    _calls: Counter[tuple[str, int]] = field(default_factory=Counter)
    _modules: list[tuple[int, str]] = field(default_factory=list)
    _site: str = ""
    _kernel: tuple[str, str] = ("", "")

    def take(self, line: str) -> bool:
        """Read a line; return whether the line belongs to a log of DebugMode."""
        text = line.strip()
        indent = len(line) - len(line.lstrip())
        if not text:
            return True
        if site := _SITE.match(text):
            self._site = f"{Path(site[1]).name}:{site[2]}"
            return True
        if hashes := _HASHES.fullmatch(text):
            self._kernel_ran("" if hashes[1] == "pre" else ", after it", hashes[2])
            return True
        while self._modules and self._modules[-1][0] >= indent:
            self._modules.pop()
        scope, kernel, call = (form.fullmatch(text) for form in (_SCOPE, _KERNEL, _CALL))
        if scope:
            self._modules += [(indent, scope[2])] if scope[1].startswith("nn.Mod") else []
            self.step += scope[2].startswith(_OPTIMIZER)
        elif kernel:
            self._kernel = kernel[1], kernel[2]
        elif call and call[4] is not None:
            self._call(*call.groups())
        return any((scope, kernel, call, _PLACED.match(text)))

    def _call(self, name: str, args: str, results: str | None, text: str) -> None:
        """Add records of the tensors of a call, as far as the log has hashes of them."""
        for key, what, tensors in (("input_hash", "argument {} of ", args), ("hash", "result{} of ", results or "")):
            found = re.search(rf"'{key}': (.+?)(?:, '\w+': |\}}$)", text)
            if found:
                self._add(f"{what}{name}", list(_tensors(tensors)), found[1])

    def _kernel_ran(self, when: str, text: str) -> None:
        """Add records of the tensors of a Triton kernel, before or after the kernel ran."""
        for name, _, number in (each.partition(": ") for each in re.split(r", (?=\w+: )", text)):
            tensor = next(_tensors(self._kernel[1].partition(f"{name}=")[2]), ("float64", ()))
            self._add(f"argument {name} of {self._kernel[0]}{when}", [tensor], number)

    def _add(self, name: str, tensors: Sequence[tuple[str, tuple[int, ...]]], text: str) -> None:
        """Add one record for each tensor.

        Args:
            name: name of the records, with a placeholder for the number of each tensor.
            tensors: dtypes and shapes; empty if the log has none.
            text: text of the hashes.
        """
        try:
            numbers = list(_leaves(ast.literal_eval(_NOT_FINITE.sub(r"'\g<0>'", text))))
        except (ValueError, SyntaxError):
            numbers = []
        if not numbers and text == "None":  # a call without output tensors
            return
        count = sum(isinstance(number, float) for number in numbers) or len(numbers)  # one norm for each tensor
        known = tensors or [("float64", ())] * count
        each, rest = divmod(len(numbers), max(len(known), 1))
        if rest or not each:
            self.left_out[_NO_NUMBER] += 1
            return
        module = self._modules[-1][1] if self._modules else ""
        for place, (dtype, shape) in enumerate(known):
            number = place if name.startswith("argument") else f" {place}" if len(known) > 1 else ""
            own = f"{name.format(number)} in {module}" if module else name.format(number)
            value = _fingerprint(numbers[place * each : (place + 1) * each], dtype, shape)
            call = self._calls[own, self.step]
            self._calls[own, self.step] += 1
            self.records.append(Record("call", own, module, self.step, call, value, None, self._site))


def _tensors(text: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the dtypes and shapes of the tensors in the text of arguments or results."""
    for found in _TENSOR.finditer(text):
        kind, bits = re.fullmatch(r"([a-z]+)(.*)", found[1]).groups()  # type: ignore[union-attr] # \w+ of dtypes
        dtype = "bool" if kind == "b" else _DTYPES.get(kind, kind) + bits
        yield dtype, tuple(int(size) for size in found[2].split(",") if size.strip())


def _leaves(tree: Any) -> Iterator[int | float]:
    """Yield the numbers of nested lists, tuples and dicts; nothing for None."""
    if isinstance(tree, (list, tuple, dict)):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from _leaves(item)
    elif tree is not None:
        yield tree if isinstance(tree, int) else float(tree)


def _fingerprint(numbers: Sequence[int | float], dtype: str, shape: tuple[int, ...]) -> Fingerprint:
    found, known = np.zeros(len(NUMBERS)), []
    for number in numbers:
        if isinstance(number, float):
            found[NORM] = number / math.sqrt(max(math.prod(shape), 1))
            known.append(NORM)
        else:
            found[CHOSEN.start : CHOSEN.start + 2] = divmod(number % (1 << 64), 1 << 32)
            known += [CHOSEN.start, CHOSEN.start + 1]
    return Fingerprint(found, shape, dtype, known=tuple(sorted(set(known))))
