"""Stages of a training: runs one after another, each from the model that the one before exported.

A file's ``[[stages]]`` are tables with a ``name`` and keys of the configuration. A stage's keys are: defaults < recipe
of the file < file < recipe of the stage < stage < flags. Its run is called ``<name>_<name of the stage>``, and has a
directory, an optimiser and a reference of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..settings import TrainConfig
from .config import checked, load_config, put, read_tables
from .recipes import combined, read_recipe

EXPORT = "export"
"""Folder of a run's directory with the trained model."""


def load_stages(path: str | Path, overrides: Sequence[str] | Sequence[tuple[str, str]] = ()) -> list[TrainConfig]:
    """Return the configurations of a file's stages, in their order; one configuration if it has no stages.

    Raises:
        UserError: as `load_config`, or a stage has no name of its own or a key that stages do not have.
    """
    path = Path(path)
    data, flags, values = read_tables(path, overrides)
    stages = data.pop("stages", None)
    if not stages:
        return [load_config(path, overrides)]
    if not isinstance(stages, list) or not all(isinstance(s, dict) and isinstance(s.get("name"), str) for s in stages):
        raise UserError(f"'{path}': `stages` must be a list of tables, each with a `name`.")
    names = [stage["name"] for stage in stages]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"'{path}': two of `stages` are called '{twice[0]}'; give each a name of its own.")
    configs: list[TrainConfig] = []
    for stage in stages:
        tables = copy.deepcopy(_of_stage(data, stage, path))
        for key, value in values.items():
            put(tables, key, value)
        tables["name"] = f"{tables.get('name', '')}_{stage['name']}"
        if configs:
            model = {key: value for key, value in tables.get("model", {}).items() if key != "create"}
            tables["model"] = model | {"path": str(configs[-1].run_dir / EXPORT)}
        configs.append(checked(tables, path, flags))
    return configs


def _of_stage(data: dict[str, Any], stage: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the keys of the file's tables and of one stage, without the stage's name."""
    stage_keys = {key: value for key, value in stage.items() if key != "name"}
    kept = [key for key in stage_keys if key in ("stages", "output_dir")]
    model = stage_keys.get("model")
    kept += [f"model.{key}" for key in ("path", "create") if isinstance(model, dict) and key in model]
    if kept:
        raise UserError(
            f"'{path}': the stage '{stage['name']}' has `{kept[0]}`, which all stages have in common; put it above "
            "them."
        )
    tables = {key: value for key, value in data.items() if key != "recipe"}
    if isinstance(recipe := stage_keys.get("recipe"), str):
        keys = read_recipe(recipe).keys
        if "stages" in keys:
            raise UserError(
                f"'{path}': the stage '{stage['name']}' has the recipe '{recipe}', which has stages itself."
            )
        tables = combined(tables, keys)
    return combined(tables, stage_keys)
