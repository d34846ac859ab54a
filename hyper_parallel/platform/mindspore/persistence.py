"""Facet *persistence* on MindSpore."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import mindspore
from mindspore import Parameter, ops

from hyper_parallel.errors import CheckpointError
from hyper_parallel.platform.contract.persistence import PersistenceFacet
from hyper_parallel.transport.real.mindspore.transport import from_host, to_host

__all__ = ["MindSporePersistence"]

# The checksum at the end of a file: ``crc_num``, then the number in ten bytes.
_CHECKSUM_BYTES = 17


class MindSporePersistence(PersistenceFacet):
    """State dicts and files of MindSpore."""

    own_format = "ckpt"
    DTensorBase: Any
    direct_parameters: Callable[[Any], dict[str, Any]]
    direct_buffers: Callable[[Any], dict[str, Any]]
    get_cells_and_names: Callable[[Any], Iterable[tuple[str, Any]]]

    def _state(self, model: Any, *, ignore_frozen: bool) -> dict[str, Any]:
        """Return the parameters by path, as PyTorch does, not by ``Parameter.name``."""
        state: dict[str, Any] = {}
        for path, cell in self.get_cells_and_names(model):
            prefix = f"{path}." if path else ""
            for name, parameter in self.direct_parameters(cell).items():
                if not (ignore_frozen and not parameter.requires_grad):
                    state[prefix + name] = self._detached(parameter)
            skipped = cell._non_persistent_buffers_set
            for name, buffer in self.direct_buffers(cell).items():
                if name not in skipped:
                    state[prefix + name] = self._detached(buffer)
        return state

    def _detached(self, value: Any) -> Any:
        return value.detach() if isinstance(value, self.DTensorBase) else ops.stop_gradient(value)

    def _on_host(self, value: Any) -> Any:
        return value if str(value.device).startswith("CPU") or isinstance(value, self.DTensorBase) else value.to("CPU")

    def _to_host(self, value: Any) -> Any:
        return to_host(value)

    def _from_host(self, array: Any) -> Any:
        return from_host(array)

    def _save_own(self, state: dict[str, Any], path: Path) -> None:
        """Save with ``mindspore.save_checkpoint``, which requires the suffix ``.ckpt`` and omits empty tensors.

        A checksum is added at the end: without one, a file that is truncated between two tensors loads as fewer
        tensors.
        """
        if empty := [name for name, value in state.items() if 0 in value.shape]:
            msg = f"save_checkpoint: ckpt files hold no empty tensors ({', '.join(empty)}); use safetensors"
            raise CheckpointError(msg)
        suffixed = path.with_name(path.name + ".ckpt")
        listed = [{"name": name, "data": self._detached(value)} for name, value in state.items()]
        try:
            mindspore.save_checkpoint(listed, str(suffixed), crc_check=True)
            suffixed.replace(path)
        except BaseException:  # if the disk is full, MindSpore leaves its own temporary file, incomplete
            for left in path.parent.iterdir():
                if left.name.startswith(path.name):
                    left.unlink()
            raise

    def _load_own(self, path: Path) -> dict[str, Any]:
        """Check that the file has a checksum; load it with ``mindspore.load_checkpoint``, which requires ``.ckpt``."""
        if not _has_checksum(path):
            msg = (
                f"load_checkpoint: {path} has no checksum at its end: it is truncated, of another format, or "
                "mindspore.save_checkpoint wrote it without crc_check=True; load another copy, or save it with "
                "crc_check=True"
            )
            raise CheckpointError(msg)
        with tempfile.TemporaryDirectory() as folder:
            linked = Path(folder) / "linked.ckpt"
            linked.symlink_to(path.absolute())
            try:
                values = mindspore.load_checkpoint(str(linked), crc_check=True)
            except (ValueError, TypeError, RuntimeError) as error:
                msg = (
                    f"load_checkpoint: {path} is not a complete file of mindspore.save_checkpoint: its checksum or its "
                    f"content is wrong; load another copy"
                )
                raise CheckpointError(msg) from error
        return {
            name: from_host(to_host(value).copy()) if isinstance(value, Parameter) else value
            for name, value in values.items()
        }


def _has_checksum(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _CHECKSUM_BYTES))
        return file.read().startswith(b"crc_num")
