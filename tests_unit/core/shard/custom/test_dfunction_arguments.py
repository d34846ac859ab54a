"""Every way of passing arguments to a ``DFunction`` reaches ``forward``, on both frameworks."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.placements import Shard
from hyper_parallel.core.shard.custom.dfunction import DFunction
from hyper_parallel.platform.select import platform_named
from hyper_parallel.verify.simulate import simulate

SIZE = 5


class Product(DFunction):
    """A product with an extra argument; the base of the ways to declare parameters."""

    _op_name = "mul"

    @staticmethod
    def product(ctx, x, y, note):
        """Compute, and check that ``note`` arrived unchanged."""
        assert note == ("two", [1, 2]), note
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def gradients(ctx, grad):
        """By the product rule."""
        x, y = ctx.saved_tensors
        return grad * y, grad * x


class ByKeyword(Product):
    """Keyword-only parameters around a keyword-only tensor."""

    @staticmethod
    def forward(ctx, x, *, before="two", y, after=None):
        """Two options and a tensor."""
        return Product.product(ctx, x, y, (before, after))

    @staticmethod
    def backward(ctx, grad):
        """In the order of the signature."""
        gx, gy = Product.gradients(ctx, grad)
        return gx, None, gy, None


class AnyKeyword(Product):
    """Keywords of any name."""

    @staticmethod
    def forward(ctx, x, **kw):
        """A tensor and two options, in the order of the call."""
        return Product.product(ctx, x, kw["y"], (kw["label"], kw["sizes"]))

    @staticmethod
    def backward(ctx, grad):
        """In the order of the call."""
        gx, gy = Product.gradients(ctx, grad)
        return gx, None, gy, None


class Starred(Product):
    """Positions without names."""

    @staticmethod
    def forward(ctx, *args):
        """Two tensors and two options."""
        x, y, label, sizes = args
        return Product.product(ctx, x, y, (label, sizes))

    @staticmethod
    def backward(ctx, grad):
        """One each; the options have none."""
        gx, gy = Product.gradients(ctx, grad)
        return gx, gy, None, None


class Defaults(Product):
    """Trailing options with defaults."""

    @staticmethod
    def forward(ctx, x, y, label="two", sizes=None):
        """One option is left to its default."""
        return Product.product(ctx, x, y, (label, sizes))

    @staticmethod
    def backward(ctx, grad):
        """No gradients for the options."""
        return Product.gradients(ctx, grad)


class Scaled(DFunction):
    """The factor comes first, as a NumPy scalar."""

    @staticmethod
    def forward(ctx, factor, x):
        """``factor`` must arrive unchanged."""
        assert type(factor) is np.float64
        ctx.factor = float(factor)
        return x * float(factor)

    @staticmethod
    def backward(ctx, grad):
        """None for the number."""
        return None, grad * ctx.factor


CALLS = {
    "keyword-only": lambda x, y: ByKeyword.apply(x, after=[1, 2], y=y),
    "any keyword": lambda x, y: AnyKeyword.apply(x, label="two", y=y, sizes=[1, 2]),
    "starred": lambda x, y: Starred.apply(x, y, "two", [1, 2]),
    "defaults": lambda x, y: Defaults.apply(y=y, sizes=[1, 2], x=x),
}


def gradients(name, call, *tensors):
    """Value and gradients of the sum of ``call``, as lists."""
    if name == "torch":
        for tensor in tensors:
            tensor.requires_grad_()
        out = call(*tensors)
        out.sum().backward()
        grads, out = [tensor.grad for tensor in tensors], out.detach()
    else:
        from hyper_parallel import value_and_grad

        def total(*values):
            out = call(*values)
            return out.sum(), out

        (_, out), grads = value_and_grad(total, tuple(range(len(tensors))), has_aux=True)(*tensors)
        grads = grads if isinstance(grads, tuple) else (grads,)
    whole = [tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for tensor in (out, *grads)]
    return [platform_named(name).tensor_to_numpy(tensor).tolist() for tensor in whole]


def plain(platform, which):
    """Operand ``which``, the same on every rank."""
    return platform.from_numpy(np.arange(SIZE, dtype=np.float32) + which)


def sharded(platform, mesh, which):
    """The same in uneven shards."""
    layout = Layout.place(mesh, [Shard(0)], (SIZE,))
    ((low, high),) = layout.local_box()
    return platform.wrap(platform.from_numpy(np.arange(SIZE, dtype=np.float32)[low:high] + which), layout)


def on_rank(platform_name, which, world_size):
    """One way to pass arguments, on plain tensors and on DTensors."""
    platform, call = platform_named(platform_name), CALLS[which]
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    return (
        gradients(platform_name, call, plain(platform, 0), plain(platform, 1)),
        gradients(platform_name, call, sharded(platform, mesh, 0), sharded(platform, mesh, 1)),
    )


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("which", CALLS)
def test_every_way_to_declare_arguments(platform_name, which, world_size):
    """Values and gradients are those of one device; options reach ``forward`` unchanged."""
    x, y = np.arange(SIZE, dtype=np.float32), np.arange(SIZE, dtype=np.float32) + 1
    expected = [(x * y).tolist(), y.tolist(), x.tolist()]
    for grads in simulate(on_rank, world_size, platform_name, (platform_name, which, world_size)):
        assert grads == (expected, expected)


def scaled(platform_name):
    """A NumPy scalar before a plain tensor."""
    x = plain(platform_named(platform_name), 0)
    return gradients(platform_name, lambda x: Scaled.apply(np.float64(2), x), x)


def test_a_numpy_scalar_is_no_tensor(platform_name):
    """The framework is that of the tensor, and the scalar arrives unchanged."""
    (grads,) = simulate(scaled, 1, platform_name, (platform_name,))
    assert grads == [[0.0, 2.0, 4.0, 6.0, 8.0], [2.0] * 5]


def stranger(platform_name):
    """A tensor for which the rule has no parameter."""
    platform = platform_named(platform_name)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x, y = sharded(platform, mesh, 0), sharded(platform, mesh, 1)
    try:
        AnyKeyword.apply(x, y=y, label=y, sizes=[1, 2])
    except TypeError as error:
        return str(error)
    return "nothing was raised"


def test_a_tensor_without_a_place_in_the_rule(platform_name):
    """A tensor for which the rule has no parameter is refused."""
    for text in simulate(stranger, 2, platform_name, (platform_name,)):
        assert text == "mul(x, y): got an unexpected keyword argument 'label'"
