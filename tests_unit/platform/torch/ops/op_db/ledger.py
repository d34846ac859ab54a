"""The ledger of the operator database: which entries PyTorch itself added and removed, by version."""

from collections.abc import Sequence

ENTRIES = {"2.10": 672, "2.12": 672, "2.13": 677, "2.14": 678, "2.15": 678}
"""Entries that take float32, in the versions that were swept."""

NEW = {
    "bmm.triton_optimized": "2.13",
    "native_group_norm": "2.13",
    "nn.functional.linear_cross_entropy": "2.13",
    "nn.functional.linear_cross_entropy.chunked": "2.13",
    "nn.functional.linear_cross_entropy.chunked_none": "2.13",
    "linalg.matrix_sqrth": "2.14",
    "linalg.polar": "2.14",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu": "2.14",
}
"""The version that added an entry."""

GONE = {"cholesky": "2.14", "qr": "2.14"}
"""The version that removed an entry: `torch.linalg` has both."""


def unexplained(version: str, names: Sequence[str]) -> list[str]:
    """Return, in words, what the ledger does not explain of the entries of a version of PyTorch.

    Args:
        version: such as ``2.14.1+cu130``; nothing is known of what versions newer than the ledger's change.
        names: of the entries that take float32.
    """
    here = _minor(version)
    wrong = [f"{name} is there, and {since} added it" for name, since in NEW.items() if here < _minor(since)]
    wrong += [f"{name} is there, and {since} removed it" for name, since in GONE.items() if here >= _minor(since)]
    lost = [f"{name} is not there, and {since} added it" for name, since in NEW.items() if here >= _minor(since)]
    lost += [
        f"{name} is not there, and only {since} removed it" for name, since in GONE.items() if here < _minor(since)
    ]
    problems = [text for text in wrong if text.partition(" ")[0] in names]
    problems += [text for text in lost if text.partition(" ")[0] not in names]
    known = max((each for each in ENTRIES if _minor(each) <= here), key=_minor, default=None)
    if known is not None and len(names) != ENTRIES[known]:
        problems.append(
            f"there are {len(names)} entries, and {ENTRIES[known]} in {known}: add those that changed to ledger.py"
        )
    return [f"PyTorch {version}: {problem}" for problem in problems]


def _minor(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))
