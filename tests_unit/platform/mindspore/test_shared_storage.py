"""A view of a DTensor sees the writes to its base, as on one device, or says that it is stale; copies never do."""

from __future__ import annotations

import copy
import operator
import pickle
import re
from functools import partial

import numpy as np
import pytest

from hyper_parallel import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.verify import simulate

pytestmark = pytest.mark.platforms("mindspore")

RNG = np.random.default_rng(29)
WHOLE = {(4, 3): (2,), (5, 4): (2, 2), (1, 1): (2,)}
"""Meshes by the shapes of tensors that are sharded on them; the last one leaves a rank without elements."""
VALUES = {shape: RNG.standard_normal(shape).astype(np.float32) for shape in WHOLE}
COPY = (
    "it is a copy: getitem(x=f32[4@0, 3]) had to redistribute x to f32[4, 3@0], so a write would be lost; "
    "write to x itself"
)
STALE = (
    f"a view of a tensor that was written since is stale: {COPY}; take the view again after the write, or clone() it "
    "before"
)

# Each ends in a view or a copy of the tensor on one device; which, the test asks MindSpore.
PARTS = {
    "an index": lambda x: x[0],
    "True": lambda x: x[True],
    "a slice": lambda x: x[:1],
    "a column": lambda x: x[:, 0],
    "a part of a part": lambda x: x[:1].T[0],
    "a part of a view": lambda x: x.T[:, 0],
    "iteration": lambda x: next(iter(x)),
    "view": lambda x: x.view((x.shape[1], x.shape[0])),
    "transpose": lambda x: x.transpose(0, 1),
    "narrow": lambda x: x.narrow(0, 0, 1),
    "select": lambda x: x.select(0, 0),
    "chunk": lambda x: x.chunk(1)[0],
    "split": lambda x: x.split(1)[0],
    "unbind": lambda x: x.unbind(0)[0],
    "diagonal": lambda x: x.diagonal(),
    "flatten": lambda x: x.flatten(),
    "ops.flatten": lambda x: _ops().flatten(x),
    "a list": lambda x: x[[0, 0]],
    "copy": lambda x: x.copy(),
    "a copy of a part": lambda x: x[0].copy(),
    "arithmetic": lambda x: x[0] + 1,
}
WRITES = {
    "index": lambda x: x.__setitem__((..., -1), 9.0),
    "add_": lambda x: x.add_(1),
    "+=": lambda x: x.__iadd__(1),
    "copy_": lambda x: x.copy_(x * 2),
    "fill_": lambda x: x.fill_(9),
    "masked_fill_": lambda x: x.masked_fill_(x > -np.inf, 9.0),
    "uniform_": lambda x: x.uniform_(),
    "ops.assign": lambda x: _ops().assign(x, x * 2),
    "ops.assign_add": lambda x: _ops().assign_add(x, x),
    "set_data": lambda x: x.set_data(x * 2),
    "data": lambda x: setattr(x, "data", x * 2),
    "detach": lambda x: x.detach().add_(1),
    "detach of detach": lambda x: x.detach().detach().add_(1),
    "stop_gradient": lambda x: _ops().stop_gradient(x).add_(1),
    "copy.copy": lambda x: copy.copy(x).add_(1),
    "another DTensor of the local tensor": lambda x: _wrapped_again(x).add_(1),
}


def _ops():
    from mindspore import ops

    return ops


def _wrapped_again(x):
    return DTensor.from_local(x.to_local(), x.device_mesh, x.placements, shape=x.shape)


def _sharded(shape):
    from mindspore import Tensor

    mesh = init_device_mesh("cpu", WHOLE[shape])
    return distribute_tensor(Tensor(VALUES[shape]), mesh, [Shard(0)] * len(WHOLE[shape]))


def _read(part):
    try:
        return np.array(part.asnumpy())
    except UnsupportedOperatorError as error:
        return str(error)


def _parts(shape):
    """Every part before and after a write, on this rank."""
    results = {}
    for name, take in PARTS.items():
        x = _sharded(shape)
        part = take(x)
        before = _read(part)
        x[:] = 9.0
        results[name] = before, _read(part), _read(take(x))
    return results


@pytest.mark.parametrize("shape", WHOLE)
def test_a_part_sees_a_write_as_on_one_device_or_is_stale(shape):
    """What is a view on one device sees the write or is refused, on all ranks; what is a copy keeps its values."""
    from mindspore import Tensor

    ranks = simulate(_parts, int(np.prod(WHOLE[shape])), "mindspore", args=(shape,))
    for name, take in PARTS.items():
        x = Tensor(VALUES[shape])
        part = take(x)
        before = np.array(part.asnumpy())
        x[:] = 9.0
        after, is_view = part.asnumpy(), not np.array_equal(part.asnumpy(), before)
        stale = {isinstance(rank[name][1], str) for rank in ranks}
        assert len(stale) == 1, name
        for first, second, anew in (rank[name] for rank in ranks):
            np.testing.assert_array_equal(first, before, name)
            np.testing.assert_array_equal(anew, take(x).asnumpy(), name)
            if isinstance(second, str):
                assert is_view, name
                assert second.startswith("a view of a tensor that was written since is stale: it is a copy: "), name
            else:
                np.testing.assert_array_equal(second, after, name)


def _written(shape):
    """The errors of every use of a copy in the place of a view, by the write before."""
    errors = {}
    for name, write in WRITES.items():
        x = _sharded(shape)
        part, of_part, alias = x[0], x[0][None], x[0].detach()
        write(x)
        uses = (partial(operator.add, part, 1), part.full_tensor, partial(getattr, part, "shape"))
        for use in (*uses, of_part.full_tensor, alias.full_tensor):
            with pytest.raises(UnsupportedOperatorError) as error:
                use()
            errors.setdefault(name, []).append(str(error.value))
        np.testing.assert_array_equal(x[0].asnumpy(), x.asnumpy()[0], name)
    return errors


@pytest.mark.parametrize("shape", WHOLE)
def test_a_copy_instead_of_a_view_is_stale_after_any_write(shape):
    """Whatever writes to the tensor or to an alias of it, copies of its parts and their views are not used any more."""
    for errors in simulate(_written, int(np.prod(WHOLE[shape])), "mindspore", args=(shape,)):
        for name in WRITES:
            assert len(errors[name]) == 5, name
            assert all(" is stale: it is a copy: getitem(" in error for error in errors[name]), errors[name]
            if shape == (4, 3):
                assert errors[name][:3] == [STALE] * 3, name


def _unwritten():
    """Parts after writes to other tensors, with the values that they must have."""
    x, other = _sharded((4, 3)), _sharded((4, 3))
    part, dense = x[0], x.T.contiguous()
    part_of_copy = dense[:, 0]
    values = x.asnumpy()
    other.add_(1)
    (x * 1).add_(1)
    x.copy().fill_(0)
    copy.deepcopy(x).fill_(0)
    x.redistribute(placements=[Replicate()]).detach()
    np.testing.assert_array_equal(part.asnumpy(), values[0])
    with pytest.raises(UnsupportedOperatorError, match=re.escape(f"cannot be written to: {COPY}")):
        part.set_data(part * 2)
    x.add_(1)
    np.testing.assert_array_equal(part_of_copy.asnumpy(), values[0])
    np.testing.assert_array_equal(x[0].asnumpy(), values[0] + 1)


def test_writes_to_other_tensors_make_nothing_stale():
    """A part stays usable after writes to other tensors, copies of its tensor among them; a part of a copy always."""
    simulate(_unwritten, 2, "mindspore")


def _pickled():
    x = _sharded((4, 3))
    part = x[0]
    assert isinstance(pickle.loads(pickle.dumps(x.detach().to_local())), type(x.to_local()))  # noqa: S301 - from above
    text = pickle.dumps(x.to_local())
    loaded = DTensor.from_local(pickle.loads(text), x.device_mesh, x.placements)  # noqa: S301 - from above
    of_loaded = loaded[0]
    loaded.add_(1)
    with pytest.raises(UnsupportedOperatorError, match="is stale: "):
        of_loaded.full_tensor()
    np.testing.assert_array_equal(part.asnumpy(), VALUES[4, 3][0])
    return text


def test_a_pickled_local_tensor_is_one_of_its_own():
    """The count of writes stays here: what is loaded has another one, and needs nothing of this library."""
    for text in simulate(_pickled, 2, "mindspore"):
        assert b"hyper_parallel.platform" not in text
