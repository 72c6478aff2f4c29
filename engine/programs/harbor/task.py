"""A task in Harbor's format: a folder with ``task.toml``, ``instruction.md``, ``environment/`` and ``tests/``.

The fields of ``task.toml`` are those of Harbor's schema 1.4 and its older spellings. A task that asks for what the run
would not hold is refused; what has no part in a training (names, the solution's variables, artifacts) is not read, nor
are keys of no schema, as in Harbor.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from ...errors import UserError

CONFIG, INSTRUCTION, TEST = "task.toml", "instruction.md", "tests/test.sh"
COLUMN = "harbor"
"""Column of a row with the folder of its task."""
CANARY = re.compile(r"<!--.*canary.*-->|#.*canary.*", re.IGNORECASE)
"""A line at the beginning of an instruction that marks a benchmark, which agents are not shown."""
VARIABLE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}")
SIZES = {"G": 1024, "M": 1, "K": 1 / 1024}

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
User = Annotated[str, Field(min_length=1)] | Annotated[int, Field(ge=0)]
Mode = Literal["public", "no-network", "allowlist"]


class _Section(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class Healthcheck(_Section):
    """A command that must succeed before the container is used, as Docker's HEALTHCHECK; times in seconds."""

    command: str
    interval_sec: Seconds = 5.0
    timeout_sec: Seconds = 30.0
    start_period_sec: Annotated[float, Field(ge=0)] = 0.0
    start_interval_sec: Seconds = 5.0
    retries: Annotated[int, Field(ge=1)] = 3


class Environment(_Section):
    """The container: its image and limits; memory in MB."""

    docker_image: str | None = None
    build_timeout_sec: Seconds = 600.0
    cpus: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    memory_mb: Annotated[int, Field(gt=0)] | None = None
    network_mode: Mode = "public"
    env: dict[str, str] = {}
    workdir: str | None = None
    healthcheck: Healthcheck | None = None
    os: str = "linux"
    gpus: int | None = None
    tpu: Any = None
    mcp_servers: list[Any] = []
    skills_dir: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _older(cls, data: Any) -> Any:
        """Take over ``memory`` = "2G" and ``allow_internet``, the spellings of older schemas."""
        if not isinstance(data, Mapping):
            return data
        data = dict(data)
        memory = data.pop("memory", None)
        if memory is not None and "memory_mb" not in data:
            size = re.fullmatch(r"([\d.]+)\s*([GMK])B?", str(memory).strip().upper())
            if size is None:
                raise ValueError(f"memory = {memory!r} is no size such as '2G'")
            data["memory_mb"] = int(float(size[1]) * SIZES[size[2]])
        allowed = data.pop("allow_internet", None)
        if allowed is not None and "network_mode" not in data:
            data["network_mode"] = "public" if allowed else "no-network"
        return data

    @field_validator("os")
    @classmethod
    def _lower(cls, name: str) -> str:
        return name.lower()


class Agent(_Section):
    """Limits of the agent; ``timeout_sec`` in seconds."""

    timeout_sec: Seconds | None = None
    user: User | None = None
    network_mode: Mode | None = None


class Verifier(_Section):
    """The tests' limits and variables; ``timeout_sec`` in seconds."""

    timeout_sec: Seconds = 600.0
    env: dict[str, str] = {}
    user: User | None = None
    network_mode: Mode | None = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: Any = None
    collect: list[Any] = []


class Config(_Section):
    """The sections of ``task.toml`` that are read."""

    environment: Environment = Environment()
    agent: Agent = Agent()
    verifier: Verifier = Verifier()
    steps: list[Any] | None = None


class Task:
    """A task.

    Args:
        folder: its own.

    Attributes:
        name: of the folder.
        instruction: the text of ``instruction.md`` without lines that mark a benchmark.

    Raises:
        UserError: a file is missing or cannot be read, or the task needs what a run does not have.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.name = folder, folder.name
        for needed in (CONFIG, INSTRUCTION, TEST):
            if not (folder / needed).is_file():
                raise UserError(f"{self} has no file '{needed}'; add it, or take the folder out.")
        try:
            self.instruction = _without_canary((folder / INSTRUCTION).read_text(encoding="utf-8"))
            self.config = Config.model_validate(tomllib.loads((folder / CONFIG).read_text(encoding="utf-8")))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise UserError(f"{self} cannot be read: {str(error).rstrip('.')}.") from error
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise UserError(f"{self} has a '{CONFIG}' that cannot be used: {where}: {first['msg']}.") from error
        for what, remedy in self._not_held():
            raise UserError(f"{self} {what}, which a run does not have; {remedy}.")
        self.variables = {name: self._resolved(value) for name, value in self.config.environment.env.items()}
        self.test_variables = {name: self._resolved(value) for name, value in self.config.verifier.env.items()}

    def __str__(self) -> str:
        return f"The task '{self.folder}'"

    def network(self, *, none: bool) -> bool:
        """Return whether the container has a network.

        Args:
            none: the run allows none, whatever the task says.

        Raises:
            UserError: the task has an allowlist, or one for the agent or the tests alone.
        """
        if none:
            return False
        config = self.config
        modes = {config.environment.network_mode, config.agent.network_mode, config.verifier.network_mode} - {None}
        if modes - {"public", "no-network"} or len(modes) > 1:
            raise UserError(
                f'{self} allows some addresses, or the agent and the tests others; give network = "none" to allow none.'
            )
        return config.environment.network_mode == "public"

    def _not_held(self) -> Iterator[tuple[str, str]]:
        """Yield what the task asks for in vain, and what helps."""
        environment, verifier = self.config.environment, self.config.verifier
        context = self.folder / "environment"
        if self.config.steps:
            yield "has several steps", "make a task of each"
        if (context / "docker-compose.yaml").exists() or (context / "docker-compose.yml").exists():
            yield "has several containers (docker-compose)", "give it a Dockerfile, or take it out"
        if environment.docker_image is None and not (context / "Dockerfile").is_file():
            yield "has neither environment.docker_image nor environment/Dockerfile for an image", "give it one"
        if environment.os != "linux":
            yield f"has os = '{environment.os}'", "take it out"
        if environment.gpus or environment.tpu is not None:
            yield "asks for a GPU or TPU in the container", "take it out"
        if environment.mcp_servers or environment.skills_dir is not None:
            yield "gives the agent mcp_servers or skills_dir", "take these out of its environment"
        separate = verifier.environment_mode == "separate"
        if separate or verifier.environment is not None or verifier.collect:
            yield "verifies in another container (verifier.environment, environment_mode, collect)", "take it out"

    def _resolved(self, value: str) -> str:
        """Return the value of a variable, ``${NAME}`` or ``${NAME:-default}`` taken from the run's environment.

        Raises:
            UserError: the run has no such variable.
        """
        template = VARIABLE.fullmatch(value)
        if template is None:
            return value
        name, default = template.groups()
        if name not in os.environ and default is None:
            raise UserError(f"{self} takes the variable '{name}' from the run's environment; set it.")
        return os.environ.get(name, default or "")


def _without_canary(text: str) -> str:
    lines = text.split("\n")
    while lines and CANARY.fullmatch(lines[0].strip()):
        del lines[0]
    return "\n".join(lines).strip("\n")


def find_tasks(root: Path, depth: int = 6) -> Iterator[Path]:
    """Yield the folders below ``root``, or itself, that hold a ``task.toml``; hidden ones and links are left out."""
    if (root / CONFIG).is_file():
        yield root
        return
    for folder in sorted(root.iterdir()) if depth else ():
        if folder.is_dir() and not folder.is_symlink() and not folder.name.startswith("."):
            yield from find_tasks(folder, depth - 1)
