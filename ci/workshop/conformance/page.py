"""The page of the contract: members by framework, device and transport; memory figures; gap ledgers."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from hyper_parallel.verify.pages.tables import Cell, Column, Value, table
from workshop.conformance.inventory import MEMBERS
from workshop.conformance.results import ContractOutcome, Footprint
from workshop.pages import render

__all__ = ["contract_page"]

_KINDS = {"served": "good", "gap": "warn", "failed": "bad", "not run": "quiet"}
_MIB = 1 << 20
_MEMORY = (
    "Memory that one training step adds to a process on CPU: a transformer of 12 layers; selective keeps the matrix "
    "products"
)


def contract_page(outcomes: Sequence[ContractOutcome], footprints: Sequence[Footprint]) -> str:
    """Return a document over runs of the contract's checks and measurements of memory."""
    return render(
        "contract.html",
        title="Platform contract",
        footer="python ci/workshop contract --memory",
        tables=[_matrix(outcomes), _runs(outcomes), _memory(footprints), _building(footprints), _ledgers(outcomes)],
    )


def _matrix(outcomes: Sequence[ContractOutcome]) -> Markup:
    heads: list[Column | str] = [
        "member",
        Column("facet", choice=True),
        *(Column(" / ".join(outcome.names), choice=True) for outcome in outcomes),
    ]
    rows: list[list[Value]] = [
        [
            Markup("<code>{}</code>").format(member),
            facet,
            *(_state(outcome.members.get(member, "not run")) for outcome in outcomes),
        ]
        for facet, members in MEMBERS.items()
        for member in members
    ]
    text = "What a platform must offer, and which framework offers it on which device and transport"
    return table(text, heads, rows, search=True, tall=True)


def _state(text: str) -> Cell:
    kind = text.partition(":")[0]
    return Cell(text, key=kind, kind=_KINDS.get(kind, "bad"))


def _runs(outcomes: Sequence[ContractOutcome]) -> Markup:
    rows: list[list[Value]] = [
        [" / ".join(outcome.names), outcome.world_size,
         sum(state == "served" for state in outcome.members.values()),
         sum(state.startswith("gap:") for state in outcome.members.values()),
         len(outcome.failures()), outcome.written]
        for outcome in outcomes
    ]  # fmt: skip
    numbers = [Column(name, number=True) for name in ("ranks", "served", "gaps", "failed")]
    return table("The runs", ["run", *numbers, "written"], rows, empty="not run")


def _memory(footprints: Sequence[Footprint]) -> Markup:
    rows: list[list[Value]] = [
        [f"{footprint.platform}, {mode}", f"{footprint.peaks[mode] / _MIB:.1f}", f"{share:.2f}",
         _within_limit(footprint, mode), footprint.written]
        for footprint in footprints
        for mode, share in footprint.shares().items()
    ]  # fmt: skip
    numbers = [Column(name, number=True) for name in ("MiB", "of plain")]
    return table(_MEMORY, ["activations", *numbers, "as little as it must", "written"], rows, empty="not run")


def _within_limit(footprint: Footprint, mode: str) -> Value:
    if mode == "plain":
        return ""
    limit = footprint.limit(mode)
    if footprint.holds(mode):
        return Cell(f"yes, at most {limit:.2f}", kind="good")
    return Cell(f"failed: more than {limit:.2f}", kind="bad")


def _building(footprints: Sequence[Footprint]) -> Markup:
    rows: list[list[Value]] = [
        [footprint.platform, footprint.built(), _building_verdict(footprint)]
        for footprint in footprints
        if footprint.building
    ]
    return table("Building without storage", ["framework", "measured", "holds"], rows, empty="not run")


def _building_verdict(footprint: Footprint) -> Cell:
    excess = footprint.excess()
    return Cell(f"failed: {', '.join(excess)}", kind="bad") if excess else Cell("yes", kind="good")


def _ledgers(outcomes: Sequence[ContractOutcome]) -> Markup:
    rows = {
        (outcome.platform, gap["member"], ", ".join(gap["devices"]) or "all", gap["reason"], gap["substitute"])
        for outcome in outcomes
        for gap in outcome.gaps
    }
    return table("Gap ledgers", ["framework", "member", "devices", "reason", "instead"], sorted(rows))
