"""Makes the functions and loss terms that a run's method consists of, once, and tries a copy of them.

`Methods` needs no model. What a part cannot do without is a row of `settings.capabilities.PARTS`, decided when the part
is made; a trial on made-up groups finds the rest.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rolltree.kernels import Objective
from rolltree.kernels.linear_divergence.kinds import check_kind
from rolltree.kernels.policy_loss import WITHOUT_REFERENCE

from ...data.columns import COLUMNS
from ...errors import UserError
from ...methods.advantages import ADVANTAGES
from ...methods.credit import CreditFunction
from ...methods.losses import LOSSES
from ...methods.schedules import Schedule, find_schedule, scheduled
from ...methods.selections import PAIRINGS, SELECTIONS
from ...methods.shaping import SHAPINGS, Shaping
from ...parts.calling import ask
from ...parts.context import OF_TREES, Changing, Context, now
from ...parts.resolve import options_of, resolve
from ...prompts.privileged import PrivilegedPrompt
from ...settings import AlgorithmConfig, ShapingConfig, TermConfig, TrainConfig
from ...settings.capabilities import PARTS, Part, refuse
from ...train.distillation import COUNTED, DivergenceTerm, Teacher
from ...train.terms import LossTerm, PairTerm, Selection, TokenTerm
from ...train.user_term import FIELDS, UserTerm
from .statistics import given_columns, read_columns

TERMS = "algorithm.terms."
"""Beginning of the keys of loss terms."""
WeighedTerm = tuple[LossTerm, Schedule]
"""A term of the loss with its weight."""


@dataclass(frozen=True)
class Methods:
    """The functions and loss terms of a configuration.

    Attributes:
        context: the run's values that the functions ask for.
        shapings: the functions that shape rewards, each with its name for messages.
        terms: the terms of the loss, `algorithm.objective` first.
        columns: columns of the policy's statistics that parts read, each once.
        given_columns: those that loss terms read of demonstrations.
        teacher: that of all terms that compare distributions, once the run has loaded it.
    """

    config: TrainConfig
    context: Context
    credit: CreditFunction
    shapings: list[tuple[str, Shaping]]
    terms: list[WeighedTerm]
    columns: list[str]
    given_columns: list[str]
    teacher: Teacher

    @classmethod
    def make(cls, config: TrainConfig, context: Context | None = None) -> Methods:
        """Make all parts; the user's files are imported, and classes are instantiated.

        Args:
            context: default: a new one without a tokenizer.

        Raises:
            UserError: a part is unknown, refuses its options, or needs something that the run does not have.
        """
        context = context or Context()
        columns = read_columns(config)
        estimator = credit(config.algorithm, context)  # first, as its file may declare the columns that terms read
        shaped = shapings(config.reward.shaping, config.rollout.max_new_tokens, context)
        of_demonstrations = given_columns(config)
        teacher = Teacher()
        terms = loss_terms(config, context, teacher)
        return cls(config, context, estimator, shaped, terms, columns, of_demonstrations, teacher)

    def copied(self) -> Methods:
        """Return a copy that may be tried: no state of this one's parts changes. Parts that cannot be copied are made
        again."""
        try:
            return copy.deepcopy(self)
        except Exception:  # the user's classes decide what a copy raises
            return Methods.make(self.config)

    @property
    def functions(self) -> dict[str, Any]:
        """The functions and objects of the user's or of rolltree, by their keys."""
        of_terms = {f"{TERMS}{term.name}": getattr(term, "instance", None) for term, _ in self.terms}
        return {"algorithm.advantage": self.credit, **dict(self.shapings), **of_terms}


def credit(algorithm: AlgorithmConfig, context: Context) -> CreditFunction:
    """Return the advantage estimator that `algorithm.advantage` names.

    Raises:
        UserError: there is no such estimator, file or function, or it has no such option.
    """
    key = "algorithm.advantage"
    options = scheduled(context, "advantage", f"{key}_options", algorithm.advantage_options)
    estimator: CreditFunction = resolve(
        key, algorithm.advantage, options, parts=ADVANTAGES, inputs=("trees",), context=context, offers=OF_TREES
    )
    return estimator


def objective(
    config: TrainConfig, key: str, name: str, options: dict[str, Any], select: str | None = None
) -> Objective:
    """Make the objective ``name``, with the correction of the lag if the run has one.

    Args:
        key: key of the configuration that gives it, for messages.
        name: preset of `Objective`.
        options: fields of the objective to change, some of which may change with the step.
        select: the selection given with it, if any.

    Raises:
        UserError: unknown name or option, or the objective needs something that the run does not have.
    """
    chosen = ask(f"{key} = '{name}'", Objective.preset, name, **now(options))
    assert isinstance(chosen, Objective)
    if config.corrects_lag:
        chosen = corrected(chosen, config)
    needs, values = chosen.needs_fields, frozenset(COLUMNS)
    refuse(PARTS, Part(config, key, name, needs=needs, of_run=values, selects=select is not None))
    return chosen


def corrected(objective: Objective, config: TrainConfig) -> Objective:
    """Add the decoupled correction (Hilton et al. 2021): ratios against the policy before the update, and weights
    exp(proximal - behaviour).

    The weights of sequence-level ratios are sequence-level too (geometric means). An objective that has its own
    correction, or uses no old log-probs, stays as it is. If the policy before the update is not scored, the current
    policy replaces it: all ratios are then 1 and none is clipped.
    """
    loop, level = config.loop, objective.mismatch_level
    if objective.mismatch == "none" and objective.needs_old and "token_weight" not in objective.needs_fields:
        if objective.ratio_level in ("sequence", "sequence_token"):
            level = "geometric"
        with suppress(ValueError):  # raised if the objective itself weights by the sampler's log-probs
            objective = replace(
                objective, mismatch=loop.correction, mismatch_level=level, mismatch_cap=loop.correction_cap
            )
    if objective.mismatch == "none" or config.rescores:
        return objective
    return replace(objective, ratio_base="current", dynamic_clip=False)


def of_tokens(
    config: TrainConfig, key: str, table: AlgorithmConfig | TermConfig, name: str, context: Context
) -> TokenTerm:
    """Return the term that the ``table`` of ``key`` describes."""
    assert table.objective is not None
    options = scheduled(context, name, f"{key}.objective_options", table.objective_options)
    make = partial(objective, config, f"{key}.objective", table.objective, select=table.select)
    changes = [option for option, value in options.items() if isinstance(value, Changing)]
    if "kl_coef" in changes:  # a reference is needed in every step, also where the coefficient begins at 0
        make(options=options | {"kl_coef": 1e-9})

    def changed() -> Objective:
        try:
            return make(options=options)
        except UserError as error:
            raise UserError(f"At step {context.step}, {error}") from error

    chosen = make(options=options)
    whole = chosen.scope != "token" or chosen.aggregation == "batch_token_mean"
    refuse(PARTS, Part(config, key, name, ratios_of_segments=chosen.ratio_level == "segment", whole=whole))
    return TokenTerm(
        chosen,
        name,
        _selection(f"{key}.select", table.select, table.select_options, name, context),
        config.rollout.max_new_tokens,
        changed if changes else None,
    )


def of_pairs(config: TrainConfig, key: str, table: TermConfig, context: Context) -> PairTerm:
    """Return the term of ``table`` that compares pairs of responses."""
    assert table.pairs is not None
    options = scheduled(context, f"{table.name}.pairs", f"{key}.pairs_options", table.pairs_options)
    choose = resolve(
        f"{key}.pairs", table.pairs, options, parts=PAIRINGS, inputs=("tree",), context=context, offers=OF_TREES
    )
    compares = table.loss_options.get("kind", "sigmoid") not in WITHOUT_REFERENCE
    refuse(PARTS, Part(config, key, table.pairs, compares_with_reference=compares))
    return PairTerm(choose, table.name, scheduled(context, table.name, f"{key}.loss_options", table.loss_options))


def of_user(key: str, table: TermConfig, context: Context) -> UserTerm:
    """Return the term of ``table`` whose loss a class computes."""
    assert table.loss is not None
    select = _selection(f"{key}.select", table.select, table.select_options, table.name, context)
    options = scheduled(context, table.name, f"{key}.loss_options", table.loss_options)
    loss = resolve(f"{key}.loss", table.loss, options, parts=LOSSES)
    return UserTerm(f"{key}.loss = '{table.loss}'", loss, TokenTerm(FIELDS, table.name, select), context)


def of_teacher(config: TrainConfig, key: str, table: TermConfig, context: Context, teacher: Teacher) -> DivergenceTerm:
    """Return the term of ``table`` that compares distributions with the teacher's."""
    assert table.divergence is not None
    needs = {"teacher_logprob": "it compares with a teacher"}
    refuse(PARTS, Part(config, f"{key}.divergence", table.divergence, needs=needs))
    options = scheduled(context, table.name, f"{key}.divergence_options", table.divergence_options)
    served = any(each.url is not None for each in config.roles.all_teachers.values())
    present = now(options)
    if served and not isinstance(present.pop("rest", True), bool):
        raise UserError(f"`{key}.divergence_options.rest` must be true or false.")
    ask(f"{key}.divergence = '{table.divergence}'", check_kind, table.divergence, **present)
    select = _selection(f"{key}.select", table.select, table.select_options, table.name, context)
    shown, data, longest = config.roles.teacher, config.data, config.trainer.max_tokens
    reads = None if shown is None or shown.context is None else PrivilegedPrompt(shown.context, data, longest, context)
    options = {"kind": table.divergence} | options
    return DivergenceTerm(COUNTED, table.name, select, teacher=teacher, options=options, reads=reads)


def loss_terms(
    config: TrainConfig, context: Context | None = None, teacher: Teacher | None = None
) -> list[WeighedTerm]:
    """Return the terms of the loss, `algorithm.objective` first, each with its weight.

    Raises:
        UserError: a part is unknown, or needs something that the run does not have.
    """
    algorithm, context, teacher = config.algorithm, context or Context(), teacher or Teacher()
    main = of_tokens(config, "algorithm", algorithm, "actor", context)
    terms: list[WeighedTerm] = [(main, find_schedule("algorithm.weight", algorithm.weight, algorithm.weight_options))]
    for table in algorithm.terms:
        key = f"{TERMS}{table.name}"
        weight = find_schedule(f"{key}.weight", table.weight, table.weight_options)
        if table.pairs is not None:
            terms.append((of_pairs(config, key, table, context), weight))
        elif table.loss is not None:
            terms.append((of_user(key, table, context), weight))
        elif table.divergence is not None:
            terms.append((of_teacher(config, key, table, context, teacher), weight))
        else:
            terms.append((of_tokens(config, key, table, table.name, context), weight))
    return terms


def shapings(tables: Sequence[ShapingConfig], longest: int, context: Context) -> list[tuple[str, Shaping]]:
    """Return the functions that shape rewards, each with its name for messages.

    Args:
        longest: what a shipped one that has an option ``longest`` takes for it by default, in tokens.

    Raises:
        UserError: there is no such function, or it has no such option.
    """
    key = "reward.shaping"
    shaped: list[tuple[str, Shaping]] = []
    for table in tables:
        options = scheduled(context, f"shaping.{Path(table.name).name}", f"{key}.options", table.options)
        if table.name in SHAPINGS and "longest" in options_of(SHAPINGS[table.name], ("tree",)):
            options = {"longest": longest} | options
        shaping = resolve(
            key, table.name, options, parts=SHAPINGS, inputs=("tree",), options_key=f"{key}.options", context=context,
            offers=OF_TREES,
        )  # fmt: skip
        shaped.append((f"{key} '{table.name}'", shaping))
    return shaped


def _selection(key: str, name: str | None, options: dict[str, Any], term: str, context: Context) -> Selection | None:
    if name is None:
        return None
    options = scheduled(context, f"{term}.select", f"{key}_options", options)
    select: Selection = resolve(
        key, name, options, parts=SELECTIONS, inputs=("tree",), context=context, offers=OF_TREES
    )
    return select
