"""Decides whether the pages keep their memory during an update.

The peak of the process's memory in one update tells whether the pages fit beside the trainer in the next one.
"""

from __future__ import annotations

from typing import Literal

import torch

SPARE = 0.1
"""Share of the device's memory that stays free beside pages and trainer."""


class PagesAtRest:
    """Decides for one engine.

    Args:
        keep: "auto" to decide by the updates so far; a GPU has room for both or not, and a CPU frees its pages.
        apart: the pages' memory is not PyTorch's (`addresses`), whose counts leave it out.
    """

    def __init__(self, device: torch.device, keep: bool | Literal["auto"], *, apart: bool = False) -> None:
        self._device, self._keep, self._apart = device, keep, apart
        self._most: int | None = None  # bytes that the process reserved in an update, pages aside

    def keeps(self, pages: int) -> bool:
        """Return whether ``pages`` bytes of pages stay in the next update."""
        if self._keep != "auto":
            return self._keep
        if self._device.type != "cuda" or self._most is None:
            return False
        free, total = torch.cuda.mem_get_info(self._device)
        others = total - free - torch.cuda.memory_reserved(self._device) - (pages if self._apart else 0)
        return others + self._most + pages <= (1 - SPARE) * total

    def begin(self) -> None:
        """Begin to watch an update."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def end(self, pages: int) -> None:
        """Note the peak of the update that ends, during which ``pages`` bytes of pages were on the device."""
        if self._device.type == "cuda":
            counted = 0 if self._apart else pages
            self._most = max(self._most or 0, torch.cuda.max_memory_reserved(self._device) - counted)
