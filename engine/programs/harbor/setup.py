"""The options of containers, and what all episodes of a process share: the engine, its images, and the places."""

from __future__ import annotations

import functools
import hashlib
import os
import threading
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import UserError
from ...sandbox.containers import Container, ContainerError, Engine
from ..servers.background import BACKGROUND
from .task import Task

STARTS = 4
"""Containers that are started at once."""
HOST = "task"
"""Host name in all containers, so that prompts that tell it share their beginning."""


@dataclass(frozen=True)
class Setup:
    """The options of containers.

    Args:
        engine: ``podman`` or ``docker``, or the words of its command line with global options; None: the one that is
            installed, podman before docker.
        engine_args: options of ``podman run`` or ``docker run`` for each container, such as mounts.
        network: "task": as the task says; "none": no container has one.
        keep_processes: what the agent has started goes on while the tests run, and can see them; otherwise it is ended
            before.
        reward_key: the entry of ``reward.json`` that is the reward.
        containers: the largest number of containers at the same time.

    Raises:
        UserError: an option has another form.
    """

    engine: tuple[str, ...] = ()
    engine_args: tuple[str, ...] = ()
    network: str = "task"
    keep_processes: bool = False
    reward_key: str = "reward"
    containers: int = 16

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Setup:
        values = dict(options)
        if unknown := sorted(set(values) - set(cls.__dataclass_fields__)):
            raise UserError(
                f"Containers have no option '{unknown[0]}'; they take {', '.join(cls.__dataclass_fields__)}."
            )
        engine = values.get("engine") or ()
        for name, words in (
            ("engine", [engine] if isinstance(engine, str) else engine),
            ("engine_args", values.get("engine_args", ())),
        ):
            if isinstance(words, str) or not all(isinstance(word, str) for word in words):
                raise UserError(f"The option `{name}` of containers is {words!r}; give the words as a list.")
            values[name] = tuple(words)
        setup = cls(**values)
        if setup.network not in ("task", "none"):
            raise UserError(f'The option `network` of containers is {setup.network!r}; give "task" or "none".')
        if not isinstance(setup.keep_processes, bool) or not isinstance(setup.reward_key, str):
            raise UserError("The option `keep_processes` of containers is true or false, and `reward_key` a name.")
        if not isinstance(setup.containers, int) or isinstance(setup.containers, bool) or setup.containers < 1:
            raise UserError(f"The option `containers` is {setup.containers!r}; give a number of at least 1.")
        return setup


class Pool:
    """The containers of one setup in this process.

    Raises:
        UserError: there is no such engine.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup, self.engine = setup, Engine(setup.engine)
        self.places = threading.Semaphore(setup.containers)
        self.starts = ThreadPoolExecutor(STARTS, thread_name_prefix="rolltree-container-start")
        self.ends = ThreadPoolExecutor(STARTS, thread_name_prefix="rolltree-container-end")
        self.trials: weakref.WeakSet[Any] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._images: dict[Path, str] = {}
        self._tried: set[tuple[str, ...]] = set()
        BACKGROUND.at_end(self.close)

    def image(self, task: Task) -> str:
        """Return the image of a task, which is built or fetched where it is missing.

        Raises:
            UserError: it cannot be.
        """
        with self._lock:
            if task.folder not in self._images:
                self._images[task.folder] = self._fetched(task)
            return self._images[task.folder]

    def check(self, task: Task, program: str | None = None) -> None:
        """Start a container of a task and end it, unless one with the same image and limits was.

        Args:
            program: must be in the container.

        Raises:
            UserError: the task has no image, or no container of it can be started.
        """
        image, options = self.image(task), self.options(task)
        if (key := (image, program or "", *options)) in self._tried:
            return
        try:
            container = self.engine.container(image, options)
            try:
                self._try(container, task, program)
            finally:
                container.remove()
        except ContainerError as error:
            raise UserError(
                f"{task} has no container: {str(error).rstrip('.')}; mend it, or see the option `engine_args`."
            ) from error
        self._tried.add(key)

    def _try(self, container: Container, task: Task, program: str | None) -> None:
        folder = task.config.environment.workdir
        for user in {task.config.agent.user, task.config.verifier.user}:
            container.run(["true"], 30.0, user=None if user is None else str(user), folder=folder)
        words = ["sh", "-c", 'command -v "$0"', program or "sh"]
        if program is not None and container.run(words, 30.0).code:
            raise ContainerError(f"its image has no program '{program}', which rollout.program_options.command names")

    def options(self, task: Task) -> list[str]:
        """Return the options of a task's container, those of the setup last."""
        environment = task.config.environment
        options = ["--hostname", HOST]
        if not task.network(none=self.setup.network == "none"):
            options += ["--network", "none"]
        if environment.memory_mb is not None:
            options += ["--memory", f"{environment.memory_mb}m", "--memory-swap", f"{environment.memory_mb}m"]
        if environment.cpus is not None:
            options += ["--cpus", f"{environment.cpus:g}"]
        if environment.workdir is not None:
            options += ["--workdir", environment.workdir]
        options += [word for name, value in task.variables.items() for word in ("--env", f"{name}={value}")]
        return [*options, *self.setup.engine_args]

    def close(self) -> None:
        """End all trials, and remove what is left of their containers."""
        for trial in list(self.trials):
            trial.close()
        self.engine.close()

    def _fetched(self, task: Task) -> str:
        environment = task.config.environment
        none = ["--network", "none"] if self.setup.network == "none" else []
        image = environment.docker_image
        built = image is None
        try:
            if image is None:
                context = task.folder / "environment"
                image = f"rolltree-harbor:{_digest(context)}"
                words = ["build", *none, "--tag", image, str(context)]
            else:
                words = ["pull", image]
            if not self.engine.has_image(image):
                self.engine.ask(*words, seconds=environment.build_timeout_sec)
        except ContainerError as error:
            what = "a Dockerfile that cannot be built here" if built else f"the image '{image}', which is not here"
            raise UserError(
                f"{task} has {what} ({str(error).rstrip('.')}); bring what it needs onto this machine first."
            ) from error
        return image


@functools.cache
def pool_of(setup: Setup) -> Pool:
    """Return the pool of this process."""
    return Pool(setup)


def _digest(context: Path) -> str:
    """Return a hash of the files from which an image is built."""
    digest = hashlib.blake2b(digest_size=12)
    for name, file in sorted(_files(context)):
        content = os.readlink(file).encode() if file.is_symlink() else file.read_bytes()
        digest.update(f"{name}\0{file.lstat().st_mode:o}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def _files(context: Path) -> Iterator[tuple[str, Path]]:
    for above, folders, names in os.walk(context):
        links = [name for name in folders if (Path(above) / name).is_symlink()]
        for name in (*names, *links):
            file = Path(above) / name
            yield str(file.relative_to(context)), file
