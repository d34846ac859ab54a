"""Whether a checkpoint fits a state: all differences of names, shapes, dtypes and ties."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hyper_parallel.core.checkpoint.folder import Entry, Index
    from hyper_parallel.core.checkpoint.names import FolderNames

__all__ = ["Fit"]


class Fit:
    """How the tensors of a state are found in a checkpoint.

    Args:
        named: the state's tensors as they are named in the folder.
        index: of the checkpoint.

    Attributes:
        stored: per tensor of ``named``, the name under which the checkpoint stores it.
        problems: all differences.
    """

    def __init__(self, named: FolderNames, index: Index) -> None:
        self.stored: dict[str, str] = {}
        self.problems = list(named.problems)
        self._saved, self._ties = index.entries, index.ties
        aliases: dict[str, list[str]] = {}
        for alias, name in named.ties.items():
            aliases.setdefault(name, []).append(alias)
        for name in named.entries:
            self._find(name, aliases.get(name, []))
        self.problems += self._only_saved(named)
        for name, entry in named.entries.items():
            self._compare(name, entry)

    def _find(self, name: str, aliases: list[str]) -> None:
        places = {path: self._ties.get(path, path) for path in [name, *aliases]}
        present = {path: place for path, place in places.items() if place in self._saved}
        if not present:
            self.problems.append(f"{name} is not in the checkpoint")
        elif len(set(present.values())) > 1:
            self.problems.append(f"{', '.join(present)} are tied in the state, and not in the checkpoint")
        else:
            self.stored[name] = next(iter(present.values()))

    def _only_saved(self, named: FolderNames) -> list[str]:
        users: dict[str, list[str]] = {}
        for name, place in self.stored.items():
            users.setdefault(place, []).append(name)
        known = {*self.stored.values(), *named.entries, *named.ties}
        return [
            *[f"{name} is only in the checkpoint" for name in [*self._saved, *self._ties] if name not in known],
            *[
                f"{', '.join(names)} are tied in the checkpoint, and not in the state"
                for names in users.values()
                if names[1:]
            ],
        ]

    def _compare(self, name: str, entry: Entry) -> None:
        saved = self._saved.get(self.stored.get(name, ""))
        if saved is not None and saved != entry:
            facts = f"{entry.code}{list(entry.shape)}, saved as {saved.code}{list(saved.shape)}"
            self.problems.append(f"{name} is {facts}")
