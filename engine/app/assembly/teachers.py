"""Teachers of a run: which one a problem has, those on servers, and what is read of them."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from ...data.tree import TokenTree
from ...errors import UserError
from ...methods.advantages import ADVANTAGES
from ...model.teachers.served import ServedTeacher
from ...parts.context import Context
from ...protocols.scoring import Known, ScoringServer
from ...settings import NamedTeacherConfig, RolesConfig, TrainConfig
from ...train.distillation import DivergenceTerm
from ...train.group import Group
from ...train.terms import TokenTerm
from .methods import Methods


class TeacherOf:
    """Returns the name of the teacher of a tree's problem, which `roles.teacher_key` tells.

    Args:
        context: knows the rows of problems.
    """

    def __init__(self, roles: RolesConfig, context: Context) -> None:
        self._key, self._names, self._context = roles.teacher_key, list(roles.teachers), context

    def __call__(self, tree: TokenTree) -> str:
        """Return the name.

        Raises:
            UserError: the problem has no such column, or it names no teacher.
        """
        if self._key == "task" and "task" in tree.meta:
            name = tree.meta["task"]
        else:
            name = self._context.values(["entry"], tree)["entry"].get(self._key)
        if name not in self._names:
            told = f"has no column '{self._key}'" if name is None else f"has the teacher '{name}' (`{self._key}`)"
            raise UserError(
                f"The problem '{tree.meta.get('prompt_id')}' {told}, and roles.teachers has {', '.join(self._names)}; "
                "change the data, `roles.teacher_key` or the names."
            )
        return str(name)


def served(
    teacher: NamedTeacherConfig, model: PreTrainedModel, context: Context, group: Group, *, scores: bool
) -> ServedTeacher:
    """Return the teacher on the server of ``teacher.url``, which has answered a first question.

    The first rank of ``group`` asks for all, so a question is asked once and each rank learns from the same answers.

    Raises:
        UserError: it cannot be asked, or has another tokenizer than the policy.
    """
    assert teacher.url is not None
    server = ScoringServer(
        teacher.url,
        teacher.model,
        top=teacher.top,
        at_once=teacher.at_once,
        timeout_s=teacher.timeout_s,
        retries=teacher.retries,
        api_key_env=teacher.api_key_env,
    )
    vocabulary = len(model.get_output_embeddings().weight)
    group.of_first(lambda: server.check(context.tokenizer, vocabulary))

    def ask(sequences: Sequence[Sequence[int]], first: Sequence[int], vocabulary: int) -> list[Known]:
        return group.of_first(lambda: server.score(sequences, first, vocabulary))

    return ServedTeacher("teacher_logprob", model, ask, scores=scores)


def teacher_scores(config: TrainConfig, methods: Methods) -> bool:
    """Return whether the teacher's log-probs of tokens are read: not by terms of whole distributions alone."""
    terms = [term for term, _ in methods.terms]
    if not any(isinstance(term, DivergenceTerm) for term in terms):
        return True
    reads = any(isinstance(t, TokenTerm) and "teacher_logprob" in t.objective.needs_fields for t in terms)
    return reads or config.algorithm.advantage not in ADVANTAGES or config.algorithm.advantage == "log_ratio"
