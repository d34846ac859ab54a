"""Computes fingerprints of PyTorch tensors on their devices; ``contract/fingerprint.py`` defines them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import distributed

from hyper_parallel.verify.frameworks.contract.fingerprint import NUMBERS, grid, numbers_of, places, signs

__all__ = ["TorchFingerprints"]

_SINGLE = (torch.float32, torch.bfloat16, torch.float16)
_WITHOUT_DOUBLE = ("mps", "npu", "xpu")
"""Types of devices without float64, or with slow float64."""


class TorchFingerprints:
    """Computes the numbers of fingerprints on the tensors' devices; only :meth:`numbers` synchronizes."""

    def __init__(self) -> None:
        self._signs: dict[tuple[str, int, Any], Any] = {}
        self._places: dict[tuple[int, Any], Any] = {}

    def of(self, tensor: Any) -> Any:
        """Return the fingerprint of a tensor: a vector on the tensor's device, or a NumPy array for a host tensor.

        Args:
            tensor: strided tensor of any dtype.
        """
        if tensor.dtype is torch.float32 and tensor.device.type == "cpu":
            return numbers_of(_array(tensor.reshape(-1)))
        with torch.no_grad():
            flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
            wide = torch.float32 if flat.device.type in _WITHOUT_DOUBLE else torch.float64
            flat = flat.to(torch.float32 if flat.dtype in _SINGLE else wide)
            if flat.device.type == "cpu":
                return numbers_of(_array(flat))
            return self.on_device(flat, wide)

    def on_device(self, flat: Any, wide: Any) -> Any:
        """Compute :func:`~hyper_parallel.verify.frameworks.contract.fingerprint.numbers_of` on a device in few calls.

        Args:
            flat: floating-point tensor of one dim.
            wide: dtype of sums.
        """
        size, device = flat.numel(), flat.device
        if not size:
            return torch.zeros(len(NUMBERS), dtype=wide, device=device)
        rows, columns = grid(size)
        main, rest = flat[: rows * columns].view(rows, columns), flat[rows * columns :].to(wide)
        row_signs, column_signs = self._of("rows", rows + 1, device), self._of("columns", columns, device)
        norms = torch.linalg.vector_norm(main, dim=1).to(wide)  # norms of rows first, which is more exact in float32
        norm = torch.linalg.vector_norm(torch.cat([norms, rest]))
        total = main.sum(1).to(wide).sum() + rest.sum()
        least, most = torch.aminmax(flat)
        missing = (~torch.isfinite(flat)).sum()
        summed = (row_signs[:rows].to(flat.dtype) @ main).to(wide)
        summed[: rest.numel()] += row_signs[rows] * rest
        projections = column_signs.to(wide) @ summed
        some = flat[self._chosen(size, device)].to(wide)
        first = torch.stack([norm, total, least.to(wide), most.to(wide), missing.to(wide)])
        return torch.cat([first, projections, some])

    def numbers(self, vectors: Sequence[Any]) -> list[list[float]]:
        """Return the results of :meth:`of` as lists; all vectors of a device are copied together."""
        found = [vector.tolist() if isinstance(vector, np.ndarray) else [] for vector in vectors]
        for device in {vector.device for vector in vectors if isinstance(vector, torch.Tensor)}:
            own = [number for number, vector in enumerate(vectors) if vector.device == device]
            values = torch.stack([vectors[number] for number in own]).cpu().tolist()
            for number, value in zip(own, values, strict=True):
                found[number] = value
        return found

    def array(self, tensor: Any) -> Any:
        """Return all elements of a tensor as a NumPy array, half precision as float32."""
        plain = tensor.detach().float() if tensor.dtype in _SINGLE else tensor.detach()
        return (plain.clone() if plain.data_ptr() == tensor.data_ptr() else plain).numpy(force=True)

    def dtype(self, tensor: Any) -> str:
        """Return the name of a tensor's dtype."""
        return str(tensor.dtype).removeprefix("torch.")

    def world(self) -> tuple[int, int] | None:
        """Return rank and size of the process's default group; None without one."""
        if not distributed.is_available() or not distributed.is_initialized():
            return None
        return distributed.get_rank(), distributed.get_world_size()

    def facts(self) -> dict[str, str]:
        """Return PyTorch's version and its default dtype."""
        dtype = str(torch.get_default_dtype()).removeprefix("torch.")
        return {"framework": f"torch {torch.__version__}", "dtype": dtype}

    def _of(self, name: str, count: int, device: Any) -> Any:
        full = 1 << max(count - 1, 1).bit_length()
        if (name, full, device) not in self._signs:
            self._signs[name, full, device] = torch.from_numpy(signs(name, full).copy()).to(device=device)
        return self._signs[name, full, device][..., :count]

    def _chosen(self, size: int, device: Any) -> Any:
        if (size, device) not in self._places:
            self._places[size, device] = torch.tensor(places(size), device=device)
        return self._places[size, device]


def _array(tensor: torch.Tensor) -> Any:
    """Return a tensor's memory through DLPack; after ``numpy()``, the program could not resize the storage."""
    array: Any = np.from_dlpack(tensor.detach())
    return array
