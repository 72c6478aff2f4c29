"""The mask of an ordinary batch is made late: every operation on it gets a mask, and trees never make one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.masking_utils import and_masks, causal_mask_function, sliding_window_overlay

from rolltree.engine.model import masks
from rolltree.engine.model.masks import DeferredMask

B, S, WINDOW = 2, 6, 3
PADDED = torch.ones(B, S, dtype=torch.bool)
PADDED[0, :2] = False
ROW, COLUMN = torch.arange(S)[:, None], torch.arange(S)[None]
WANTED = ((COLUMN <= ROW) & (COLUMN > ROW - WINDOW))[None, None] & PADDED[:, None, None]  # [B, 1, S, S]
CAUSAL = (COLUMN <= ROW).expand(B, 1, S, S)


def padded_and_windowed() -> DeferredMask:
    return DeferredMask(
        batch_size=B, q_length=S, kv_length=S, attention_mask=PADDED, local_size=WINDOW,
        mask_function=and_masks(sliding_window_overlay(WINDOW), causal_mask_function),
    )  # fmt: skip


def causal() -> DeferredMask:
    return DeferredMask(batch_size=B, q_length=S, kv_length=S)


LOOKS: dict[str, Callable[[Tensor], Any]] = {
    "some queries": lambda m: m[:, :, -2:, :],
    "some keys": lambda m: m[..., :4],
    "one row": lambda m: m[0, 0, 3],
    "an index tensor": lambda m: m[torch.tensor([1])],
    "copied": lambda m: m.clone(),
    "copied deeply": lambda m: copy.deepcopy(m),
    "expanded": lambda m: m.expand(-1, 2, -1, -1),
    "viewed": lambda m: m.view(B, S, S),
    "iterated": lambda m: torch.stack(list(m)),
    "another memory": lambda m: m.to("cpu", copy=True),
}
"""Ways to get the values, or some of them."""
COMPUTES: dict[str, Callable[[Tensor], Any]] = {
    "added to scores, as an additive mask": lambda m: torch.zeros(B, 1, S, S) + m,
    "filled where it holds, as what is hidden": lambda m: torch.zeros(B, 1, S, S).masked_fill(m.to(torch.bool), -1.0),
    "negated": lambda m: ~m,
    "changed": lambda m: m.logical_not_(),
    "another type": lambda m: m.to(torch.float16),
    "handed to sdpa": lambda m: torch.nn.functional.scaled_dot_product_attention(*[torch.zeros(B, 1, S, 8)] * 3, m),
}
"""Operations on masks by models that have attention of their own, with another meaning of masks."""


@pytest.mark.parametrize("compute", COMPUTES.values(), ids=COMPUTES)
def test_a_model_that_computes_with_its_mask_is_refused(compute: Any) -> None:
    for mask in (padded_and_windowed(), causal()):
        with pytest.raises(TypeError, match=r"computes with its attention mask|unsupported operand"):
            compute(mask)


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
@pytest.mark.parametrize(("made", "wanted"), [(padded_and_windowed, WANTED), (causal, CAUSAL)])
def test_what_is_cut_out_of_it_are_its_values(made: Callable[[], DeferredMask], wanted: Tensor, look: Any) -> None:
    seen, should = look(made()), look(wanted.clone())
    assert type(seen) is Tensor
    assert torch.equal(seen, should)


def test_its_form_is_known_before_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """`generate` looks for four dimensions to know that a mask is made."""

    def never(**arguments: Any) -> None:
        raise AssertionError("made a mask")

    monkeypatch.setattr(masks, "sdpa_mask", never)
    mask = padded_and_windowed()
    assert isinstance(mask, Tensor)
    assert (mask.ndim, mask.dim(), len(mask.shape), mask.size(-1), mask.dtype) == (4, 4, 4, S, torch.bool)
    assert mask.shape == WANTED.shape
    for whole in (mask[:, :, :, :], mask[:, :, 0:, :], mask.contiguous(), mask.to(torch.bool), mask.to("cpu")):
        assert whole is mask
    with pytest.raises(AssertionError, match="made a mask"):
        mask.clone()


def test_where_sdpa_needs_none_there_is_none_and_still_one_for_others() -> None:
    mask = causal()
    assert mask.make() is None
    assert torch.equal(mask.clone(), CAUSAL)
    assert torch.equal(padded_and_windowed().make(), WANTED)


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, head_dim=16, num_attention_heads=2,
        num_key_value_heads=1, attn_implementation="rolltree", pad_token_id=0, use_sliding_window=True,
        sliding_window=WINDOW, max_window_layers=1,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval()


def in_plain(model: Qwen3ForCausalLM) -> Qwen3ForCausalLM:
    plain = Qwen3ForCausalLM(Qwen3Config(**model.config.to_dict() | {"attn_implementation": "eager"})).eval()
    plain.load_state_dict(model.state_dict())
    return plain


@pytest.mark.parametrize("cache", [None, "static"])
def test_generate_answers_as_with_plain_attention(model: Any, cache: str | None) -> None:
    """One prompt has one token, and so a mask of the form of a tree's."""
    plain = in_plain(model)
    ids = torch.randint(1, 97, (B, S), generator=torch.Generator().manual_seed(0))
    for prompt, mask in ((ids, PADDED.long()), (ids[:1, :1], None)):
        options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "cache_implementation": cache}
        assert torch.equal(model.generate(prompt, **options), plain.generate(prompt, **options))


@pytest.mark.slow
def test_a_model_compiled_whole_makes_its_mask_at_once(model: Any) -> None:
    ids = torch.randint(1, 97, (B, S), generator=torch.Generator().manual_seed(0))
    tree = {"subtree_end": torch.tensor([S] * S, dtype=torch.int32), "position_ids": torch.arange(S)[None]}
    decoder = torch.compile(model.model, backend="eager", fullgraph=True)
    with torch.no_grad():
        got, want = (m(ids, attention_mask=PADDED, use_cache=False)[0] for m in (decoder, model.model))
        assert torch.equal(got[PADDED], want[PADDED])
        with pytest.raises(Exception, match="compile the layers alone, or pass attention_mask"):
            decoder(ids[:1], use_cache=False, **tree)
