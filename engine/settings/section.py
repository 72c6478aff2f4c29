"""The base of all tables of the configuration, and the types of their keys."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


PositiveInt = Annotated[int, Field(gt=0, lt=2**31)]  # rows, tokens and steps are counted in 32 bits
NonNegativeInt = Annotated[int, Field(ge=0, lt=2**31)]
Points = tuple[tuple[NonNegativeInt, float], ...]
Schedule = Annotated[float | Points | str, Field(union_mode="left_to_right")]
