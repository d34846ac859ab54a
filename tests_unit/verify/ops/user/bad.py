"""A user's operator whose rule is wrong: the output is laid out like x, whatever y is."""

from hyper_parallel import DFunction, DistributedOp
from hyper_parallel.verify import operator_sample, real


class Axpy(DFunction):
    """``2 x + y``."""

    _op_name = "axpy_bad"

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
    """What looks right as long as both operands are whole."""

    def infer_layout(self, layouts, extra_args=None):
        """As the first operand."""
        del extra_args
        return layouts[0]


AxpyRule("axpy_bad")


def axpy(x, y):
    """What users call."""
    return Axpy.apply(x, y)


operator_sample(axpy, real("ab"), real("ab"))
