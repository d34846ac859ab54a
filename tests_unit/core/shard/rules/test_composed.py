"""Functions without a rule of their own: PyTorch decomposes them into operators that have rules."""

import pytest
import torch
import torch.nn.functional as F

from hyper_parallel.core.dtensor.placements import Replicate

pytestmark = pytest.mark.platforms("torch")


COMPOSED = {
    "kron": (torch.kron, (3, 2), (2, 3)),
    "tensordot": (lambda x, y: torch.tensordot(x, y, dims=([1], [0])), (3, 4), (4, 5)),
    "inner": (torch.inner, (3, 4), (5, 4)),
    "multi_dot": (lambda x, y, z: torch.linalg.multi_dot([x, y, z]), (3, 4), (4, 5), (5, 2)),
    "vecdot": (torch.linalg.vecdot, (3, 4), (3, 4)),
    "atleast_2d": (torch.atleast_2d, (4,)),
    "dstack": (lambda x, y: torch.dstack([x, y]), (4, 3), (4, 3)),
    "column_stack": (lambda x, y: torch.column_stack([x, y]), (4,), (4,)),
    "hsplit": (lambda x: torch.hsplit(x, 2), (3, 4)),
    "fliplr": (torch.fliplr, (3, 4)),
    "ravel": (torch.ravel, (3, 4)),
    "glu of nothing": (lambda x: F.glu(x, 0) + x.sum(), (0, 3)),
    "kl_div of one number": (lambda x, y: F.kl_div(x, y, reduction="batchmean", log_target=True), (), ()),
    "group_norm of rows": (lambda x, weight, bias: F.group_norm(x, 2, weight, bias, 1.0) + x, (4, 2), (2,), (2,)),
    "pdist of a transposed": (lambda x: F.pdist(x.mT), (4, 3)),
    "torch.embedding": (torch.embedding, (5, 3), (5, (4,))),
    "normalize": (lambda x: F.normalize(x, dim=-1), (3, 4)),
    "cosine_similarity": (F.cosine_similarity, (3, 4), (3, 4)),
    "attention with weights": (
        lambda x, w, ow: F.multi_head_attention_forward(
            x, x, x, 4, 2, w, None, None, None, False, 0.0, ow, None, need_weights=True
        ),
        (5, 3, 4), (12, 4), (4, 4),
    ),
    # Without a bias of the keys: its true gradient is zero, and what remains is rounding.
    "attention": (
        lambda x, w, ow, ob: F.multi_head_attention_forward(
            x, x, x, 4, 2, w, None, None, None, False, 0.0, ow, ob, need_weights=False
        )[0],
        (5, 3, 4), (12, 4), (4, 4), (4,),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COMPOSED)
@pytest.mark.untraced
def test_composed(holds, name):
    """A function composed of operators with rules has the plain values and gradients of every input."""
    holds(COMPOSED[name][0], *COMPOSED[name][1:], limits={(2,): 16, (3,): 5, (2, 2): 4})


UNRULED = {
    "bilinear": (F.bilinear, (5, 3), (5, 4), (2, 3, 4)),
    "rot90": (torch.rot90, (4, 5)),
    "matrix_exp": (torch.linalg.matrix_exp, (3, 3)),
}


@pytest.mark.parametrize("name", UNRULED)
def test_right_or_refused(name):
    """If a part has no rule, sharded operands are refused by name and replicated ones are computed."""
    import numpy as np

    from hyper_parallel.verify.checker.function import check_function

    fn, *shapes = UNRULED[name]
    arrays = [np.random.default_rng(number).standard_normal(shape) for number, shape in enumerate(shapes)]
    report = check_function(fn, arrays, (2,), platform="torch", limit=12)
    assert not report.wrong
    assert all("has no sharding rule (layouts: " in line for line in report.rejected)
    whole = [[(Replicate(),)]] * len(arrays)
    assert check_function(fn, arrays, (2,), platform="torch", placements=whole).all_held
