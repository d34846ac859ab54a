"""Functions of ``mindspore.numpy`` on DTensors: the values and dtypes of whole tensors."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.module import distribute_tensor
from hyper_parallel.core.dtensor.placements import Replicate, Shard
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("mindspore")

X = np.random.default_rng(4).standard_normal((5, 7)).astype(np.float32)
X[1, 2], X[3, 3] = np.nan, np.inf


def _calls(x, y, index):
    import mindspore
    from mindspore import numpy as mnp

    return {
        "maximum": lambda: mnp.maximum(x, y),
        "minimum": lambda: mnp.minimum(x, y, dtype=mindspore.float16),
        "fmod": lambda: mnp.fmod(y, 0.3),
        "isinf": lambda: mnp.isinf(x),
        "isnan": lambda: mnp.isnan(x),
        "isfinite": lambda: mnp.isfinite(x),
        "sign": lambda: mnp.sign(y),
        "clip": lambda: mnp.clip(y, -0.2, 0.4),
        "clip below": lambda: mnp.clip(y, None, 0.4),
        "nansum": lambda: mnp.nansum(x, axis=1),
        "nansum of all": lambda: mnp.nansum(y * y, keepdims=True),
        "tril": lambda: mnp.tril(y, 1),
        "triu": lambda: mnp.triu(y, -1),
        "diag": lambda: mnp.diag(y, 1),
        "flip": lambda: mnp.flip(y),
        "flip of rows": lambda: mnp.flip(y, 0),
        "take": lambda: mnp.take(y, index, 1),
        "take of all": lambda: mnp.take(y, index),
        "zeros_like": lambda: mnp.zeros_like(y),
        "ones_like": lambda: mnp.ones_like(y, dtype=mindspore.int32),
        "full_like": lambda: mnp.full_like(y, 2.5),
        "sum": lambda: mnp.sum(y),
        "sum of columns": lambda: mnp.sum(y, 0, keepdims=True),
        "mean": lambda: mnp.mean(y, 1),
        "std": lambda: mnp.std(y, 0),
        "transpose": lambda: mnp.transpose(y),
        "transpose in an order": lambda: mnp.transpose(y, (1, 0)),
        "squeeze": lambda: mnp.squeeze(mnp.expand_dims(y, 1)),
    }


@pytest.mark.parametrize("place", [Shard(0), Shard(1)], ids=str)
def test_values_and_dtypes_are_those_of_the_whole(place):
    """Every function gives a DTensor with NumPy's values."""

    def rank():
        import mindspore
        from mindspore import Tensor

        from hyper_parallel.platform.select import platform_named

        mesh = init_device_mesh("cpu", (platform_named("mindspore").get_world_size(),), mesh_dim_names=("tp",))
        whole = (Tensor(X), Tensor(np.nan_to_num(X, posinf=1.0)[::-1].copy()), Tensor([3, 0, 99], mindspore.int32))
        expected = _calls(*whole)
        x, y = (distribute_tensor(tensor, mesh, [place]) for tensor in whole[:2])
        for name, call in _calls(x, y, distribute_tensor(whole[2], mesh, [Replicate()])).items():
            ours, value = call(), expected[name]()
            assert isinstance(ours, DTensor), name
            assert ours.dtype == value.dtype, name
            assert tuple(ours.shape) == tuple(value.shape), name
            np.testing.assert_allclose(ours.asnumpy(), value.asnumpy(), 1e-5, 1e-6, err_msg=name)

    simulate(rank, 3, "mindspore")


def test_options_without_a_rule_are_refused():
    """Wrapping positions, and constants of another shape."""

    def rank():
        from mindspore import Tensor, numpy as mnp

        from hyper_parallel.platform.select import platform_named

        mesh = init_device_mesh("cpu", (platform_named("mindspore").get_world_size(),), mesh_dim_names=("tp",))
        x = distribute_tensor(Tensor(X), mesh, [Shard(0)])
        with pytest.raises(UnsupportedOperatorError) as taken:
            mnp.take(x, [1], 0, "wrap")
        with pytest.raises(UnsupportedOperatorError) as made:
            mnp.zeros_like(x, shape=(2, 3))
        return [str(taken.value), str(made.value)]

    rest = "redistribute the operands and use to_local()"
    assert simulate(rank, 2, "mindspore")[0] == [
        f"operator numpy.take: mode='wrap' has no sharding rule, mode='clip' has; {rest}",
        f"operator numpy.zeros_like: shape=(2, 3) has no sharding rule, shape=None has; {rest}",
    ]
