"""Checks that find errors before a run makes its directory, loads a model or spends hours.

`rolltree train` and ``--dry-run`` make the same checks, so that neither accepts what the other refuses.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Collection, Sequence
from contextlib import suppress

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rolltree.kernels import LogprobTerm, policy_loss

from ...batches.batch import TreeBatch
from ...batches.pack import pack
from ...data.columns import Array
from ...data.segment import LeafStatus, Origin, Segment
from ...data.tree import TokenTree
from ...errors import UserError
from ...methods.credit import Credit, CreditFunction, give_credit
from ...model.losses.distillation import Distilled
from ...model.pictures import family_of, placeholders
from ...parts.calling import ask, call
from ...parts.context import NotReadyError
from ...programs import GroupState, RolloutProgram
from ...prompts.prompts import Prompt
from ...prompts.sources import PromptSource
from ...settings import DemonstrationsConfig, TrainConfig
from ...settings.capabilities import MODELS, OF_ROLES, PARTS, Model, Part, refuse
from ...train.terms import LossTerm
from .methods import Methods

TRIED = 8
"""Number of prompts for which the program begins a group as a test."""


def check_program(
    program: RolloutProgram,
    name: str,
    n: int,
    tokenizer: PreTrainedTokenizerBase,
    ends: Collection[int],
    prompts: Sequence[Prompt],
) -> None:
    """Let the program begin a group for each prompt, without sampling.

    Args:
        program: the program to test.
        name: its configured name.
        n: number of responses to a prompt that sets no number of its own.
        ends: end-of-sequence tokens of the model.

    Raises:
        UserError: the program refuses, for example a number of responses that it cannot make.
    """
    what = f"rollout.program = '{name}'"
    for prompt in prompts:
        tried = call(what, copy.deepcopy, program)
        tried.tokenizer, tried.end_token_ids, tried.context, tried.tried = tokenizer, ends, prompt.context, True
        begun = ask(what, tried.start, GroupState(prompt.n or n, 0, 0, 0, 0))
        if not isinstance(begun, int) or begun < 1:
            raise UserError(f"{what} begins with {begun!r} branches; `start` must answer an integer of at least 1.")


def check_prompts(program: RolloutProgram, held_out: Sequence[Prompt], source: PromptSource) -> None:
    """Let the program check the held-out prompts, the rows that are tried, and each row when it is drawn.

    Raises:
        UserError: it refuses one.
    """
    for prompt in held_out:
        program.check(prompt.context)
    if source.rows is not None:
        source.rows.check_each(lambda prompt: program.check(prompt.context))


def check_shown(prompts: Sequence[Prompt], model: PreTrainedModel, config: TrainConfig) -> None:
    """Check that no prompt holds a token that stands for a picture, and that the backend takes its pictures.

    Raises:
        UserError: one does, or vLLM is to sample, for a model whose pictures it does not get.
    """
    check_placeholders(prompts, placeholders(model))
    if config.rollout.backend == "vllm" and any(p.images for p in prompts) and not family_of(model).grid:
        refuse(MODELS, Model(config, pictures_of=type(model).__name__))


def check_placeholders(prompts: Sequence[Prompt], placeholders: Collection[int]) -> None:
    """Check that no prompt holds a token that stands for a picture.

    Raises:
        UserError: one does.
    """
    for prompt in prompts if placeholders else ():
        if shown := set(placeholders) & set(prompt.token_ids):
            raise UserError(
                f"The prompt '{prompt.id}' holds token {min(shown)}, which stands for a picture, and no picture; give "
                "it one (data.image_key), or leave the token out."
            )


def try_methods(methods: Methods) -> None:
    """Compute credit, every loss term and its gradient on two made-up groups, and on made-up demonstrations.

    Nothing that ``methods`` hold changes. A group has the size that will be sampled, at most 64 responses.

    Raises:
        UserError: the estimator fails or does not return finite numbers of the right shape, a selection fails, or an
            objective does not fit the run's credit or selections.
    """
    config, tried = methods.config, methods.copied()
    columns = [column for column, role in OF_ROLES.items() if config.roles.has(role)]
    trees = [_made_up(min(config.rollout.n, 64), [*columns, *methods.columns], shift) for shift in (0, 1)]
    _give_credit(config, tried.credit, trees, has_critic="value" in columns)
    scored = methods.given_columns + (["ref_logprob"] if config.roles.reference is not None else [])
    demonstrations = [_made_up_demonstration(table, scored) for table in config.demonstrations]
    ready = []
    for term in [term.now() for term, _ in tried.terms]:
        with suppress(NotReadyError):
            term.prepare(trees + demonstrations)
            term.extent(trees[0])
            ready.append(term)
    batches = pack(trees + demonstrations, max_tokens=1 << 20, in_pieces=True)
    for term, batch in itertools.product(ready, batches):
        normalizer = term.normalizer(trees, demonstrations) or 1.0
        try:
            for on_policy in (True, False):
                _differentiate(term, batch, normalizer, on_policy)
        except ValueError as error:
            raise UserError(
                f"The loss term '{term.name}' does not fit the run's credit or selection: {str(error).rstrip('.')}."
            ) from error


def _give_credit(
    config: TrainConfig, estimator: CreditFunction, trees: Sequence[TokenTree], *, has_critic: bool
) -> None:
    """Give made-up groups their credit, and check that a critic has targets."""
    name = config.algorithm.advantage
    try:
        give_credit(estimator, name, trees)
    except NotReadyError:  # it reads what only a real group has
        give_credit(lambda groups: Credit("leaf", [tree.rewards["reward"] - 0.5 for tree in groups]), name, trees)
    missing = sum("value_target" not in tree.columns for tree in trees) if has_critic else 0
    refuse(PARTS, Part(config, "algorithm.advantage", name, targets_missing=missing))


def _differentiate(term: LossTerm, batch: TreeBatch, normalizer: float, on_policy: bool) -> None:
    """Compute the loss of a term and its gradient for made-up log-probs.

    Raises:
        ValueError: the loss of the user's term is not finite, or does not depend on the policy; or a field is missing.
    """
    logprob = torch.full(batch.target.shape, -1.0).requires_grad_()
    entropy = torch.full(batch.target.shape, 0.5).requires_grad_()
    of_batch = term.on(batch, normalizer, on_policy, 1.0)
    if isinstance(of_batch, Distilled):
        return  # its loss reads no log-probs
    if isinstance(of_batch, LogprobTerm):
        loss = of_batch.loss(logprob, **_made_up_statistics(of_batch, logprob)).loss
        if not loss.requires_grad or not torch.isfinite(loss):
            why = "is not finite" if loss.requires_grad else "does not depend on the policy"
            raise ValueError(f"its loss on a made-up group {why}")
    else:
        loss = policy_loss(
            logprob, of_batch.fields, of_batch.objective, normalizer=of_batch.normalizer, entropy=entropy
        ).loss
    if loss.requires_grad:
        loss.backward()


def _made_up_statistics(term: LogprobTerm, logprob: torch.Tensor) -> dict[str, torch.Tensor]:
    """Make the statistics ``[M]`` or ``[M, K]`` that a term reads, for a distribution over few tokens."""
    values = {"entropy": 0.5, "sum_p2": 0.5, "mean_logprob": -2.0, "extra_logprob": -1.0}
    statistics = {}
    for name in term.want:
        shape = logprob.shape if name != "extra_logprob" or term.extra_ids is None else term.extra_ids.shape
        statistics[name] = torch.full(shape, values[name]).requires_grad_()
    return statistics


class _EveryReward(dict[str, Array]):
    """Named rewards of a made-up group: whatever name is read, a verifier may have given it."""

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str)

    def __missing__(self, name: str) -> Array:
        return self["reward"]


def _made_up_demonstration(table: DemonstrationsConfig, columns: Sequence[str]) -> TokenTree:
    """Make a demonstration of two tokens, or a pair, with scores in ``columns``, and with log-probs if the table has
    them."""
    scores = {"behaviour_logprob": -1.0} if table.logprob_key is not None else {}
    texts = [[1, 2]] if table.rejected_key is None else [[1, 2], [3]]
    responses = [Segment.make(ids, origin=Origin.INJECTED, **scores) for ids in texts]
    leaves = list(range(1, 1 + len(texts)))
    tree = TokenTree.from_nodes(
        [-1, *(0 for _ in leaves)], [Segment.prompt([0]), *responses], leaves, [LeafStatus.STOP] * len(leaves)
    )
    tree.meta["demonstrations"] = table.name
    _score(tree, columns)
    return tree


def _made_up(leaves: int, columns: Sequence[str], shift: int) -> TokenTree:
    """Make responses of one to three tokens that share beginnings, some right and some wrong, scored by every role."""
    responses = [[1 + leaf % 2, *range(3, 3 + leaf % 3)] for leaf in range(leaves)]
    tree = TokenTree.from_sequences([0], responses, behaviour_logprobs=[np.full(len(r), -1.0) for r in responses])
    tree.rewards = _EveryReward(reward=((np.arange(leaves) + shift) % 2).astype(np.float32))
    for column in ("entropy", "proximal_logprob"):
        tree.set(column, np.full(tree.num_tokens, 0.5 if column == "entropy" else -1.0))
    _score(tree, columns)
    tree.meta |= {"prompt_id": f"made-up/{shift}", "task": "made-up", "prompt_text": ""}
    return tree


def _score(tree: TokenTree, columns: Sequence[str]) -> None:
    """Make up what a role or the policy scores in ``columns``."""
    for column in columns:
        above = column in ("policy_entropy", "policy_sum_p2", "policy_kl")
        tree.set(column, np.full(tree.num_tokens, 0.5 if above else -1.0))
