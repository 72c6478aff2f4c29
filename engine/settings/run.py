"""The configuration of a run: all keys, checked against each other."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from .capabilities import OF_KEYS, refuse
from .keys import RunKeys


class TrainConfig(RunKeys):
    """The configuration of a run, read from its TOML file and the command line."""

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        refuse(OF_KEYS, self)
        return self
