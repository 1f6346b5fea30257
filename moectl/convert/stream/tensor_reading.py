"""Whole tensors on their way from files to a device."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ...files.tensor_table import TensorInfo
from ...lazy_torch import Tensor, torch
from ...torch_dtypes import TORCH_DTYPES
from .file_transfers import Filling, Transfer, begin, flat
from .source_reader import FolderReader


class TensorReading:
    """The tensors at `locations` in `folder`, allocated on `device`, which threads are reading.

    One that is not wanted any more is stopped, at the latest when nothing refers to it.
    """

    def __init__(self, folder: Path, locations: Mapping[str, TensorInfo], device: torch.device) -> None:
        self._filling: Filling | None = None
        self._reader = FolderReader(folder)
        self._tensors = {
            role: torch.empty(info.shape, dtype=TORCH_DTYPES[info.dtype], device=device)
            for role, info in locations.items()
        }
        try:
            transfers = (
                Transfer(info.file, info.start, info.nbytes, flat(self._tensors[role]))
                for role, info in locations.items()
            )
            self._filling = begin(self._reader, transfers, device)
        except BaseException:
            self.stop()
            raise

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by the keys of `locations`, once and complete; CheckpointError for a short file."""
        filling, tensors = self._filling, self._tensors
        assert filling is not None, "tensors are given once"
        try:
            filling.finish()
        finally:
            self._filling = None
            self.stop()
        return tensors

    def stop(self) -> None:
        """Ends reading, and lets go of the tensors."""
        filling, self._filling = self._filling, None
        if filling is not None:
            filling.stop()
        self._reader.__exit__(None, None, None)
        self._tensors = {}

    def __del__(self) -> None:
        if getattr(self, "_filling", None) is None:
            return
        # Collected in any thread, perhaps in one of those that read, which must not wait for itself.
        with suppress(RuntimeError):  # at the end of the process
            threading.Thread(
                target=_stop, args=(self._filling, self._reader, self._tensors), name="stop reading"
            ).start()


def _stop(filling: Filling, reader: FolderReader, tensors: Mapping[str, Tensor]) -> None:
    """Ends reading; `tensors` live until nothing writes to them."""
    filling.stop()
    reader.__exit__(None, None, None)
