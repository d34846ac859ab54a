"""A user's operator whose rule is wrong: the output is laid out like x, whatever the layout of y."""

from hyper_parallel import DFunction, DistributedOp
from hyper_parallel.verify import operator_sample, real


class Axpy(DFunction):
    """``2 x + y``."""

    _op_name = "axpy_bad"

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
    """A rule that is right only if both operands have one layout."""

    def infer_layout(self, layouts, extra_args=None):
        """Return the layout of the first operand."""
        del extra_args
        return layouts[0]


AxpyRule("axpy_bad")


def axpy(x, y):
    """The public function."""
    return Axpy.apply(x, y)


operator_sample(axpy, real("ab"), real("ab"))
