"""`--dtypes`: what has another dtype than was declared is named with its rank and line; what was not seen is said."""

import math

import numpy as np
import pytest

from hyper_parallel.verify import verify_program
from hyper_parallel.verify.frameworks.contract.record_log import REDUCED
from hyper_parallel.verify.frameworks.contract.records import RankRecords, Record, Run
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.program.dtypes import compare_dtypes, parse_dtypes

SHARDED = """
import sys, torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(7, 12), nn.GELU(), nn.Linear(12, 5))
fully_shard(model, mesh=init_device_mesh("cpu", (world,)), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float64))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for step in range(2):
    x = torch.randn(12, 7).tensor_split(world)[rank]
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    loss = torch.ones(3)
    dist.all_reduce(loss)  # after the step: no gradients
"""


def rank_of(number, *records, reduced=()):
    """Return the records of a rank: kind, name, step and dtype of each."""
    made = [
        Record(kind, name, name.rpartition(".")[0], step, 0, np.zeros(shape, "float32" if half else dtype),
               site="a.py:1", dtype=dtype if half else "")
        for kind, name, step, dtype, shape in ((*each, (2,)) if len(each) == 4 else each for each in records)
        for half in [dtype in ("bfloat16", "float16")]
    ]  # fmt: skip
    return RankRecords(number, made, [], {REDUCED: {(dtype, 0, "a.py:7"): 1 for dtype in reduced}})


RECORDS = (
    ("weight", "norm.weight", -1, "float32"),
    ("weight", "up.weight", -1, "bfloat16"),
    ("weight", "optimizer 0, parameter 0", -1, "float32"),
    ("gradient", "up.weight", 0, "bfloat16"),
    ("gradient", "optimizer 0, parameter 0", 0, "float32"),
    ("state", "up.weight:exp_avg", 0, "float32"),
    ("state", "up.weight:master", 0, "float64"),
    ("state", "up.weight:step", 0, "int64"),
    ("state", "up.weight:rate", 0, "float64", ()),
)


def compared(declared, *ranks):
    """Compare ranks with declarations."""
    return compare_dtypes(Run(list(ranks)), parse_dtypes(declared))


def test_what_was_declared_holds_for_each_kind():
    """Weights and states that an optimizer keeps in addition are masters; integers and numbers of steps are none."""
    declared = ["parameters=bfloat16", "parameters:norm.*=float32", "gradients=bfloat16", "states=float32",
                "reductions=float32", "masters=float32", "masters:up.*=float64"]  # fmt: skip
    case = compared(declared, rank_of(0, *RECORDS, reduced=["float32"]), rank_of(1, *RECORDS, reduced=["float32"]))
    assert case.ok, case.lines()
    assert case.verdict.counts == {"dtype": 14}
    assert case.lines()[0] == f"dtypes: declared: {', '.join(declared)}"


@pytest.mark.parametrize(
    "declared, name, kind, dtype",
    [
        ("parameters=float32", "up.weight", "weight", "bfloat16"),
        ("gradients=float32", "up.weight", "gradient", "bfloat16"),
        ("states=bfloat16", "up.weight:exp_avg", "state", "float32"),
        ("masters=float32", "up.weight:master", "state", "float64"),
        ("reductions=float32", "gradients", "reduction", "bfloat16"),
    ],
)
def test_another_dtype_is_the_difference(declared, name, kind, dtype):
    """It is named once, with its ranks, its line and the declaration."""
    case = compared([declared], rank_of(0), *(rank_of(rank, *RECORDS, reduced=["bfloat16"]) for rank in (1, 2)))
    (difference,) = case.verdict.differences
    assert (difference.kind, difference.name, difference.ranks) == (kind, name, (1, 2))
    assert difference.why == f"its dtype is {dtype}; declared is {declared.partition('=')[2]}"
    assert (difference.cause.kind, difference.cause.evidence) == ("dtype", f"--dtypes {declared}")
    assert difference.site == ("a.py:7" if kind == "reduction" else "a.py:1")
    assert math.isinf(difference.error)
    assert not case.ok


def test_the_last_declaration_of_a_name_counts():
    """A pattern before the general one is without effect, and is not called unseen."""
    case = compared(
        ["parameters:norm.*=float64", "parameters:up.*=float32", "parameters=float32"], rank_of(0, *RECORDS)
    )
    assert [difference.name for difference in case.verdict.differences] == ["up.weight"]


def test_a_declaration_without_a_value_says_nothing():
    """Nothing was checked, so it is no success; next to a difference it is listed."""
    case = compared(["reductions=float32"], rank_of(0, *RECORDS))
    assert (case.asked, case.skipped) == (True, "no value was seen that 'reductions=float32' declares")
    case = compared(["parameters:down.*=float32", "states=float64"], rank_of(0, *RECORDS))
    assert case.verdict.skipped == ["no value was seen that 'parameters:down.*=float32' declares"]
    assert not case.ok


@pytest.mark.parametrize(
    "text, said",
    [
        ("float32", "; kinds: parameters, gradients, reductions, states, masters"),
        ("state=float32", "; did you mean states?"),
        ("optimizers=float32", "; kinds: parameters, gradients, reductions, states, masters"),
    ],
)
def test_a_declaration_of_no_kind_is_refused(text, said):
    """The message has the form, and the kinds or the near one."""
    with pytest.raises(InputError) as raised:
        parse_dtypes([text])
    form = "must look like KIND=DTYPE or KIND:PATTERN=DTYPE, such as states=float32"
    assert str(raised.value) == f"--dtypes {text!r} {form}{said}"


def test_a_declaration_of_no_dtype_is_refused():
    """The dtypes are listed."""
    with pytest.raises(InputError) as raised:
        parse_dtypes(["states=float23"])
    assert str(raised.value) == (
        "--dtypes 'states=float23': float23 is none of float64, float32, bfloat16, float16; "
        "did you mean float32, float64 or float16?"
    )


@pytest.mark.platforms("torch")
def test_dtypes_of_a_sharded_program(tmp_path):
    """A policy that reduces in float64: declared float32, the line of the backward is named, and nothing else is."""
    script = tmp_path / "train.py"
    script.write_text(SHARDED)
    declared = ["parameters=float32", "gradients=float32", "states=float32", "reductions=float32"]
    report = verify_program(str(script), 2, dtypes=declared, platform="torch")
    assert report.status == 1, report.text()
    case = report.hardened[-1]
    assert [(each.kind, each.ranks, each.step) for each in case.verdict.differences] == [("reduction", (0, 1), 0)]
    assert case.verdict.first.site == f"{script}:15"
    assert report.headline() == "dtypes: DIFFERS first in step 1: the reduction of gradients on ranks 0, 1"
    assert report.verdict.equal
