"""With `batch_invariant` a served completion has the log-probs that `patch_model`'s forward computes, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rolltree.engine.app.server.serve import serve
from rolltree.engine.errors import UserError
from rolltree.engine.integrations.transformers import patch_model
from rolltree.engine.model.invariant.install import is_invariant

from ...kernels.on_device import needs_known_order
from ...support import serving
from ..model.test_tree_equals_flat import make_models

pytestmark = needs_known_order

PROMPTS = [list(range(7, 7 + n)) for n in (3, 40, 11, 25)]
NEW = 6


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return serving.save(tmp_path_factory.mktemp("model"))


def patched(directory: Path, dtype: torch.dtype, **options: Any) -> Any:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="rolltree")
    return patch_model(model, **options).train()


def completed(client: httpx.Client, prompt: list[int]) -> tuple[list[int], list[float]]:
    """Return the tokens of a completion and their log-probs."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": NEW, "seed": 3, "logprobs": 0}
    answer = client.post("/v1/completions", json=body | {"ignore_eos": True, "return_token_ids": True})
    (choice,) = answer.json()["choices"]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def forward(model: Any, rows: Sequence[list[int]], *, left: bool = False) -> list[np.ndarray[Any, Any]]:
    """Return log-probs of the last NEW tokens of each row, from the loss of one label at a time in a padded batch."""
    longest = max(map(len, rows))
    ids, mask = torch.zeros(2, len(rows), longest, dtype=torch.long)
    for i, row in enumerate(rows):
        begin = longest - len(row) if left else 0
        ids[i, begin : begin + len(row)], mask[i, begin : begin + len(row)] = torch.tensor(row), 1
    found = []
    for i, row in enumerate(rows):
        values = []
        for k in range(NEW):
            at = (longest if left else len(row)) - NEW + k
            labels = torch.full_like(ids, -100)
            labels[i, at] = ids[i, at]
            places = (mask.cumsum(1) - 1).clamp(min=0)
            loss = model(input_ids=ids, attention_mask=mask, position_ids=places, labels=labels).loss
            values.append(-loss.item())
        found.append(np.array(values, np.float32))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_served_is_trained(directory: Path, dtype: str) -> None:
    with (
        serving.as_process(directory, "--batch_invariant", "--dtype", dtype) as (_, url),
        httpx.Client(base_url=url, timeout=60) as client,
        ThreadPoolExecutor(len(PROMPTS)) as pool,
    ):
        together = list(pool.map(lambda prompt: completed(client, prompt), PROMPTS))
        alone = [completed(client, prompt) for prompt in PROMPTS]
    assert together == alone
    rows = [[*prompt, *tokens] for prompt, (tokens, _) in zip(PROMPTS, together, strict=True)]
    served = [np.array(values, np.float32) for _, values in together]
    exact = patched(directory, getattr(torch, dtype), batch_invariant=True)
    assert is_invariant(exact)
    one_by_one = [forward(exact, [row])[0] for row in rows]
    for values in (one_by_one, forward(exact, rows), forward(exact, rows, left=True)):
        assert all(np.array_equal(*pair) for pair in zip(values, served, strict=True))
    plain = forward(patched(directory, getattr(torch, dtype)), rows, left=True)
    assert not all(np.array_equal(*pair) for pair in zip(plain, served, strict=True))


@pytest.mark.parametrize("name", ["qwen3", "mistral-window", "gemma2-window-softcap"])
def test_windows_and_padding_are_kept(name: str) -> None:
    """The logits of a padded batch are those of Transformers, and of each of its sequences alone."""
    model, theirs = make_models(name)
    patch_model(model, batch_invariant=True)
    ids = torch.randint(0, 97, (2, 40), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :9] = 0  # on the left
    places = (mask.cumsum(1) - 1).clamp(min=0)
    call = {"input_ids": ids, "attention_mask": mask, "position_ids": places, "use_cache": False}
    found, want = model(**call).logits, theirs(**call).logits
    torch.testing.assert_close(found[mask == 1], want[mask == 1], rtol=1e-4, atol=1e-4)
    hidden = [model.model(input_ids=ids[i : i + 1, 9 - 9 * i :], use_cache=False)[0][0] for i in (0, 1)]
    both = model.model(**call)[0]
    assert torch.equal(both[0, 9:], hidden[0])
    assert torch.equal(both[1], hidden[1])


def test_what_it_does_not_hold_for_is_refused(directory: Path, tmp_path: Path) -> None:
    at = {"name": None, "host": "127.0.0.1", "port": 0, "api_key": None, "dtype": "float32", "device": "cpu"}
    with pytest.raises(UserError, match="does not hold for the adapters of --tinker yet"):
        serve(str(directory), **at, kv_tokens=4096, debug=False, batch_invariant=True, tinker=tmp_path)  # type: ignore[arg-type]
    sdpa = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="sdpa")
    with pytest.raises(ValueError, match="batch_invariant goes with layers=True and attn_implementation='rolltree'"):
        patch_model(sdpa, batch_invariant=True)
    with pytest.raises(ValueError, match="layers is False"):
        patched(directory, torch.float32, layers=False, batch_invariant=True)
    with pytest.raises(UserError, match=r"batch_invariant does not hold for Qwen3ForCausalLM: the order of sums"):
        patched(directory, torch.float64, batch_invariant=True)
    exact = patched(directory, torch.float32, batch_invariant=True).eval()
    ids = torch.tensor([[5, 6, 7]])
    with pytest.raises(ValueError, match="computes whole sequences only; pass use_cache=False"):
        exact.generate(ids, max_new_tokens=3)
    mask = torch.ones(1, 1, 3, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match="computes whole sequences only"):
        exact(input_ids=ids, attention_mask=mask)
