"""Four ranks, two on each micro-batch (`trainer.tensor`), learn what one process learns; wrong code does not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rolltree.engine import UserError, load_config
from rolltree.engine.app.assembly import run as build
from rolltree.engine.app.assembly.workers import make_ranks
from rolltree.engine.fleet.rank import Rank
from rolltree.engine.fleet.workers import InThreads
from rolltree.engine.model import head, sharding
from rolltree.engine.rollout.digest import digests, whole_digest
from rolltree.engine.rollout.packed import unpack_weights
from rolltree.engine.train.group import ALONE, Group

from ...support.forked import Forked
from ...support.scale import assert_close, train
from ...support.tiny import beside, tiny_job
from .rank_runs import CASES as OF_RANKS
from .rank_runs import (
    OWN,
    USER,
    Case,
    Result,
    alone,
    differences,
    learn,
    make,
    of_cases,
    on_ranks,
    resuming,
    sampled,
    saving,
)

SIZES = {
    "hidden_size": 32, "intermediate_size": 54, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2,
}  # fmt: skip
MODELS: dict[str, Callable[..., Any]] = {
    "qwen3": lambda **of: Qwen3ForCausalLM(Qwen3Config(head_dim=16, tie_word_embeddings=True, **of)),
    "llama": lambda **of: LlamaForCausalLM(LlamaConfig(attention_bias=True, mlp_bias=True, **of)),
    "qwen2": lambda **of: Qwen2ForCausalLM(Qwen2Config(tie_word_embeddings=True, **of)),
    "mistral": lambda **of: MistralForCausalLM(MistralConfig(sliding_window=6, head_dim=8, **of)),
}
SEVERAL = "--trainer.max_tokens=96"
"""Several micro-batches in an update."""
CLIPPED = "--trainer.max_grad_norm=0.05"


class Of(NamedTuple):
    """A model, and what is learned by it."""

    model: str
    case: Case


CASES = {
    "two updates, clipped": Of("qwen3", Case(("--trainer.updates_per_step=2", SEVERAL, CLIPPED), groups=7)),
    "biases, a reference that moves, untied": Of(
        "llama", Case((*OF_RANKS["sequences, a reference that moves, untied"].options, SEVERAL, CLIPPED))
    ),
    "checkpointed layers, recomputed log-probs": Of(
        "qwen2",
        Case((SEVERAL, "--model.gradient_checkpointing=true", "--algorithm.old_logprob=recompute"), groups=7),
    ),
    "sliding windows, a critic, fewer trees than ranks": Of(
        "mistral", replace(OF_RANKS["critic, fewer trees than ranks"], groups=1, tied=True)
    ),
    "a loss of the user's": Of("qwen3", OF_RANKS[OWN]),
    "gathered layers stay": Of("llama", Case((SEVERAL, "--trainer.reshard=false"))),
}
SHORT = ("two updates, clipped",)
FOUR = ("--trainer.ranks=4", "--trainer.tensor=2")
toml = tiny_job({"mine.py": USER})


class Jobs(dict[str, tuple[Path, list[list[Any]]]]):
    """The configuration of each model, and the trees that it has sampled in two steps, made when first asked for."""

    def __init__(self, toml: Path) -> None:
        super().__init__()
        self._toml = toml

    def __missing__(self, name: str) -> tuple[Path, list[list[Any]]]:
        self[name] = job(self._toml, name)
        return self[name]


@pytest.fixture(scope="module")
def jobs(toml: Path) -> Jobs:
    return Jobs(toml)


def job(toml: Path, name: str, steps: int = 2, **sizes: int) -> tuple[Path, list[list[Any]]]:
    tokenizer = AutoTokenizer.from_pretrained(toml.parent / "model")
    folder = toml.parent / f"{name}{''.join(map(str, sizes.values()))}"
    torch.manual_seed(1)
    of = SIZES | {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None} | sizes
    model = MODELS[name](pad_token_id=tokenizer.pad_token_id, **of)
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms of ones and biases of zeros
            parameter.data.add_(0.1 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config = beside(toml, folder.name, model={"path": str(folder)})
    return config, sampled(config, steps, 7)


def on_four(case: Case) -> Case:
    return replace(case, options=(*case.options, *FOUR))


@pytest.mark.check
@pytest.mark.parametrize("name", [*SHORT, *(pytest.param(n, marks=pytest.mark.slow) for n in CASES if n not in SHORT)])
def test_four_ranks_learn_what_one_process_learns(name: str, jobs: dict[str, Any]) -> None:
    model, case = CASES[name]
    toml, trees = jobs[model]
    expected = alone(toml, trees, case)
    assert expected.rows[0]["actor/grad_norm"] > 0.05
    for rank in on_ranks(of_cases, toml.parent, 4, toml, trees, [name], {name: on_four(case)}):
        assert differences(expected, rank[name]) == {}


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "tensor"), [(2, 2), (4, 4), (6, 2)])
@pytest.mark.parametrize("rest", [0, 1, 3])
def test_sizes_that_no_number_divides(ranks: int, tensor: int, rest: int, toml: Path) -> None:
    """Rows of the vocabulary and of the feed-forward layers are divided unevenly, over both dimensions."""
    tokens = len(AutoTokenizer.from_pretrained(toml.parent / "model")) + rest
    sizes = {"vocab_size": tokens, "intermediate_size": 50 + rest, "num_attention_heads": 8, "num_key_value_heads": 4}
    config, trees = job(toml, "qwen3", 1, **sizes)
    case = CASES["two updates, clipped"].case
    expected = alone(config, trees, case)
    ours = replace(case, options=(*case.options, f"--trainer.ranks={ranks}", f"--trainer.tensor={tensor}"))
    for rank in on_ranks(of_cases, toml.parent, ranks, config, trees, ["x"], {"x": ours}):
        assert differences(expected, rank["x"]) == {}


# -- checkpoints and weights -------------------------------------------------------------------------------------------

SAVED = {"x": CASES["biases, a reference that moves, untied"].case}


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [((4, 2), (4, 2)), ((4, 2), (1, 1)), ((4, 2), (2, 1)), ((2, 1), (4, 2))])
def test_any_number_of_ranks_goes_on(
    before: tuple[int, int], after: tuple[int, int], toml: Path, tmp_path: Path
) -> None:
    config, trees = job(toml, "llama", 4)

    def go(work: Callable[..., Any], ranks: int, tensor: int) -> list[dict[str, Result]]:
        options = () if ranks == 1 else (f"--trainer.ranks={ranks}", f"--trainer.tensor={tensor}")
        cases = {name: replace(case, options=(*case.options, *options)) for name, case in SAVED.items()}
        if ranks == 1:
            return [work(ALONE, config, trees, tmp_path, cases)]
        return on_ranks(work, toml.parent, ranks, config, trees, tmp_path, cases)

    expected = go(saving, *before)[0]["x"]
    for rank in go(resuming, *after):
        assert differences(expected, rank["x"]) == {}


def published(group: Group, toml: Path, trees: list[list[Any]], case: Case, directory: Path) -> dict[str, Any]:
    """Learn, and return the parts of the weights that a rank stores for engines and what they contribute to digests."""
    rank = Rank(lambda group: None, Forked.put, group.rank, 4, timeout_s=9, threads=1, host=None)  # type: ignore[arg-type,return-value]
    rank.learner = make(toml, case, group)
    weights = learn(rank.learner, trees, case).weights
    rank.learner.export(directory / "export")
    shares = rank.digests({name: tensor.dtype for name, tensor in weights.items()})
    return {"weights": weights, "buckets": rank.ship(1, None).whole, "digests": shares}


@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen3", "llama"])
def test_engines_and_exports_get_whole_weights(model: str, jobs: dict[str, Any], tmp_path: Path) -> None:
    toml, trees = jobs[model]
    case = on_four(Case((SEVERAL,)))
    ranks = on_ranks(published, toml.parent, 4, toml, trees[:1], case, tmp_path)
    assert all(rank["buckets"] for rank in ranks)
    stored = unpack_weights(bucket.get() for rank in ranks for bucket in rank["buckets"])
    exported = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "export").named_parameters())
    weights = ranks[0]["weights"]
    assert weights.keys() == stored.keys() == exported.keys()
    for name, weight in weights.items():
        assert torch.equal(stored[name], weight), name
        assert torch.equal(exported[name], weight), name
        assert all(torch.equal(rank["weights"][name], weight) for rank in ranks), name
        digest = whole_digest(rank["digests"].get(name, 0) for rank in ranks)
        assert digest == digests({name: weight})[name].digest, name


@pytest.mark.slow
def test_a_run_on_four_ranks_is_that_of_one_process(
    toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, _ = job(toml, "qwen3", 1)
    options = ["--trainer.steps=3", "--checkpoint.every=2", "--evaluation.problems=4", "--evaluation.every=3"]
    one, _ = train(config, [f"--output_dir={tmp_path}/one", *options])
    monkeypatch.setattr(build, "make_workers", lambda config: Forked())
    four, _ = train(config, [f"--output_dir={tmp_path}/four", "--rollout.engines=1", *options, *FOUR])
    assert_close(four.run_dir, one.run_dir, 2e-5)


def test_a_model_that_cannot_be_split_is_refused_before_ranks_start(toml: Path) -> None:
    config, workers = load_config(toml, FOUR), InThreads()
    with pytest.raises(UserError, match="does not divide the model's 2 attention heads and 1 key-value heads"):
        make_ranks(config, workers, print)


def test_a_damaged_model_is_refused_before_ranks_start(toml: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "none such"}')
    config = load_config(toml, ["--trainer.ranks=2", "--rollout.engines=1", f"--model.path={tmp_path}"])
    with pytest.raises(UserError, match="cannot be loaded"):
        make_ranks(config, InThreads(), print)


# -- wrong code --------------------------------------------------------------------------------------------------------

_divide, _whole = sharding._divide, head.whole


def _norm_of_all_ranks(masters: Sequence[torch.Tensor], most: float) -> torch.Tensor:
    """A norm that counts what all ranks of a row have as often as they are."""
    squares = sum(sharding.local(m.grad).square().sum() for m in masters if m.grad is not None)
    assert isinstance(squares, torch.Tensor)
    dist.all_reduce(squares)
    for master in masters:
        if master.grad is not None:
            sharding.local(master.grad).mul_((most / squares.sqrt()).clamp(max=1.0))
    return squares.sqrt()


WRONG: dict[str, tuple[str, str, Any]] = {
    "norms of heads not added up": (
        "two updates, clipped", "rolltree.engine.model.sharding._divide",
        lambda *args, gradient=None: _divide(*args)),
    "whole norms added up": (
        "two updates, clipped", "rolltree.engine.model.sharding._divide",
        lambda module, mesh, dim, forward, gradient=None: _divide(
            module, mesh, dim, forward, Partial() if dim is None else None)),
    "rows of the head in another order": (
        "two updates, clipped", "rolltree.engine.model.head.whole", lambda weight: _whole(weight).flip(0)),
    "a norm of every copy": ("two updates, clipped", "torch.nn.utils.clip_grad_norm_", _norm_of_all_ranks),
    "metrics of every rank": ("two updates, clipped", "rolltree.engine.train.group.Group.of_shares", Group.gather),
    "one share for all": (
        "two updates, clipped", "rolltree.engine.train.group.Group.share", property(lambda group: 0)),
}  # fmt: skip


def of_wrong(group: Group, toml: Path, trees: list[list[Any]], names: Sequence[str]) -> dict[str, Result]:
    found = {}
    for name in names:
        of, target, wrong = WRONG[name]
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch(target, wrong))
            case = on_four(CASES[of].case)
            found[name] = learn(make(toml, case, group), trees[:1], case)
    return found


@pytest.mark.slow
def test_wrong_code_differs(jobs: dict[str, Any]) -> None:
    toml, trees = jobs["qwen3"]
    found = on_ranks(of_wrong, toml.parent, 4, toml, trees, list(WRONG))[0]
    for name, (of, _, _) in WRONG.items():
        expected = alone(toml, trees[:1], CASES[of].case)
        bad = differences(expected, found[name])
        assert max(bad.values(), default=0) > 1e-3, name
