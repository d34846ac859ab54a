"""A user's operator with a correct rule, for `hyper-parallel verify ops`."""

from hyper_parallel import DFunction, DistributedOp, Partial
from hyper_parallel.errors import LayoutError
from hyper_parallel.verify import operator_sample, real


class Axpy(DFunction):
    """``2 x + y``."""

    _op_name = "axpy_good"

    @staticmethod
    def forward(ctx, x, y):
        """Return ``2 x + y``, linear in both operands together."""
        del ctx
        return x * 2 + y

    @staticmethod
    def backward(ctx, grad):
        """Return a gradient per operand."""
        del ctx
        return grad * 2, grad


class AxpyRule(DistributedOp):
    """Both operands have one layout, and may be partial values."""

    def infer_layout(self, layouts, extra_args=None):
        """Return the layout of the operands."""
        del extra_args
        x, y = layouts
        if x.dim_axes != y.dim_axes or x.partials != y.partials:
            raise LayoutError("axpy_good: lay x and y out alike: y = y.redistribute(placements=x.placements)")
        if any(place.is_partial() and place not in (Partial("sum"), Partial("avg")) for place in x.placements):
            raise LayoutError("axpy_good: extrema do not add; x = x.redistribute() and y = y.redistribute() first")
        return x


AxpyRule("axpy_good")


def axpy(x, y):
    """The public function."""
    return Axpy.apply(x, y)


operator_sample(axpy, real("ab"), real("ab"))
