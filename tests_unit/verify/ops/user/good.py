"""A user's operator with a true rule: what `hyper-parallel verify ops` is pointed at."""

from hyper_parallel import DFunction, DistributedOp, Partial
from hyper_parallel.errors import LayoutError
from hyper_parallel.verify import operator_sample, real


class Axpy(DFunction):
    """``2 x + y``."""

    _op_name = "axpy_good"

    @staticmethod
    def forward(ctx, x, y):
        """Linear in both together."""
        del ctx
        return x * 2 + y

    @staticmethod
    def backward(ctx, grad):
        """One gradient per operand."""
        del ctx
        return grad * 2, grad


class AxpyRule(DistributedOp):
    """Both operands alike, which may be summands."""

    def infer_layout(self, layouts, extra_args=None):
        """As the operands."""
        del extra_args
        x, y = layouts
        if x.dim_axes != y.dim_axes or x.partials != y.partials:
            raise LayoutError("axpy_good: lay x and y out alike: y = y.redistribute(placements=x.placements)")
        if any(place.is_partial() and place not in (Partial("sum"), Partial("avg")) for place in x.placements):
            raise LayoutError("axpy_good: extrema do not add; x = x.redistribute() and y = y.redistribute() first")
        return x


AxpyRule("axpy_good")


def axpy(x, y):
    """What users call."""
    return Axpy.apply(x, y)


operator_sample(axpy, real("ab"), real("ab"))
