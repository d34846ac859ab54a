"""The contract against each platform: no member is missing, renamed, or refused without a reason."""

from __future__ import annotations

import inspect

import pytest

from hyper_parallel.platform import select
from workshop.conformance.inventory import ATTRIBUTES, MEMBERS, PROPERTIES, SELECTION

NAMES = [(facet, member) for facet, members in MEMBERS.items() for member in members]


def test_the_contract_has_97_members_and_3_selectors():
    """The table has all 97 members and 3 selectors of the contract."""
    assert sum(map(len, MEMBERS.values())) == 97
    assert len(SELECTION) == 3
    assert all(callable(getattr(select, name)) for name in SELECTION)


def parameters(member):
    """Names of positional parameters, then ``*`` and the keyword-only ones that have no default of their own."""
    names, starred = [], False
    for name, parameter in inspect.signature(member).parameters.items():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not starred:
            names, starred = [*names, "*"], True
        names.append({parameter.VAR_KEYWORD: "**", parameter.VAR_POSITIONAL: "*"}.get(parameter.kind, "") + name)
    return names


@pytest.mark.parametrize("facet, member", NAMES)
def test_a_member_exists_with_its_parameters(platform_name, facet, member):
    """Every member exists under its name with its parameters in order; further ones are keyword-only."""
    platform = select.platform_named(platform_name)
    if member in PROPERTIES:
        assert getattr(platform, member) is not None
        return
    wanted, names = MEMBERS[facet][member].split(), parameters(getattr(platform, member))
    assert names[: len(wanted)] == wanted
    extra = names[len(wanted) :]
    assert not extra or extra[0] == "*" or "*" in wanted, f"{extra} could be given by position"


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_an_attribute_exists(platform_name, name):
    """Every attribute of the contract exists."""
    assert getattr(select.platform_named(platform_name), name) is not None


def test_the_ledger_names_members_with_reasons(platform_name):
    """Each gap names a member of the contract, once per device, with a reason and a substitute."""
    members = {member for _, member in NAMES}
    seen = set()
    for gap in select.platform_named(platform_name).gaps:
        assert gap.member in members
        assert gap.reason
        assert gap.substitute
        for device in gap.devices or ("*",):
            assert (gap.member, device) not in seen
            seen.add((gap.member, device))


def test_what_is_not_in_the_ledger_cannot_be_refused(platform_name):
    """A member that is not in the gap ledger cannot be refused."""
    platform = select.platform_named(platform_name)
    with pytest.raises(KeyError, match=f"get_rank is not in the gap ledger of {platform_name} on cpu"):
        raise platform.unsupported("get_rank")
