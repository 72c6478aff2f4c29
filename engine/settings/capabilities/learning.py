"""Rows about loss terms, roles, the loop and updates."""

from __future__ import annotations

from collections.abc import Callable

from ..algorithm import ReferenceConfig, TeacherConfig, TermConfig
from ..keys import RunKeys
from .row import Fires, Row, against


def _term(is_wrong: Callable[[TermConfig], bool]) -> Callable[[RunKeys], Fires]:
    """Return a condition that gives the name of the first wrong loss term, of the run or of a further policy."""

    def fires(run: RunKeys) -> Fires:
        terms = [*run.algorithm.terms, *(term for policy in run.models.values() for term in policy.terms or ())]
        names = [term.name for term in terms if is_wrong(term)]
        return bool(names) and {"name": names[0]}

    return fires


def _several_losses(term: TermConfig) -> bool:
    return sum(loss is not None for loss in (term.objective, term.pairs, term.loss, term.divergence)) != 1


def _same_term(run: RunKeys) -> Fires:
    for terms in (run.algorithm.terms, *(policy.terms or () for policy in run.models.values())):
        names = [term.name for term in terms]
        if twice := {name for name in names if names.count(name) > 1}:
            return {"name": min(twice)}
    return False


def _follows(role: ReferenceConfig | TeacherConfig | None) -> bool:
    return role is not None and (role.reset_every > 0 or role.ema is not None)


def _reference_follows(run: RunKeys) -> bool:
    return _follows(run.roles.reference)


def _changes_twice(role: ReferenceConfig | TeacherConfig | None) -> bool:
    return role is not None and role.reset_every > 0 and role.ema is not None


def _without_place(run: RunKeys) -> Fires:
    names = [name for name, teacher in run.roles.teachers.items() if teacher.path is None and teacher.url is None]
    return bool(names) and {"name": names[0]}


def _served(run: RunKeys) -> Fires:
    keys = [key for key, teacher in run.roles.all_teachers.items() if teacher.url is not None]
    return bool(keys) and {"key": keys[0]}


def _served_and_more(run: RunKeys) -> Fires:
    for key, teacher in run.roles.all_teachers.items():
        more = {name: getattr(teacher, name, None) for name in ("path", "reset_every", "ema", "context")}
        if teacher.url is not None and any(more.values()):
            return {"key": key, "other": next(name for name, value in more.items() if value)}
    return False


def _has_context(run: RunKeys) -> bool:
    return run.roles.teacher is not None and run.roles.teacher.context is not None


def _over_sampled(run: RunKeys) -> bool:
    return run.loop.staleness > 0 and run.loop.over_sampling != 1


def _too_long(limit: str, tokens: Callable[[RunKeys], int]) -> Row[RunKeys]:
    def fires(run: RunKeys) -> Fires:
        return run.longest_sequence > tokens(run) and {"longest": run.longest_sequence, "limit": tokens(run)}

    return Row(
        f"`{limit}`",
        "a longer sequence",
        fires,
        "the longest sequence (`data.max_prompt_tokens` + `max_new_tokens` = {longest} tokens) does not fit in "
        f"`{limit}` = {{limit}}",
        "raise it",
    )


def _too_few_updates(run: RunKeys) -> Fires:
    extrapolate = None if run.model.lora is None else run.model.lora.extrapolate
    if extrapolate is None:
        return False
    needed, updates = extrapolate.every * (extrapolate.horizon + 1), run.trainer.steps * run.trainer.updates
    return updates < needed and {"needed": needed, "updates": updates}


def _too_many_updates(run: RunKeys) -> Fires:
    updates, prompts = run.trainer.updates_per_step, run.trainer.prompts_per_step
    most = max(prompts, sum(table.per_step for table in run.demonstrations))
    return updates > most and {"updates": updates, "prompts": prompts, "most": most}


def _nothing_left(run: RunKeys) -> Fires:
    prompts = run.trainer.prompts_per_step
    if run.replay is None or not prompts or 0 < run.replayed < prompts:
        return False
    left = "to sample" if run.replayed else "to draw"
    return {"share": run.replay.share, "prompts": prompts, "replayed": run.replayed, "left": left}


def _early(other: str, needed: str, lacks: Callable[[RunKeys], bool]) -> Row[RunKeys]:
    return Row(
        "`loop.score_early`",
        other,
        lambda run: run.loop.score_early and lacks(run),
        f"loop.score_early needs {needed}",
        "change it, or leave loop.score_early out",
    )


def _of_older_policies(cause: str, has: Callable[[RunKeys], Fires]) -> tuple[Row[RunKeys], ...]:
    return against(
        "`rollout.top_p`, `top_k`, `min_p`",
        lambda run: run.filters_tokens,
        "{other} uses the sampler's log-probs, which top_p, top_k and min_p change",
        "leave these out of [rollout] or set it back",
        {cause: has},
    )


def _several_updates(run: RunKeys) -> Fires:
    key = "updates_per_step" if run.trainer.updates_per_step > 1 else "epochs"
    return run.trainer.updates > 1 and {"key": key, "count": getattr(run.trainer, key)}


LEARNING: tuple[Row[RunKeys], ...] = (
    *against("`algorithm.cut` below 1", lambda run: run.algorithm.cut < 1,
        "`algorithm.cut` leaves out ends of responses, and {who}", "leave one out", {
            "`algorithm.terms`": lambda run: bool(run.algorithm.terms) and {"who": "several terms may need them"},
            "`roles.critic`": lambda run: run.roles.critic is not None and {"who": "the critic learns from them"},
        }),
    Row("`objective`, `pairs`, `loss`, `divergence` of a loss term", "each other", _term(_several_losses),
        "the loss term '{name}' needs one of `objective`, `pairs`, `loss` and `divergence`", "give one"),
    Row("`algorithm.terms.pairs`", "`select`", _term(lambda term: term.pairs is not None and term.select is not None),
        "the loss term '{name}' has `pairs`, which select responses", "leave `select` out"),
    Row("`algorithm.terms.name`", "another term of the name", _same_term, "Two loss terms are called '{name}'",
        "give each in [[algorithm.terms]] a name of its own"),
    Row("`roles.reference.reset_every`", "`roles.reference.ema`", lambda run: _changes_twice(run.roles.reference),
        "give `roles.reference.reset_every` or `roles.reference.ema`, not both"),
    Row("`roles.teacher.reset_every`", "`roles.teacher.ema`", lambda run: _changes_twice(run.roles.teacher),
        "give `roles.teacher.reset_every` or `roles.teacher.ema`, not both"),
    Row("`roles.teacher.path`", "`roles.teacher.reset_every`, `ema`",
        lambda run: _follows(run.roles.teacher) and getattr(run.roles.teacher, "path", None) is not None,
        "the teacher of `roles.teacher.path` has weights of its own, and `reset_every` and `ema` follow the policy's",
        "leave the path or these out"),
    Row("`roles.teachers`", "`roles.teacher`",
        lambda run: bool(run.roles.teachers) and run.roles.teacher is not None,
        "give `roles.teacher` or `roles.teachers`, not both"),
    Row("`roles.teachers.NAME`", "neither `path` nor `url`", _without_place,
        "`roles.teachers.{name}` has no model", "give it a `path` or a `url`"),
    Row("`roles.teacher.url`, `roles.teachers.NAME.url`", "its `path`, `reset_every`, `ema` or `context`",
        _served_and_more, "`{key}.url` is a model of its own on a server, which `{key}.{other}` does not go with",
        "leave one out"),
    *against(
        "`roles.teacher.url`, `roles.teachers.NAME.url`",
        _served,
        "`{key}.url` does not go with {other}",
        "change one of them",
        {
            "`rollout.temperature` other than 1, at which servers tell no log-probs": (
                lambda run: run.rollout.temperature != 1
            ),
            "`loop.temperature_scale`, as servers tell log-probs at a temperature of 1": (
                lambda run: run.loop.temperature_scale != 1
            ),
            "`data.image_key`, as only tokens are sent": lambda run: run.data.image_key is not None,
        },
    ),
    Row("`roles.teacher.context`", "no loss term with `divergence`",
        lambda run: _has_context(run) and all(term.divergence is None for term in run.algorithm.terms),
        "`roles.teacher.context` is read by loss terms with `divergence` alone", "add one, or leave it out"),
    *against(
        "`roles.teacher.context`",
        _has_context,
        "`roles.teacher.context` does not go with {other}",
        "leave one out",
        {
            "`data.image_key`, whose pictures are part of the prompt": lambda run: run.data.image_key is not None,
            '`rollout.program` = "agent", whose calls have prompts of their own': (
                lambda run: run.rollout.program == "agent"
            ),
            '`algorithm.advantage` = "log_ratio", which reads the log-probs of tokens': (
                lambda run: run.algorithm.advantage == "log_ratio"
            ),
        },
    ),
    Row(
        "`roles.reference.path` with `reset_every` or `ema`",
        "`model.lora`",
        lambda run: (
            run.model.lora is not None
            and run.roles.reference is not None
            and run.roles.reference.path is not None
            and _reference_follows(run)
        ),
        "roles.reference.path cannot become the policy of [model.lora], whose weights it does not have",
        "leave reset_every and ema out, or the path",
    ),
    Row('`algorithm.advantage` = "gae"', "no `roles.critic`",
        lambda run: run.algorithm.advantage == "gae" and run.roles.critic is None,
        'algorithm.advantage = "gae" needs a critic', "give the run a [roles.critic]"),
    Row("`loop.over_sampling`", "`loop.staleness` above 0", _over_sampled,
        "`loop.over_sampling` is for `loop.staleness` = 0", "leave it out, or set staleness to 0"),
    Row('`loop.over_sampling` = "valid_share"', "no `loop.callback`",
        lambda run: run.loop.over_sampling == "valid_share" and run.loop.callback is None,
        '`loop.over_sampling` = "valid_share" follows the share of groups that a `loop.callback` keeps',
        "name one, such as dynamic_sampling"),
    Row('`loop.train_context` = "plain"', "no `loop.callback`",
        lambda run: run.loop.train_context == "plain" and run.loop.callback is None,
        "`loop.train_context` is about prompts that a `loop.callback` chooses",
        "name one, such as hint_ladder, or leave it out"),
    Row('`loop.callback` = "hint_ladder"', '`loop.train_context` = "sampled"',
        lambda run: run.loop.callback == "hint_ladder" and run.loop.train_context != "plain",
        '`loop.callback` = "hint_ladder" puts responses to several prompts into one group',
        'set `loop.train_context` to "plain"'),
    _too_long("rollout.kv_tokens", lambda run: run.rollout.kv_tokens),
    _too_long("trainer.max_tokens", lambda run: run.trainer.max_tokens),
    Row("`model.lora.extrapolate`", "`trainer.ranks` above 1",
        lambda run: run.model.lora is not None and run.model.lora.extrapolate is not None and run.trainer.ranks > 1,
        "`model.lora.extrapolate` does not go with `trainer.ranks` above 1 yet", "set it to 1"),
    Row("`model.lora.extrapolate`", "fewer updates than it learns from", _too_few_updates,
        "`model.lora.extrapolate` learns from every * (horizon + 1) = {needed} updates at least, and the run makes "
        "{updates}", "raise `trainer.steps`, or lower one of them"),
    Row("`trainer.updates_per_step`", "fewer prompts", _too_many_updates,
        "`trainer.updates_per_step` = {updates} needs at least as many prompts, and `trainer.prompts_per_step` is "
        "{prompts}", "set the first to {most} or less, or the second to {updates} or more"),
    Row("`replay.share`", "`trainer.prompts_per_step` of which it leaves none", _nothing_left,
        "`replay.share` = {share} of `trainer.prompts_per_step` = {prompts} is {replayed} groups, which leaves none "
        "{left}", "change one of them"),
    _early("no reference or teacher of fixed weights", "a reference or a teacher of fixed weights in [roles]",
           lambda run: (run.roles.reference is None or _reference_follows(run)) 
               and not run.roles.teachers and (run.roles.teacher is None or _follows(run.roles.teacher))),
    _early("`trainer.ranks` above 1", "trainer.ranks = 1, because several ranks score a batch together",
           lambda run: run.trainer.ranks > 1),
    _early("`models`", "a run of one policy, without [models]", lambda run: bool(run.models)),
    _early('`placement.layout` = "colocated"',
           'placement.layout = "split", because colocated engines keep the memory while they sample',
           lambda run: run.placement.layout == "colocated"),
    _early("`loop.temperature_scale` that changes, at `loop.staleness` above 0",
           "a loop.temperature_scale that does not change, because the step that will train a group is not known",
           lambda run: run.loop.staleness > 0 and not isinstance(run.loop.temperature_scale, float)),
)  # fmt: skip

TRAINING: tuple[Row[RunKeys], ...] = (
    *_of_older_policies(
        "`loop.staleness` = {staleness} with loop.correction = '{correction}'",
        lambda run: run.corrects_lag and {"staleness": run.loop.staleness, "correction": run.loop.correction},
    ),
    *_of_older_policies("`replay`", lambda run: run.replay is not None),
    *_of_older_policies("`loop.train_context` = 'plain'", lambda run: run.loop.train_context == "plain"),
    *_of_older_policies("`trainer.{key}` = {count}", _several_updates),
    Row("`trainer.ranks` above 1", "no `rollout.engines`",
        lambda run: run.trainer.ranks > 1 and not run.rollout.engines and {"ranks": run.trainer.ranks},
        "`trainer.ranks` = {ranks} needs engines in other processes, because no rank has the whole model to sample "
        "with", "set rollout.engines to at least 1, or trainer.ranks to 1"),
)  # fmt: skip
"""Rows that forbid a training alone: `rolltree rollout` may sample with such keys."""
