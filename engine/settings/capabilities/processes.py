"""Rows about policies, backends and processes."""

from __future__ import annotations

from ..keys import RunKeys
from ..policies import METRICS
from ..training import PlacementConfig
from .row import Fires, Row, against


def _policy(run: RunKeys) -> Fires:
    return bool(run.models) and {"name": next(iter(run.models))}


def _name_of_metrics(run: RunKeys) -> Fires:
    taken = (*METRICS, *(term.name for term in run.algorithm.terms))
    names = [name for name in run.models if name in taken]
    return bool(names) and {"name": names[0]}


def _options_without_objective(run: RunKeys) -> bool:
    return any(policy.objective_options is not None and policy.objective is None for policy in run.models.values())


def _selects_demonstrations(run: RunKeys) -> Fires:
    terms = [term for policy in run.models.values() for term in policy.terms or () if term.select == "injected"]
    return bool(terms) and {"term": terms[0].name}


def _drafts_without_rows(run: RunKeys) -> Fires:
    drafts = run.rollout.drafts
    for name in ("tokens", "remembered"):
        if drafts.rows == 0 and getattr(drafts, name) != type(drafts).model_fields[name].default:
            return {"key": name}
    return False


def _own_sums(run: RunKeys) -> Fires:
    key = "`rollout.compile`" if run.rollout.compile else '`rollout.backend` = "vllm"'
    return run.model.batch_invariant and (_vllm(run) or run.rollout.compile) and {"key": key}


def _vllm(run: RunKeys) -> bool:
    return run.rollout.backend == "vllm"


def _window(run: RunKeys) -> bool:
    return run.rollout.window not in ("auto", 1)


def _colocated(run: RunKeys) -> bool:
    return run.placement.layout == "colocated"


def _ranks(run: RunKeys) -> bool:
    return run.trainer.ranks > 1


def _tensor(run: RunKeys) -> bool:
    return run.trainer.tensor > 1


def _rank_left(run: RunKeys) -> Fires:
    left = run.trainer.ranks % run.trainer.tensor != 0
    return left and {"ranks": run.trainer.ranks, "tensor": run.trainer.tensor}


def _compares_distributions(run: RunKeys) -> bool:
    return any(term.divergence is not None for term in run.algorithm.terms)


PROCESSES: tuple[Row[RunKeys], ...] = (
    Row("`model.train_tower`", "`model.lora`", lambda run: run.model.train_tower and run.model.lora is not None,
        "train_tower trains weights that [model.lora] leaves as they are", "leave one of them out"),
    Row("`rollout.drafts.tokens`, `remembered`", "`rollout.drafts.rows` = 0", _drafts_without_rows,
        "`{key}` has no effect while `rows` is 0", "set `rollout.drafts.rows` too, such as 8"),
    Row("`models.NAME.objective_options`", "no `objective` of the policy's own", _options_without_objective,
        "`objective_options` of a policy are for its own `objective`", "name it, or leave them out"),
    Row("`models.NAME.terms`", '`select` = "injected"', _selects_demonstrations,
        "the loss term '{term}' selects demonstrations, which are for [model] alone", "leave it out"),
    Row("`models.NAME`", "a name that metrics begin with", _name_of_metrics,
        "`models.{name}` has a name that metrics begin with already", "choose another"),
    *against(
        "`models`",
        _policy,
        "`models.{name}` does not go with {other} yet",
        "leave one of them out",
        {
            "rollout.engines": lambda run: run.rollout.most_engines > 0,
            'rollout.backend = "vllm"': _vllm,
            "rollout.stop, which would end a whole response,": lambda run: bool(run.rollout.stop),
            "trainer.ranks above 1": _ranks,
            "reward.hosts": lambda run: run.reward.hosts > 0,
            "loop.staleness above 0": lambda run: run.loop.staleness > 0,
            'loop.train_context = "plain"': lambda run: run.loop.train_context == "plain",
            "data.image_key": lambda run: run.data.image_key is not None,
            "model.lora": lambda run: run.model.lora is not None,
            "rollout.window above 1": _window,
            "model.replay_routes": lambda run: run.model.replay_routes,
            "replay": lambda run: run.replay is not None,
            "roles.critic": lambda run: run.roles.critic is not None,
            "roles.teacher": lambda run: run.roles.has("teacher"),
            "roles.reference.path": lambda run: (
                run.roles.reference is not None and run.roles.reference.path is not None
            ),
        },
    ),
    Row('`loop.train_context` = "plain"', "`data.image_key`",
        lambda run: run.loop.train_context == "plain" and run.data.image_key is not None,
        '`loop.train_context` = "plain" exchanges no prompts with pictures (`data.image_key`)', "leave one out"),
    Row("`model.replay_routes`", '`rollout.backend` = "vllm"', lambda run: run.model.replay_routes and _vllm(run),
        '`model.replay_routes` needs `rollout.backend` = "native", which records routes: vLLM 0.32 has them on a GPU '
        "alone (its model runner V2 needs Triton), and they are not read", "set it, or replay none"),
    Row("`model.replay_routes`", "`rollout.compile`", lambda run: run.model.replay_routes and run.rollout.compile,
        "`rollout.compile` does not record routes", "leave it or `model.replay_routes` out"),
    Row("`model.batch_invariant`", '`rollout.backend` = "vllm", `rollout.compile`', _own_sums,
        "`model.batch_invariant` does not hold for {key}, whose kernels have orders of sums of their own",
        "leave one of them out"),
    Row("`rollout.vllm_options`", '`rollout.backend` = "native"',
        lambda run: bool(run.rollout.vllm_options) and not _vllm(run),
        '`rollout.vllm_options` are for `rollout.backend` = "vllm"', "set it, or leave them out"),
    Row("`rollout.drafts`", '`rollout.backend` = "vllm"', lambda run: run.rollout.drafts.rows > 0 and _vllm(run),
        "rollout.drafts applies to the native backend only",
        "set rollout.drafts.rows to 0, and give vLLM its own speculative_config in rollout.vllm_options"),
    Row("`rollout.keep_pages` = true", '`rollout.backend` = "vllm", `placement.layout` = "colocated"',
        lambda run: run.rollout.keep_pages is True and (_vllm(run) or _colocated(run)),
        "`rollout.keep_pages` is for the native backend in the run's own process, which shares the trainer's device",
        "leave it out"),
    Row("`rollout.window` above 1", '`rollout.backend` = "vllm"', lambda run: _window(run) and _vllm(run),
        '`rollout.window` is for `rollout.backend` = "native"', "use `rollout.vllm_options`, or leave it out"),
    Row("`rollout.window` above 1", "`model.replay_routes`", lambda run: _window(run) and run.model.replay_routes,
        "`model.replay_routes` looks at every step", "set `rollout.window` to 1, or leave it out"),
    Row("`rollout.python`", "no `rollout.engines`", lambda run: bool(run.rollout.python) and not run.rollout.engines,
        "`rollout.python` is for `rollout.engines`", "set this, or leave it out"),
    Row("`rollout.send_changes`", 'no `rollout.engines`, or `rollout.backend` = "vllm"',
        lambda run: run.rollout.send_changes and (not run.rollout.engines or _vllm(run)),
        "`rollout.send_changes` is for `rollout.engines` of the native backend: the run's own process shares the "
        "weights, and vLLM loads whole ones", "leave it out"),
    Row("`placement`", "no `rollout.engines` and no `reward.hosts`",
        lambda run: run.placement != PlacementConfig() and not run.rollout.engines and not run.reward.hosts,
        "`placement` is for other processes", "set `rollout.engines` or `reward.hosts`, or leave it out"),
    Row("`placement.per_rank`", "`trainer.ranks` = 1", lambda run: bool(run.placement.per_rank) and not _ranks(run),
        "`placement.per_rank` is for `trainer.ranks` above 1", "set these, or leave it out"),
    Row("`trainer.ranks` above 1", "`data.image_key`", lambda run: _ranks(run) and run.data.image_key is not None,
        "`data.image_key` does not go with `trainer.ranks` above 1 yet", "set it to 1"),
    Row("`trainer.ranks` above 1", '`placement.layout` = "colocated"', lambda run: _ranks(run) and _colocated(run),
        '`placement.layout` = "colocated" does not go with `trainer.ranks` above 1', "set it to 1"),
    Row("`trainer.mirror`", "`trainer.ranks` = 1", lambda run: run.trainer.mirror and not _ranks(run),
        "`trainer.mirror` is for `trainer.ranks` above 1", "set these, or leave it out"),
    Row("`trainer.tensor`", "`trainer.ranks` that it does not divide", _rank_left,
        "`trainer.tensor` = {tensor} does not divide `trainer.ranks` = {ranks}", "change one of them"),
    *against(
        "`trainer.tensor` above 1",
        _tensor,
        "{other} does not go with `trainer.tensor` above 1 yet",
        "set it to 1",
        {
            "`model.lora`": lambda run: run.model.lora is not None,
            "a loss term with `divergence`": _compares_distributions,
        },
    ),
    Row("`trainer.tensor` above 1", "`model.batch_invariant`",
        lambda run: _tensor(run) and run.model.batch_invariant,
        "`model.batch_invariant` does not hold for `trainer.tensor` above 1, which adds up products of several ranks",
        "set one of them back"),
    Row("`placement.per_engine`, `placement.layout`", "no `rollout.engines`",
        lambda run: (bool(run.placement.per_engine) or _colocated(run)) and not run.rollout.engines,
        "`placement.per_engine` and `placement.layout` are for `rollout.engines`", "set these, or leave them out"),
    Row("`rollout.engines` from `least` to `most`", '`placement.layout` = "colocated"',
        lambda run: run.rollout.least_engines is not None and _colocated(run),
        'engines with `placement.layout` = "colocated" share the trainer\'s devices, and no node that joins has one of '
        "them", "give `rollout.engines` as a number, or leave the layout out"),
    Row('`placement.layout` = "colocated"', "`loop.overlap`",
        lambda run: _colocated(run) and run.loop.overlaps(on_cpu=False),
        'engines with `placement.layout` = "colocated" sleep during updates and cannot sample then',
        "set `loop.overlap` to false"),
    Row("`rollout.compile`", '`rollout.backend` = "vllm"', lambda run: run.rollout.compile and _vllm(run),
        '`rollout.compile` is for `rollout.backend` = "native"', "use `rollout.vllm_options`"),
)  # fmt: skip
