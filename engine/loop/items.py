"""The texts of responses, and what a verifier is given of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..chat.marks import response_text
from ..data.columns import Array
from ..data.concat import side_by_side
from ..data.episodes import Episodes
from ..data.policies import role_texts
from ..data.segment import LeafStatus
from ..data.stored import StoredTexts
from ..data.tree import TokenTree
from ..prompts.group import Responses
from ..prompts.prompts import Prompt
from ..rewards import RewardItem, Rewards

STOP = int(LeafStatus.STOP)  # a plain number, since it is compared once a response


def decode(tokenizer: PreTrainedTokenizerBase, trees: Sequence[TokenTree]) -> list[list[str]]:
    """Return for each tree the text of each leaf's response."""
    if not trees:
        return []
    all_of = side_by_side(trees)
    responses = np.split(all_of.token_id[all_of.path_tokens], np.cumsum(all_of.response_length)[:-1])
    texts = (response_text(tokenizer, response) for response in responses)
    return [list(islice(texts, tree.num_leaves)) for tree in trees]


def item(
    prompt: Prompt,
    responses: Responses,
    leaf: int,
    text_of: Callable[[Array], str] | None = None,
    rewards: Rewards | None = None,
    group: int | None = None,
) -> RewardItem:
    """Return the verifier's input for a response.

    Args:
        text_of: returns the text of token ids, for the texts of roles; None: the response has one role.
        rewards: the verifier, which may fetch texts itself; None: it does not.
        group: number of the group.

    Raises:
        GoneError: the response is no more where it was stored.
    """
    tree, roles = responses.tree, None
    assigned = tree.meta.get("given_rewards", {}).get(leaf)
    if text_of is not None and "roles" in tree.meta:
        whole = Episodes(tree)
        roles = role_texts(whole.tree, int(whole.place[leaf]), text_of)
    ended = bool(tree.status[leaf] == STOP)
    texts, stored = responses.texts, None
    if rewards is not None and rewards.fetches and isinstance(texts, StoredTexts):
        stored = texts, leaf
    text = texts[leaf] if stored is None else ""
    return RewardItem(
        text, prompt.entry, prompt.problem, prompt.text, assigned, roles, ended=ended, group=group, stored=stored
    )
