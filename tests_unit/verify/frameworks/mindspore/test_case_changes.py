"""Changes of a MindSpore program's case while it is recorded, and what becomes of blind programs."""

import numpy as np
import pytest

from hyper_parallel.verify.frameworks.contract.case_changes import CaseChanges
from hyper_parallel.verify.frameworks.contract.record_log import RecordingError, RecordLog

pytestmark = pytest.mark.platforms("mindspore")

PROGRAM = """
import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.communication import get_group_size, get_rank, init

init()
RANK, SIZE = get_rank(), get_group_size()


class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.weight = ms.Parameter(Tensor(np.random.default_rng(2).normal(size=(5, 3))))
        self.gain = ms.Parameter(Tensor(np.ones(3)), requires_grad=True)

    def construct(self, x):
        gain = self.gain if SIZE == 1 or not BUG else self.gain * 0 + 1
        return (x @ self.weight) * gain


def main():
    model, random = Net(), np.random.default_rng(0)
    optimizer = nn.Momentum(model.trainable_params(), 0.1, 0.9)
    step = ms.value_and_grad(lambda x: model(x).square().sum(), None, model.trainable_params())
    for _ in range(1):
        whole = random.normal(size=(6, 5))
        x = Tensor(whole if EQUAL else np.array_split(whole, SIZE)[RANK].copy())
        gradients = step(x)[1]
        reduced = [ops.AllReduce()(gradient) for gradient in gradients]
        if BUG and SIZE > 1:
            reduced[1] = ops.AllReduce()((x @ model.weight).square().sum(0) * 2)
        optimizer(tuple(gradient / SIZE for gradient in reduced) if EQUAL else tuple(reduced))


main()
"""


def program(tmp_path, *, bug=False, equal=False):
    """A script that trains one step; the bug ignores a gain of ones in the forward."""
    path = tmp_path / f"train_{bug}_{equal}.py"
    path.write_text(f"BUG, EQUAL = {bug}, {equal}\n{PROGRAM}")
    return str(path)


def recorded(function, **changes):
    """Run a program with changes; return what its rank leaves behind."""
    from hyper_parallel.verify.frameworks.mindspore.hooks import recording

    log = RecordLog(0, changes=CaseChanges(**changes))
    with recording(log):
        function()
    return log.result()


def test_weights_outputs_and_strides():
    """What a rank is told is written, multiplied and strided, and noted."""
    from mindspore import Tensor, nn

    values, factors = np.arange(6, dtype=np.float32).reshape(2, 3), np.array([[2, 3]] * 4, np.float32)
    seen = []

    def run():
        layer = nn.Dense(3, 2, has_bias=False)
        seen.append(layer(Tensor(np.ones((4, 3), np.float32))).asnumpy())

    result = recorded(run, weights={"weight": values}, outputs={("(model) (no_grad)", 0, 0): factors}, strided=True)
    np.testing.assert_array_equal(seen[0], np.array([[3, 12]] * 4) * factors)
    assert result.notes["changed weights"] == ["weight"]
    assert result.notes["changed outputs"] == 1
    assert result.notes["contiguous inputs"] is False
    assert recorded(run).notes["contiguous inputs"] is True
    with pytest.raises(RecordingError) as caught:
        recorded(run, weights={"weight": values.T})
    assert str(caught.value) == "weight has the shape [2, 3] in this run, and had [3, 2] before"
    with pytest.raises(RecordingError) as caught:
        recorded(run, outputs={("(model) (no_grad)", 0, 0): factors[:1]})
    assert str(caught.value) == "the output '(model) (no_grad)' has the shape [4, 2], and had [1, 2] before"


def test_a_gain_of_ones_is_spread(tmp_path):
    """A right program passes, and one that ignores its gain is caught."""
    from hyper_parallel.verify import verify_program

    report = verify_program(program(tmp_path), 2, platform="mindspore", harden=True)
    assert report.status == 0, report.text()
    assert "gain get random values around their constant ones" in report.hardened[0].words
    plain = verify_program(program(tmp_path, bug=True), 2, platform="mindspore")
    assert plain.status == 0, plain.text()
    hardened = verify_program(program(tmp_path, bug=True), 2, platform="mindspore", harden=True)
    assert hardened.status == 1, hardened.text()


def test_equal_data_is_refused_and_cannot_be_repaired(tmp_path):
    """Ranks that do the same work are seen by the gradients of their own backwards."""
    from hyper_parallel.verify import verify_program

    report = verify_program(program(tmp_path, equal=True), 2, platform="mindspore", harden=True)
    assert report.status == 3, report.text()
    (spot,) = report.refused
    assert spot.repair.endswith("(not repaired: the recorder of MindSpore cannot weight losses)")
