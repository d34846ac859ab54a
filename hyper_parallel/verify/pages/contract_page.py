"""The page of the contract: member by framework, device and transport; memory figures; gap ledgers."""

from __future__ import annotations

from collections.abc import Sequence

from hyper_parallel.platform.contract.inventory import MEMBERS
from hyper_parallel.verify import pages
from hyper_parallel.verify.contract.results import ContractOutcome, Footprint

__all__ = ["page", "summary"]

_KINDS = {"served": "good", "gap": "warn", "failed": "bad", "not run": "quiet"}
_MIB = 1 << 20
_MEMORY = (
    "Memory that one training step adds to a process on CPU: a transformer of 12 layers; selective keeps the matrix "
    "products"
)
_INTRODUCTION = (
    "<p>Every member with its documented errors, checked on every rank. A gap stands in the framework's ledger; the "
    "run fails when a listed gap works and when an unlisted one appears.</p>"
)


def summary(outcome: ContractOutcome) -> str:
    """How many members are served; a line per member that is not, with its reason."""
    served = sum(found == "served" for found in outcome.members.values())
    rest = [f"  {member}: {found}" for member, found in outcome.members.items() if found != "served"]
    head = f"{' / '.join(outcome.names)}, {outcome.world_size} ranks: {served} of {len(outcome.members)} served"
    return "\n".join([head, *rest])


def page(outcomes: Sequence[ContractOutcome], footprints: Sequence[Footprint]) -> str:
    """The whole page."""
    body = [_INTRODUCTION, _matrix(outcomes), _runs(outcomes), _memory(footprints), _ledgers(outcomes)]
    return pages.page("Platform contract", "\n".join(map(str, body)), footer="hyper-parallel verify contract --memory")


def _matrix(outcomes: Sequence[ContractOutcome]) -> pages.Html:
    heads: list[pages.Column | str] = [
        "member",
        pages.Column("facet", choice=True),
        *(pages.Column(" / ".join(one.names), choice=True) for one in outcomes),
    ]
    rows: list[list[pages.Value]] = [
        [
            pages.Html(f"<code>{member}</code>"),
            facet,
            *(_state(one.members.get(member, "not run")) for one in outcomes),
        ]
        for facet, members in MEMBERS.items()
        for member in members
    ]
    text = "What a platform must offer, and which framework offers it on which device and transport"
    return pages.table(text, heads, rows, search=True, tall=True)


def _state(found: str) -> pages.Cell:
    kind = found.partition(":")[0]
    return pages.Cell(found, key=kind, kind=_KINDS.get(kind, "bad"))


def _runs(outcomes: Sequence[ContractOutcome]) -> pages.Html:
    rows: list[list[pages.Value]] = [
        [" / ".join(one.names), one.world_size, sum(found == "served" for found in one.members.values()),
         sum(found.startswith("gap:") for found in one.members.values()), len(one.failures()), one.written]
        for one in outcomes
    ]  # fmt: skip
    numbers = [pages.Column(name, number=True) for name in ("ranks", "served", "gaps", "failed")]
    return pages.table("The runs", ["run", *numbers, "written"], rows, empty="not run")


def _memory(footprints: Sequence[Footprint]) -> pages.Html:
    rows: list[list[pages.Value]] = [
        [f"{one.platform}, {mode}", f"{one.peaks[mode] / _MIB:.1f}", f"{share:.2f}", _held(one, mode), one.written]
        for one in footprints
        for mode, share in one.shares().items()
    ]
    numbers = [pages.Column(name, number=True) for name in ("MiB", "of plain")]
    shown = pages.table(_MEMORY, ["activations", *numbers, "as little as it must", "written"], rows, empty="not run")
    return pages.Html(f"{shown}\n{_building(footprints)}")


def _building(footprints: Sequence[Footprint]) -> pages.Html:
    rows: list[list[pages.Value]] = [[one.platform, one.built(), _fits(one)] for one in footprints if one.building]
    return pages.table("Building without storage", ["framework", "measured", "holds"], rows, empty="not run")


def _fits(one: Footprint) -> pages.Cell:
    excess = one.excess()
    return pages.Cell(f"failed: {', '.join(excess)}", kind="bad") if excess else pages.Cell("yes", kind="good")


def _held(one: Footprint, mode: str) -> pages.Value:
    if mode == "plain":
        return ""
    if one.holds(mode):
        return pages.Cell(f"yes, at most {one.limit(mode):.2f}", kind="good")
    return pages.Cell(f"failed: more than {one.limit(mode):.2f}", kind="bad")


def _ledgers(outcomes: Sequence[ContractOutcome]) -> pages.Html:
    seen = {
        (one.platform, gap["member"], ", ".join(gap["devices"]) or "all", gap["reason"], gap["substitute"])
        for one in outcomes
        for gap in one.gaps
    }
    return pages.table("Gap ledgers", ["framework", "member", "devices", "reason", "instead"], sorted(seen))
