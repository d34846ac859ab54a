"""The pointwise family on PyTorch, every placement of every operand against the plain operator."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hyper_parallel import distribute_tensor
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.events import record_events
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard
from hyper_parallel.errors import LayoutError, UnsupportedOperatorError
from hyper_parallel.verify.checker.function import check_function
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("torch")


def values(*shape, low=-2.0, high=2.0, seed=0):
    """Distinct values of both signs."""
    return np.random.default_rng(seed).uniform(low, high, shape)


def whole(*shape, seed=0):
    """Small integers, with ties."""
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(float)


def holds(fn, arrays, mesh=(2,), **options):
    """Assert that `fn` means the same for all placements, and that none is refused."""
    report = check_function(fn, arrays, mesh, platform="torch", **options)
    assert report.ok, report.wrong[:5]
    assert not report.rejected, report.rejected[:3]
    return report


UNARY = [
    torch.abs, torch.neg, torch.exp, torch.expm1, torch.exp2, torch.sin, torch.cos, torch.tan, torch.tanh,
    torch.sigmoid, torch.relu, F.relu, F.silu, F.gelu, torch.erf, torch.erfc, torch.square, torch.sign, torch.floor,
    torch.ceil, torch.round, torch.trunc, F.leaky_relu, F.elu, F.celu, F.selu, F.softplus, F.hardtanh, F.relu6,
    F.hardswish, F.hardsigmoid, F.mish, F.logsigmoid, torch.frac, torch.atan, torch.asinh, torch.sinh,
    torch.nan_to_num, torch.reciprocal, torch.isnan, torch.isfinite, torch.logical_not, torch.clone, F.softsign,
    lambda x: F.gelu(x, approximate="tanh"), lambda x: F.leaky_relu(x, 0.2), lambda x: F.softplus(x, beta=2),
    lambda x: torch.round(x, decimals=1), lambda x: F.threshold(x, 0.1, 7.0), lambda x: x.contiguous() * 2,
    lambda x: x.clamp(-0.5, 0.7), lambda x: x.clamp(min=0.1), lambda x: torch.clip(x, max=0.3), lambda x: -x,
    abs, lambda x: +x, F.tanhshrink, F.hardshrink, lambda x: F.softshrink(x, 0.3),
]  # fmt: skip
POSITIVE = [torch.log, torch.log1p, torch.log2, torch.log10, torch.sqrt, torch.rsqrt, torch.lgamma, torch.acosh]


@pytest.mark.parametrize("fn", UNARY)
def test_unary(fn):
    """An operator of one tensor keeps shards, reduces partial values unless linear, and has the plain gradient."""
    holds(fn, [values(5, 3)], partial=("sum", "avg", "max", "min"))


@pytest.mark.parametrize("fn", POSITIVE)
def test_unary_on_positive_values(fn):
    """Partial values that are negative give no NaN: they are reduced first."""
    holds(fn, [values(5, 3, low=1.1)], partial=("sum", "avg", "max", "min"))


@pytest.mark.parametrize("fn", [torch.relu, torch.floor, torch.sign, lambda x: x.clamp(-1, 2), torch.abs])
def test_extrema_pass_only_where_ties_keep_their_gradient(fn):
    """On integers, where ties abound, Partial(max) and Partial(min) have the single device's gradient."""
    holds(fn, [whole(5, 3)], (3,), partial=("max", "min"))


BINARY = [
    torch.add, torch.sub, torch.mul, torch.div, torch.maximum, torch.minimum, torch.atan2, torch.fmod, torch.remainder,
    torch.eq, torch.ne, torch.lt, torch.ge, torch.logical_and, torch.hypot, torch.rsub,
    lambda x, y: torch.add(x, y, alpha=3), lambda x, y: torch.sub(x, other=y, alpha=0.5),
    lambda x, y: x.detach() // y.detach(),
    lambda x, y: torch.div(x, y, rounding_mode="floor"), lambda x, y: x % y, lambda x, y: x.exp() ** y,
    lambda x, y: x > y, lambda x, y: x.lerp(y, 0.3), torch.true_divide,
]  # fmt: skip


@pytest.mark.parametrize("fn", BINARY)
def test_binary(fn):
    """Operators of two tensors broadcast, pass Partial if linear, and reduce the gradient of the smaller operand."""
    holds(fn, [values(5, 3), values(3, seed=1) + 3])


@pytest.mark.parametrize("fn", [torch.add, torch.mul, torch.div, torch.maximum])
@pytest.mark.parametrize("mesh", [(3,), (4,), (2, 2), (2, 3)])
@pytest.mark.untraced
def test_binary_on_every_mesh(fn, mesh):
    """Uneven, empty and nested shards, size-1 dims and ties are no special case."""
    holds(fn, [whole(5, 1), whole(5, 3, seed=1) + 9], mesh, partial=("sum", "avg"), limit=60)


NUMBERS = [
    lambda x: x + 2, lambda x: 2 + x, lambda x: x - 2, lambda x: 2 - x, lambda x: x * 3, lambda x: 3 * x,
    lambda x: x / 2, lambda x: 2 / x, lambda x: x**2, lambda x: 2**x, lambda x: x.detach() // 2, lambda x: x % 2,
    lambda x: 20 // x.detach(), lambda x: 5 % x.detach(), lambda x: x == 1, lambda x: x * -1.5,
    lambda x: torch.rsub(x, 2),
    lambda x: x + torch.tensor(2.0, dtype=torch.float64), lambda x: x * torch.tensor(2.0, dtype=torch.float64),
    lambda x: (x + 1) + (x + 2), lambda x: torch.add(x, x, alpha=2) - torch.add(x, x, alpha=-3),
]  # fmt: skip


@pytest.mark.parametrize("fn", NUMBERS)
def test_numbers(fn):
    """A Python number is added once for every placement, and another number does not reuse its value."""
    holds(fn, [values(5, 3) + 4], partial=("sum", "avg", "max"))


TERNARY = [
    torch.lerp, lambda x, y, z: torch.addcmul(x, y, z, value=0.5),
    lambda x, y, z: torch.addcdiv(x, y, z, value=-2), torch.clamp,
    lambda x, y, z: torch.where(z > 3, x, y), lambda x, y, z: torch.where(z > 3, x * y, 0.0),
    lambda x, y, z: torch.where(z > 3, 1.0, x * y), lambda x, y, z: (x * y).masked_fill(z > 3, 0),
    lambda x, y, z: (x * y).masked_fill(z > 3, 2.5), lambda x, y, z: x.where(z > 3, y),
]  # fmt: skip


@pytest.mark.parametrize("fn", TERNARY)
@pytest.mark.untraced
def test_ternary(fn):
    """Operators of three tensors pass Partial only in arguments in which they are linear."""
    holds(fn, [values(4, 3), values(4, 1, seed=1), values(3, seed=2) + 3], limit=60)
    holds(fn, [values(3, 2), values(3, 2, seed=1), values(3, 2, seed=2) + 3], (2, 2), limit=30)


CASTS = [
    lambda x: x.float(), lambda x: x.to(torch.float32), lambda x: x.double(), lambda x: x.to("cpu", torch.float32),
    lambda x: x.to(dtype=torch.float32, copy=True), lambda x: x.type_as(torch.zeros(1)), lambda x: x.long(),
    lambda x: x.to(torch.int32), lambda x: x.bool(), lambda x: x.to("cpu"), lambda x: x.long().float(),
]  # fmt: skip


@pytest.mark.parametrize("fn", CASTS)
def test_casts(fn):
    """Partial values pass a cast between floating types, and no other."""
    holds(fn, [whole(5, 3) + 0.75], (2,), partial=("sum", "avg", "max"))
    holds(fn, [whole(5, 3) + 0.75], (2, 2), partial=("sum", "avg"))


LIKES = [
    torch.ones_like, lambda x: torch.full_like(x, 3.0) + torch.full_like(x, 4.0),
    lambda x: torch.ones_like(x, dtype=torch.float32), lambda x: x.new_ones(4, 2), lambda x: x.new_full((3,), 2.0),
    lambda x: torch.zeros_like(x) + 1, lambda x: torch.full_like(x, torch.tensor(2.0)),
    lambda x: x.new_full((3,), torch.tensor(2.0)),
]  # fmt: skip


@pytest.mark.parametrize("fn", LIKES)
def test_likes(fn):
    """zeros_like and its kin keep the layout without Partial and communicate nothing."""
    with record_events() as log:
        holds(fn, [values(5, 3)], partial=("sum", "max"))
    assert not log.collectives()


def test_likes_of_a_distributed_value():
    """A 0-d DTensor as fill value is reduced first, also if the other operand is Partial."""
    for fn in (lambda x, value: torch.full_like(x.detach(), value.detach()) * value, lambda x, value: x * value):
        holds(fn, [values(5, 3), values()], partial=("sum", "max"))


IN_PLACE = {
    "add_": lambda x, y: (x * 1).add_(y, alpha=2),
    "sub_": lambda x, y: (x * 1).sub_(y),
    "mul_": lambda x, y: (x * 1).mul_(y),
    "div_": lambda x, y: (x * 1).div_(y),
    "copy_": lambda x, y: (x * 1).copy_(y) + x,
    "copy_number": lambda x, y: (x * 1).copy_(2.0) + y,
    "lerp_": lambda x, y: (x * 1).lerp_(y, 0.25),
    "addcmul_": lambda x, y: (x * 1).addcmul_(y, y, value=2),
    "addcdiv_": lambda x, y: (x * 1).addcdiv_(y, y + 4),
    "zero_": lambda x, y: (x * 1).zero_() + y,
    "neg_": lambda x, y: (x * y).neg_(),
    "mul_number": lambda x, y: (x * y).mul_(0.5),
    "iadd": lambda x, y: iadd(x * 1, y),
    "imul": lambda x, y: imul(x * 1, y),
    "masked_fill_zero": lambda x, y: (x * 1).masked_fill_(y > 0, 0),
}


def test_the_gradient_of_dropout():
    """native_dropout_backward scales the kept gradient, and a partial gradient stays partial."""
    native = torch.ops.aten.native_dropout_backward
    holds(lambda x, mask: native(x, mask > 0, 2.5), [values(5, 3), np.random.default_rng(1).integers(0, 2, (5, 3))])


def iadd(x, y):
    """`x += y`."""
    x += y
    x -= y * 2
    return x


def imul(x, y):
    """`x *= y`."""
    x *= y
    x /= 2
    return x


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place(name):
    """In-place operators keep the layout of the written operand, move the other, and have the plain gradients."""
    report = check_function(IN_PLACE[name], [values(5, 3), values(5, 3, seed=1)], (2,), platform="torch")
    assert not report.wrong, report.wrong[:3]
    assert report.forward >= 12
    assert all("writing in place would have to change the layout of x" in line for line in report.rejected)
    assert all(line.startswith("[Partial(sum)]") for line in report.rejected)


WRITING = [
    lambda x: (x * 1).exp_(), lambda x: (x * 1).sqrt_(), lambda x: (x * 1).clamp_(0.2, 1.0), lambda x: (x * 1).add_(1),
    lambda x: (x * 1).masked_fill_(x > 1, 2.0), lambda x: (x * 1).pow_(2),
    lambda x: F.relu(x * 1, inplace=True), lambda x: F.silu(x * 1, inplace=True), lambda x: (x * 1).sigmoid_(),
]  # fmt: skip


@pytest.mark.parametrize("fn", WRITING)
def test_nonlinear_writes_are_refused_on_partial_values_only(fn):
    """Nonlinear in-place operators write shards and refuse partial values; the message has the fix."""
    report = check_function(fn, [values(5, 3, low=0.1)], (3,), platform="torch")
    assert not report.wrong, report.wrong[:3]
    assert report.forward == 3
    assert len(report.rejected) == 1


def test_in_place_refusal_in_full():
    """The refusal names the operands, their layouts and two fixes."""

    def run():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=["tp"])
        x = DTensor.from_local(torch.ones(4, 3), mesh, [Partial()])
        with pytest.raises(UnsupportedOperatorError) as caught:
            x.add_(1)
        return str(caught.value)

    assert simulate(run, 2, "torch")[0] == (
        "add(x=f32[4, 3] + Partial(sum)@tp): writing in place would have to change the layout of x; "
        "use the out-of-place form, or x = x.redistribute(placements=[Replicate()]) first"
    )


def test_in_place_keeps_identity_and_order_of_axes():
    """`x += y` returns x itself; a dim cut by two axes in reverse order stays cut that way."""

    def run():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=["a", "b"])
        x = DTensor.from_local(torch.ones(2, 3), mesh, (("b", "a"), "None"))
        y = DTensor.from_local(torch.ones(2, 3), mesh, (("a", "b"), "None"))
        before, layout = x, x.layout
        x += y
        assert x is before
        assert x.layout is layout
        return x.full_tensor()

    for out in simulate(run, 4, "torch"):
        assert torch.equal(out, torch.full((8, 3), 2.0))


def test_out():
    """`out=` is written in its own layout; a plain one, or one of another shape, is refused."""

    def run():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=["tp"])
        x = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)])
        out = DTensor.from_local(torch.zeros(4, 3), mesh, [Replicate()])
        assert torch.maximum(x, x * 2, out=out) is out
        with pytest.raises(UnsupportedOperatorError, match="maximum: out must be one DTensor, got Tensor"):
            torch.maximum(x, x, out=torch.zeros(4, 3))
        with pytest.raises(LayoutError, match=r"maximum: out has shape \[4, 3\], the result has \[3\]"):
            torch.maximum(x.sum(0), x.sum(0), out=out)
        return out.to_local()

    assert all(torch.equal(tensor, torch.full((4, 3), 2.0)) for tensor in simulate(run, 2, "torch"))


def test_a_constant_is_added_once_to_a_partial_sum():
    """A 0-d tensor added to partial values is not added by every rank."""
    holds(lambda x: x + torch.tensor(5.0, dtype=torch.float64), [values(3, 2)], (4,))


def test_an_integer_call_leaves_no_plan_for_floats():
    """The gradient of a replicated operand is summed also when an integer of its layout came first."""

    def run():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=["dp"])
        x = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)])
        x * DTensor.from_local(torch.ones(3, dtype=torch.int64), mesh, [Replicate()])
        w = DTensor.from_local(torch.ones(3, requires_grad=True), mesh, [Replicate()])
        (x * w).sum().backward()
        return w.grad.to_local()

    assert all(torch.equal(grad, torch.full((3,), 4.0)) for grad in simulate(run, 2, "torch"))


def test_gathered_then_written():
    """A write to a tensor does not change the gradient of an earlier gathered copy."""

    def run():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=["dp"])
        leaf = DTensor.from_local(torch.ones(2, 3, requires_grad=True), mesh, [Shard(0)])
        x = leaf * 1
        gathered = x.redistribute(placements=[Replicate()])
        x.mul_(5)
        other = DTensor.from_local(torch.ones(4, 3), mesh, [Partial()])
        (gathered * other).sum().backward()
        return leaf.grad.to_local()

    assert all(torch.equal(grad, torch.full((2, 3), 2.0)) for grad in simulate(run, 2, "torch"))


def test_communication_of_the_family():
    """Shards of equal layout and a replicated operand cost nothing forward; partial values cost one reduce-scatter."""

    def run():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=["tp"])
        shard = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)])
        partial = DTensor.from_local(torch.ones(4, 3), mesh, [Partial()])
        weight = DTensor.from_local(torch.ones(3, requires_grad=True), mesh, [Replicate()])
        with record_events() as log:
            out = F.gelu(shard * weight + shard) * 2
            kept = (partial - partial / 3).neg() * weight
        assert log.collectives() == []
        assert kept.placements == (Partial(),)
        with record_events() as log:
            out.sum().backward()
            kept.sum().backward()
        assert log.collectives() == ["all_reduce", "all_reduce"]
        with record_events() as log:
            F.gelu(partial)
        return log.collectives()

    assert simulate(run, 2, "torch") == [["reduce_scatter"]] * 2


ACTIVATIONS = {
    "glu": (F.glu, (5, 6)),
    "glu of the last of three": (lambda x: F.glu(x, -1), (4, 5, 6)),
    "prelu": (F.prelu, (5, 3, 4), (3,)),
    "prelu, one weight": (F.prelu, (5, 3, 4), (1,)),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(holds, name):
    """Gated activations and those with weights have the plain values and gradients."""
    holds(*ACTIVATIONS[name], limits={(2,): 8, (3,): 4, (4,): 3, (2, 2): 3})


COMPLEX = np.random.default_rng(5).standard_normal((3, 4, 2)).view(np.complex128)[..., 0]
COMPLEX_PARTS = {
    "real": (lambda x: x.real, COMPLEX),
    "imag": (lambda x: torch.imag(x.conj()), COMPLEX),
    "conj": (lambda x: x.conj() * x, COMPLEX),
}  # fmt: skip


@pytest.mark.parametrize("name", COMPLEX_PARTS)
@pytest.mark.untraced
def test_parts_of_complex_numbers(holds, name):
    """Real and imaginary parts and conjugates are the plain ones under any placement."""
    holds(*COMPLEX_PARTS[name])


VALUES = torch.complex(torch.arange(15.0).reshape(5, 3) - 7, torch.arange(15.0).reshape(5, 3) * 2 - 9)


@pytest.mark.parametrize("where", [Replicate(), Shard(0), Shard(1)], ids=repr)
def test_conjugates_survive_redistribution(ranks, where):
    """The conjugate view of a shard is gathered, resharded and multiplied by its values."""

    def run(mesh):
        x = distribute_tensor(VALUES.clone(), mesh, [where]).conj()
        other = x.redistribute(placements=[Shard(1)]).full_tensor()
        return (
            torch.equal(x.full_tensor(), VALUES.conj())
            and torch.equal(other, VALUES.conj())
            and torch.allclose((x.mT @ x).full_tensor(), VALUES.mH @ VALUES.conj())
            and torch.allclose((x.H @ x).full_tensor(), VALUES.mT @ VALUES.conj())
            and torch.equal(x.imag.full_tensor(), -VALUES.imag)
        )

    assert ranks(3, run) == [True] * 3


def test_parts_are_views(ranks):
    """A write into the real part of a shard changes the tensor."""

    def run(mesh):
        x = distribute_tensor(VALUES.clone(), mesh, [Shard(0)])
        x.real.fill_(2.0)
        torch.view_as_real(distribute_tensor(VALUES.clone(), mesh, [Shard(1)]))
        return torch.equal(x.full_tensor(), torch.complex(torch.full((5, 3), 2.0), VALUES.imag))

    assert ranks(2, run) == [True] * 2


def test_resolved_conjugates_stay_where_they_are(ranks):
    """`resolve_conj` and `resolve_neg` read the same values, in the same layout, with their gradient."""

    def run(mesh):
        x = distribute_tensor(VALUES.clone(), mesh, [Shard(1)]).requires_grad_()
        conjugate, negative = x.conj().resolve_conj(), x.conj().imag.resolve_neg()
        (conjugate * conjugate).sum().real.backward()
        return (
            conjugate.placements == negative.placements == (Shard(1),)
            and not conjugate.to_local().is_conj()
            and not negative.to_local().is_neg()
            and torch.equal(conjugate.full_tensor(), VALUES.conj())
            and torch.equal(negative.full_tensor(), -VALUES.imag)
            and torch.equal(x.grad.full_tensor(), 2 * VALUES.conj())
        )

    assert ranks(2, run) == [True] * 2


def test_conjugates_travel_by_value(ranks):
    """The conjugate and negative flags are applied before a tensor is gathered."""

    def run(mesh):
        x = DTensor.from_local(torch.tensor([1 + 2j, 3 - 1j]), mesh, [Shard(0)])
        return x.conj().full_tensor().tolist(), x.conj().imag.full_tensor().tolist()

    assert ranks(2, run) == [([1 - 2j, 3 + 1j] * 2, [-2.0, 1.0] * 2)] * 2


MISFITS = {
    "glu": (F.glu, (4, 3), "glu: dim -1 of size 3 must be even to be split in two"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISFITS)
def test_a_call_that_does_not_fit_is_refused(refuses, name):
    """A call that fails on one device fails on every rank with its reason, before anything moves."""
    refuses(*MISFITS[name])
