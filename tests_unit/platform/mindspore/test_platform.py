"""MindSpore's platform refuses members that only PyTorch has."""

from __future__ import annotations

import pytest

from hyper_parallel.errors import (
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
