"""MindSpore's platform refuses members that only PyTorch has."""

from __future__ import annotations

import sys

import pytest

from hyper_parallel.errors import (
    MeshError,
    UnsupportedOnBackend,
)
from hyper_parallel.platform.select import platform_named

pytestmark = pytest.mark.platforms("mindspore")


def test_what_only_another_framework_has_is_refused():
    """Conversions that need PyTorch's own DTensor are refused with the reason."""
    platform = platform_named("mindspore")
    with pytest.raises(UnsupportedOnBackend) as caught:
        platform.from_torch(3)
    assert str(caught.value) == "from_torch: expected a torch.distributed.tensor.DTensor, got a int"


def test_what_the_rehearsal_does_not_take_is_refused(monkeypatch):
    """A gloo world refuses options of HCCL and missing rank, size or address by name."""
    platform = platform_named("mindspore")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(UnsupportedOnBackend, match=r"^MCCL, MindSpore's engine on CPU, is refused: it silently "):
        platform.init_process_group("mccl", rank=0, world_size=1)
    with pytest.raises(UnsupportedOnBackend, match=r"^backend 'nccl' is not a backend of MindSpore; use 'hccl'$"):
        platform.init_process_group("nccl")
    with pytest.raises(UnsupportedOnBackend) as caught:
        platform.init_process_group("gloo", rank=0, world_size=1, store=object(), device_id=0)
    assert str(caught.value) == (
        "init_process_group: the CPU rehearsal over gloo takes no store, device_id; leave them out"
    )
    with pytest.raises(MeshError) as caught:
        platform.init_process_group("gloo", rank=0)
    assert str(caught.value) == (
        "init_process_group: world_size is not given, and no launcher set WORLD_SIZE; pass world_size="
    )


@pytest.mark.parametrize("error", [ImportError, SystemError, TypeError])
def test_the_first_call_on_numpy_2_fails_in_no_call_of_users(error, capsys):
    """MindSpore's search for NumPy 1 fails once, in a call of the library's own, and prints nothing."""
    from hyper_parallel.platform.mindspore.platform import find_numpy

    class Searching:
        calls = ()

        def reshape(self, shape):
            self.calls += (shape,)
            sys.stderr.write("A module that was compiled using NumPy 1.x cannot be run in NumPy 2.4.6\n")
            raise error

    tensor = Searching()
    find_numpy(tensor)
    assert tensor.calls == ("",)
    assert capsys.readouterr().err == ""


def test_mindspore_computes_nothing_where_it_looks_for_numpy():
    """The call has an argument of a wrong type, which MindSpore rejects before it starts a device."""
    import mindspore

    with pytest.raises(TypeError, match=r"^(Failed calling )?reshape"):
        mindspore.Tensor(0.0).reshape("")
