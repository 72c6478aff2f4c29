"""Starts the run's other processes: rollout engines, ranks and reward hosts."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from transformers import set_seed

from ...errors import UserError
from ...fleet.fleet import Fleet
from ...fleet.host import Host
from ...fleet.hosted import HostedRewards
from ...fleet.questions import Questions
from ...fleet.rank import Rank
from ...fleet.ranks import Ranks
from ...fleet.workers import Reference, Role, Workers
from ...learn.learning import LearningParts
from ...loop.items import decode
from ...model.loading import choose_device, load_tokenizer, read_config
from ...openmp import release_threads
from ...parts.context import Context
from ...rewards import ProgramVerifier, make_rewards
from ...settings import TrainConfig
from ...settings.capabilities import PARTS, Part, refuse
from ...train.group import Group
from .checks import check_split
from .learning import learning_parts
from .methods import TERMS, Methods
from .sampling import check_backend, load_policy, make_engine, rollout_program

INTERPRETER_S = 120.0
"""Seconds that another interpreter may take to import Ray."""


def check_workers(config: TrainConfig) -> None:
    """Check that other processes can be started if the run asks for them.

    Raises:
        UserError: Ray is not installed, or `rollout.python` cannot run engines.
    """
    processes = {"rollout.engines": config.rollout.most_engines, "reward.hosts": config.reward.hosts}
    for key, count in processes.items():
        if count and importlib.util.find_spec("ray") is None:
            raise UserError(
                f"{key} = {count} needs Ray, which is not installed; install rolltree[ray], or set it to 0."
            )
    if config.rollout.python and not config.placement.cluster:  # the nodes of a cluster have files of their own
        check_interpreter(config.rollout.python, config.rollout.backend)


HELD = """
import importlib.metadata, importlib.util, sys
import ray
print(".".join(map(str, sys.version_info[:2])), importlib.metadata.version("ray"))
print(*(name for name in sys.argv[1:] if importlib.util.find_spec(name) is None))
"""
"""Prints the versions of Python and Ray of an interpreter, and which of the named modules it lacks."""


def check_interpreter(python: str, backend: str) -> None:
    """Check that ``python`` can run engines of this process, whose Python and Ray it must have.

    Raises:
        UserError: it cannot.
    """
    modules, extras = ["rolltree.engine"], "rolltree[ray]"
    if backend == "vllm":
        modules, extras = [*modules, "vllm"], "rolltree[ray,vllm]"
    try:
        said = subprocess.run([python, "-c", HELD, *modules], capture_output=True, text=True, timeout=INTERPRETER_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"rollout.python = '{python}' cannot be started ({error}); name an interpreter.") from None
    lines = said.stdout.splitlines()
    if said.returncode or len(lines) != 2:
        reason = (said.stderr.splitlines() or ["it prints nothing"])[-1]
        raise UserError(
            f"rollout.python = '{python}' cannot run engines ({reason}); install {extras} in its environment."
        )
    versions = f"{'.'.join(map(str, sys.version_info[:2]))} {importlib.metadata.version('ray')}"
    if lines[0] != versions:
        raise UserError(
            f"rollout.python = '{python}' has Python and Ray {lines[0]} and the run has {versions}; Ray needs the same "
            "on both sides."
        )
    if lines[1]:
        raise UserError(f"rollout.python = '{python}' has no {lines[1]}; install {extras} in its environment.")


def make_workers(config: TrainConfig) -> Workers | None:
    """Return what starts the run's other processes, with room for them in Ray; None if it has none.

    Raises:
        UserError: Ray is not installed, cannot be started or has no room for them.
    """
    check_workers(config)
    needs: dict[Role, tuple[Mapping[str, float], int]] = {}
    least: dict[Role, int] = {}
    if config.rollout.most_engines:
        needs["engine"] = config.placement.per_engine or _usual_resources(config), config.rollout.most_engines
    if config.rollout.least_engines is not None:
        least["engine"] = config.rollout.least_engines
    if config.trainer.ranks > 1:
        needs["rank"] = per_rank(config), config.trainer.ranks
    if config.reward.hosts:
        needs["reward"] = {"CPU": float(config.reward.workers)}, config.reward.hosts
    if not needs:
        return None
    from ...fleet.ray import RayWorkers

    return RayWorkers(needs, config.placement.cluster, {"engine": config.rollout.python}, least)


def per_rank(config: TrainConfig) -> Mapping[str, float]:
    """Return Ray's resources of a rank."""
    return config.placement.per_rank or _usual_resources(config)


def _usual_resources(config: TrainConfig) -> Mapping[str, float]:
    on_cpu = choose_device(config.model.device).type == "cpu"
    return {"CPU": 1.0} if on_cpu else {"GPU": 1.0, "CPU": 4.0}


def make_fleet(
    config: TrainConfig, workers: Workers, note: Callable[[str], object], hosted: HostedRewards | None = None
) -> Fleet:
    """Start the run's engines in other processes, without waiting for them.

    Args:
        note: called with sentences for the user.
        hosted: answers the rollout programs that judge; None if each engine's process has a verifier for them.
    """
    check_backend(config.rollout)
    placement = config.placement
    return Fleet(
        workers,
        config.rollout.most_engines,
        engine_host,
        config,
        hang_s=placement.hang_s,
        start_s=placement.start_s,
        restarts=placement.restarts,
        sends_changes=config.rollout.send_changes,
        judge=None if hosted is None else partial(hosted.ask, "score"),
        least=config.rollout.least_engines,
        stores=config.trainer.ranks > 1,
        tells_texts=hosted is None,
        note=note,
    )


def make_reward_hosts(config: TrainConfig, workers: Workers) -> HostedRewards:
    """Start the run's reward hosts, without waiting for them."""
    placement = config.placement
    return HostedRewards(
        config.reward,
        config.data.tasks,
        workers,
        hang_s=placement.hang_s,
        start_s=placement.start_s,
        restarts=placement.restarts,
    )


def make_ranks(config: TrainConfig, workers: Workers, note: Callable[[str], object]) -> Ranks:
    """Start the run's ranks in other processes, without waiting for them.

    Raises:
        UserError: the model's configuration cannot be read, or as `check_split`.
    """
    check_split(config, read_config(config.model.path))
    return Ranks(
        workers,
        config.trainer.ranks,
        training_rank,
        config,
        max_tokens=config.trainer.max_tokens,
        timeout_s=config.trainer.timeout_s,
        start_s=config.placement.start_s,
        restarts=config.placement.restarts,
        mirrors=config.trainer.mirror,
        note=note,
    )


def training_rank(
    config: TrainConfig, put: Callable[[Any], Reference], index: int, count: int, max_tokens: int
) -> Rank:
    """Make rank ``index`` of ``count`` with micro-batches of ``max_tokens``; called in the rank's process, in which
    ``put`` stores values for all."""
    host = None
    if config.placement.cluster:
        from ...fleet.ray import node_address

        host = node_address()
    trainer = config.trainer.model_copy(update={"max_tokens": max_tokens})
    return Rank(
        partial(_rank_parts, config.model_copy(update={"trainer": trainer})),
        put,
        index,
        count,
        timeout_s=trainer.timeout_s,
        threads=max(1, round(per_rank(config).get("CPU", 1))),
        host=host,
    )


def _rank_parts(config: TrainConfig, group: Group) -> LearningParts:
    set_seed(config.seed)
    methods = Methods.make(config, Context(load_tokenizer(config.model.path)))
    parts = learning_parts(methods, load_policy(config), group, own_weights=True)
    for key in parts.stateful:
        refuse(PARTS, Part(config, key, key, has_state=key.startswith(TERMS)))
    return parts


def engine_host(config: TrainConfig) -> Host:
    """Make an engine of a run, with its rollout program and the verifier that this may use, and the thread that steps
    it; called in the engine's process."""
    tokenizer = load_tokenizer(config.model.path)
    model = None
    if config.rollout.backend == "native":
        set_seed(config.seed)  # for the adapter, which is the trained one before the first update
        model = load_policy(config).requires_grad_(False).eval()
    engine = make_engine(config, model, tokenizer)
    release_threads()  # the engine computes in the host's thread
    program = rollout_program(config.rollout)
    if config.reward.hosts:
        questions = Questions()
        return Host(engine, program.with_verifier(questions), partial(decode, tokenizer), questions=questions)
    verifier = ProgramVerifier(make_rewards(config.reward, config.data.tasks, roles=program.roles), starts=True)
    return Host(engine, program.with_verifier(verifier), partial(decode, tokenizer))
