"""The place of a run's rows, as keys such as `data.path`, `data.subset` and `data.split` name it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    path: str
    """A file, a folder, a pattern, an address or a name on the hub."""
    key: str
    """Key that names it: `data.path`."""
    subset: str | None = None
    split: str | None = None
    prefix: str = "data."
    """Beginning of the keys that name the subset and the split: `data.eval_`."""
    format: str | None = None
    """`data.format`: "harbor" for a folder of tasks; None: as the place shows."""

    @property
    def subset_key(self) -> str:
        return f"{self.prefix}subset"

    @property
    def split_key(self) -> str:
        return f"{self.prefix}split"

    @property
    def chosen(self) -> str | None:
        """The first key that chooses a part of the place; None if none is given."""
        parts = {self.split_key: self.split, self.subset_key: self.subset}
        return next((key for key, value in parts.items() if value is not None), None)

    def __str__(self) -> str:
        parts = [part for part in (self.subset, self.split) if part is not None]
        return f"'{self.path}'" + (f" ({', '.join(parts)})" if parts else "")
