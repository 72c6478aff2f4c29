"""Rows about parts of a run that were made, and about models that were loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..keys import RunKeys
from .row import Fires, Row

SPLIT = ("llama", "mistral", "qwen2", "qwen3")
"""Model types that `trainer.tensor` splits: dense decoders whose plan of Transformers has been compared."""
OF_ROLES = {"ref_logprob": "reference", "teacher_logprob": "teacher", "value": "critic"}
"""Values that a part may need, each with the role that scores it."""


@dataclass(frozen=True)
class Part:
    """The facts of a part once it is made; each kind of part has some of these."""

    run: RunKeys
    key: str
    """Key of the configuration that names it, such as ``algorithm.objective``."""
    name: str
    needs: Mapping[str, str] = field(default_factory=dict)
    """Values of tokens that an objective needs, each with the reason."""
    of_run: frozenset[str] = frozenset()
    """Values of tokens that a run without roles may have."""
    selects: bool = False
    """A selection goes with the objective."""
    ratios_of_segments: bool = False
    whole: bool = False
    """An objective reads whole responses, or the whole batch."""
    compares_with_reference: bool = False
    divergence: str = ""
    """The column of the divergence from the reference, if it reads that."""
    gives_older: bool = False
    """A program returns tokens that an older policy sampled."""
    roles: tuple[str, ...] = ()
    """Roles that a program plays, the one in which it begins first."""
    has_state: bool = False
    targets_missing: int = 0
    """Trees of two on which an estimator sets no targets of the critic."""


@dataclass(frozen=True)
class Model:
    """The facts of loaded models, tokenizers and data."""

    run: RunKeys
    positions: int | None = None
    """Longest sequence of the model, in tokens; None if it has no limit."""
    demonstration: int = 0
    """Length of the longest demonstration, in tokens."""
    key: str = ""
    """Key that names another model, of which the next three are true or false."""
    path: str = ""
    same_vocabulary: bool = True
    same_shapes: bool = True
    same_tokens: bool = True
    scores_early: bool = True
    """A role of fixed weights writes a column, where the run scores early."""
    model_type: str = ""
    """Model type that `trainer.tensor` is to split; empty if that was not looked at."""
    heads: tuple[int, ...] = ()
    """Numbers of its attention heads and of its key-value heads."""
    pictures_of: str = ""
    """Class of a model whose prompts have pictures that vLLM does not take; empty if there is none."""


def _needs(value: str, part: Part) -> Fires:
    return value in part.needs and {"key": part.key, "name": part.name, "reason": part.needs[value]}


def _needs_old(part: Part) -> Fires:
    return not part.run.rescores and _needs("proximal_logprob", part)


def _needs_role(part: Part) -> Fires:
    for value, role in OF_ROLES.items():
        if value in part.needs and not part.run.roles.has(role):
            return {**_words(part), "value": value, "reason": part.needs[value], "role": role}
    return False


def _reads_other_prompt(part: Part) -> Fires:
    teacher = part.run.roles.teacher
    reads = "teacher_logprob" in part.needs and not part.key.endswith(".divergence")
    return reads and teacher is not None and teacher.context is not None and _words(part)


def _needs_unknown(part: Part) -> Fires:
    possible = {"token_weight", *OF_ROLES, *part.of_run}
    unknown = [value for value in part.needs if value not in possible]
    return bool(unknown) and {**_words(part), "value": unknown[0], "reason": part.needs[unknown[0]]}


def _words(part: Part) -> dict[str, object]:
    return {"key": part.key, "name": part.name}


def _played(part: Part) -> Mapping[str, tuple[str, ...]]:
    """Return the roles of each further policy."""
    return {name: policy.roles or (name,) for name, policy in part.run.models.items()}


def _split(model: Model) -> bool:
    return model.model_type != "" and model.run.trainer.tensor > 1


def _of_other_plan(model: Model) -> Fires:
    words = {"kinds": ", ".join(SPLIT), "kind": model.model_type, "tensor": model.run.trainer.tensor}
    return _split(model) and model.model_type not in SPLIT and words


def _heads_left(model: Model) -> Fires:
    tensor = model.run.trainer.tensor
    if not _split(model) or model.model_type not in SPLIT or not any(count % tensor for count in model.heads):
        return False
    return {"tensor": tensor, "heads": model.heads[0], "pairs": model.heads[1]}


def _program(part: Part) -> bool:
    return part.key == "rollout.program"


def _which(part: Part) -> dict[str, object]:
    which = f"its roles are {', '.join(part.roles)}" if part.roles else "it has one role"
    return {"program": f"rollout.program = '{part.run.rollout.program}'", "which": which}


def _role_of_no_program(part: Part) -> Fires:
    for name, roles in _played(part).items() if _program(part) else ():
        if unknown := [role for role in roles if role not in part.roles]:
            return {**_which(part), "policy": name, "role": unknown[0]}
    return False


def _first_role(part: Part) -> Fires:
    for name, roles in _played(part).items() if _program(part) else ():
        if part.roles[:1] and part.roles[0] in roles:
            others = ", ".join(part.roles[1:])
            return {**_which(part), "policy": name, "role": part.roles[0], "others": others}
    return False


def _role_of_two(part: Part) -> Fires:
    taken: dict[str, str] = {}
    for name, roles in _played(part).items() if _program(part) else ():
        for role in roles:
            if taken.setdefault(role, name) != name:
                return {"first": taken[role], "second": name, "role": role}
    return False


def _credit_of_no_role(part: Part) -> Fires:
    algorithm = part.run.algorithm
    credited = algorithm.advantage_options.get("rewards") if algorithm.advantage == "by_role" else None
    unknown = [role for role in credited or () if role not in part.roles]
    return _program(part) and bool(unknown) and {**_which(part), "role": unknown[0]}


PARTS: tuple[Row[Part], ...] = (
    Row("an objective of chosen tokens", "no `select`", lambda part: not part.selects and _needs("token_weight", part),
        "{key} = '{name}' trains on chosen tokens", "choose them with `select` ({reason})"),
    Row("an objective that compares with the policy before the update", '`algorithm.old_logprob` = "behaviour"',
        _needs_old, "{key} = '{name}' needs the policy's own log-probs before the update ({reason})",
        'set algorithm.old_logprob to "recompute"'),
    Row("an objective that needs a reference, a teacher or a critic", "no such role", _needs_role,
        "{key} = '{name}' needs {value} ({reason})", "give the run a [roles.{role}]"),
    Row("an objective that reads the teacher's log-probs", "`roles.teacher.context`", _reads_other_prompt,
        "{key} = '{name}' needs teacher_logprob, which a teacher with `roles.teacher.context` does not score",
        "choose a loss term with `divergence`, or leave the context out"),
    Row("an objective of values", "which no run has", _needs_unknown,
        "{key} = '{name}' needs {value} ({reason}), which a run does not have",
        "choose another objective or leave the option out"),
    Row("a preference loss with a reference", "no `roles.reference`",
        lambda part: part.compares_with_reference and part.run.roles.reference is None and _words(part),
        "{key} needs a reference policy", "give the run a [roles.reference]"),
    Row(
        "a part that reads the divergence from the reference",
        "no `roles.reference`",
        lambda part: (
            part.divergence != "" and part.run.roles.reference is None and {**_words(part), "column": part.divergence}
        ),
        "{key} = '{name}' reads the column {column}",
        "give the run a [roles.reference]",
    ),
    Row(
        "a part that reads the divergence from the reference",
        "`trainer.tensor` above 1",
        lambda part: (
            part.divergence != "" and part.run.trainer.tensor > 1 and {**_words(part), "column": part.divergence}
        ),
        "{key} = '{name}' reads the column {column}, which `trainer.tensor` above 1 does not compute",
        "set it to 1",
    ),
    Row("a loss term with ratios of segments", '`rollout.program` = "agent"',
        lambda part: part.ratios_of_segments and part.run.rollout.program == "agent" and _words(part),
        "The loss term '{name}' has ratios of segments (ratio_level = \"segment\"), runs of tokens between the forks "
        'of a program, which `rollout.program` = "agent" does not have', "set ratio_level to token or sequence"),
    Row("`algorithm.cut` below 1", "an objective of whole responses",
        lambda part: part.whole and part.run.algorithm.cut < 1 and _words(part),
        "`algorithm.cut` leaves out ends of responses, and the objective of '{name}' reads whole responses",
        "use an objective whose ratios and means are of tokens, or leave it out"),
    Row("`roles.critic`", "an advantage that sets no targets",
        lambda part: part.targets_missing > 0 and {**_words(part), "missing": part.targets_missing},
        "{key} = '{name}' sets no column value_target on {missing} of 2 trees, so that [roles.critic] has nothing to "
        "learn", 'use "gae", set the column, or leave the critic out'),
    Row(
        "a loss term with a state",
        "`trainer.ranks` above 1",
        lambda part: (
            part.has_state and part.run.trainer.ranks > 1 and {**_words(part), "ranks": part.run.trainer.ranks}
        ),
        "'{key}' has a state, and with trainer.ranks = {ranks} each rank computes the loss of a share of the "
        "responses, so that there would be a state for each",
        "set trainer.ranks to 1, or leave its state_dict out",
    ),
    Row("a program that returns tokens of older policies", "`rollout.top_p`, `top_k`, `min_p`",
        lambda part: part.gives_older and part.run.filters_tokens and _words(part),
        "`rollout.program` = '{name}', which may return tokens of older policies, uses the sampler's log-probs, "
        "which top_p, top_k and min_p change", "leave these out of [rollout] or set it back"),
    Row("`models.NAME.roles`", "a program without the role", _role_of_no_program,
        "`models.{policy}` plays the role '{role}', which {program} does not have", "{which}"),
    Row("`models.NAME.roles`", "the program's first role", _first_role,
        "`models.{policy}` plays the role '{role}', in which {program} begins and which [model] plays",
        "choose among {others}"),
    Row("`models.NAME.roles`", "another policy's role", _role_of_two,
        "`models.{first}` and `models.{second}` both play the role '{role}'", "leave one out"),
    Row("`algorithm.advantage_options.rewards` of roles", "a program without the role", _credit_of_no_role,
        "algorithm.advantage_options.rewards names the role '{role}', which {program} does not have", "{which}"),
)  # fmt: skip

MODELS: tuple[Row[Model], ...] = (
    Row(
        "`demonstrations`",
        "`trainer.max_tokens`",
        lambda model: (
            model.run.trainer.max_tokens <= (model.positions or model.run.trainer.max_tokens)
            and model.demonstration > model.run.trainer.max_tokens
            and {"tokens": model.demonstration, "most": model.run.trainer.max_tokens}
        ),
        "The longest demonstration has {tokens} tokens, over trainer.max_tokens, {most}",
        "leave it out, or raise trainer.max_tokens",
    ),
    Row(
        "`demonstrations`",
        "the model's positions",
        lambda model: (
            model.positions is not None
            and model.positions < model.run.trainer.max_tokens
            and model.demonstration > model.positions
            and {"tokens": model.demonstration, "most": model.positions}
        ),
        "The longest demonstration has {tokens} tokens, over the model's positions, {most}",
        "leave it out",
    ),
    Row(
        "`data.max_prompt_tokens` + `max_new_tokens`",
        "the model's positions",
        lambda model: (
            model.run.judges
            and model.positions is not None
            and model.run.longest_sequence > model.positions
            and {"longest": model.run.longest_sequence, "positions": model.positions}
        ),
        "The longest sequence (data.max_prompt_tokens + max_new_tokens = {longest} tokens) is longer than the model's "
        "{positions} positions",
        "lower data.max_prompt_tokens or rollout.max_new_tokens",
    ),
    Row("`loop.score_early`", "a teacher of whom only hidden states are read", lambda model: not model.scores_early,
        "`loop.score_early` has nothing to score, as updates read the hidden states of a teacher with a `path`",
        "leave it out, or give the run a reference"),
    Row("`roles.teacher`", "the policy's vocabulary",
        lambda model: not model.same_vocabulary and {"key": model.key, "path": model.path},
        "{key} = '{path}' has another vocabulary than the policy", "choose a teacher with the policy's tokenizer"),
    Row("`trainer.tensor` above 1", "a model of another type", _of_other_plan,
        "`trainer.tensor` = {tensor} splits models of the types {kinds}, not of '{kind}'", "set it to 1"),
    Row("`trainer.tensor` above 1", "heads that it does not divide", _heads_left,
        "`trainer.tensor` = {tensor} does not divide the model's {heads} attention heads and {pairs} key-value heads",
        "choose a divisor of both, or set it to 1"),
    Row("`roles.reference.path`", "the policy's parameters",
        lambda model: not model.same_shapes and {"key": model.key, "path": model.path},
        "{key} = '{path}' has other parameter shapes than the policy", "give a model with the same"),
    Row("`models.NAME.path`", "the tokenizer of `model.path`",
        lambda model: not model.same_tokens and {"key": model.key, "path": model.path},
        "`{key}` = '{path}' has another tokenizer than model.path",
        "policies of one run sample into the same trees, so give it a model with the same"),
    Row('`rollout.backend` = "vllm"', "pictures of a model that is not Qwen's",
        lambda model: model.pictures_of != "" and {"model": model.pictures_of},
        "rollout.backend = 'vllm' takes pictures of Qwen's models only, not of {model}", "set it to 'native'"),
)  # fmt: skip
