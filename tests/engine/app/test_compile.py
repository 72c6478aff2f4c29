"""`rolltree kernels build`: what it takes from a run's and a model's configuration, what it says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import Gemma2Config, Qwen3Config

from rolltree.engine.app import compile as command
from rolltree.engine.app.cli import main
from rolltree.engine.batches.pack import pack
from rolltree.engine.errors import UserError
from rolltree.engine.model import recurrent
from rolltree.engine.model.logprob import batch_logprob
from rolltree.engine.train.terms import TokenTerm
from rolltree.kernels import ahead

from ...support import recurrent_models


def test_what_kernels_depend_on(tmp_path: Path) -> None:
    Gemma2Config(num_attention_heads=4, num_key_value_heads=2, head_dim=96, vocab_size=77).save_pretrained(tmp_path)
    assert command.kernels_model(tmp_path, "float16") == ahead.Model(
        4, 2, 96, 77, torch.float16, softcap=50.0, window=True, logit_softcap=30.0, hidden=2304
    )
    Qwen3Config(num_attention_heads=8, num_key_value_heads=4, head_dim=128, vocab_size=99).save_pretrained(tmp_path)
    assert command.kernels_model(tmp_path, "bfloat16") == ahead.Model(8, 4, 128, 99, hidden=4096)


@pytest.mark.parametrize(
    ("family", "rule"), [("qwen3_5", "delta"), ("kimi_linear", "kimi"), ("nemotron_h", "mamba"), ("bamba", "mamba")]
)
def test_recurrent_layers_are_read_from_the_configuration(family: str, rule: str) -> None:
    """The sizes with which a model's layers call the kernels."""
    model, seen = recurrent_models.make(family), list[tuple[Any, ...]]()

    def note(q: Any, k: Any, v: Any, decay: Any, beta: Any, *_: Any, **__: Any) -> Any:
        name = "mamba" if beta is None else "kimi" if decay.dim() == 3 else "delta"
        seen.append((name, v.shape[1], k.shape[1], k.shape[2], v.shape[2]))
        raise StopIteration

    batch = next(iter(pack(recurrent_models.random_trees(0, 1), max_tokens=1 << 20)))
    with mock.patch.object(recurrent, "tree_recurrence", note), pytest.raises(StopIteration):
        batch_logprob(model, batch)
    found = command.recurrent_of(model.config)
    assert found is not None
    assert (found.rule, found.heads, found.groups, found.dim, found.values) == seen[0]
    convolutions = {(m.kernel_size[0], m.in_channels) for m in model.modules() if isinstance(m, torch.nn.Conv1d)}
    assert (found.taps, found.channels) in convolutions
    assert found.rule == rule


def test_a_short_convolution_is_read_from_the_configuration() -> None:
    assert command.recurrent_of(recurrent_models.make("lfm2").config) == ahead.Recurrent("mamba", 0, 0, 0, 0, 3, 32)


def test_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Qwen3Config(num_attention_heads=8, num_key_value_heads=4, head_dim=128, vocab_size=99).save_pretrained(tmp_path)

    def build(target: ahead.Target, model: ahead.Model, *, flash: bool, **rest: Any) -> Iterator[ahead.Built]:
        assert (target, model, flash) == (ahead.TARGETS["90a"], ahead.Model(8, 4, 128, 99, hidden=4096), False)
        assert rest["filters"] == ((),)
        assert len(list(rest["losses"])) == 4
        yield ahead.Built("head", 2.0, 3)
        yield ahead.Built("policy loss", 1.0, 0)

    monkeypatch.setattr(ahead, "build", build)
    monkeypatch.setattr(command.kernel_cache, "versions", lambda: {"python": "3.11", "triton": "3.9.0"})
    assert main(["kernels", "build", str(tmp_path), "--arch", "90a"]) == 0
    said = capsys.readouterr().out
    assert "flash-attn 4 is not installed" in said
    assert "3 kernels for sm_90a in 3 s, under python 3.11, triton 3.9.0." in said

    def refuse(*_: object, **__: object) -> Iterator[ahead.Built]:
        raise RuntimeError("TRITON_INTERPRET is set")

    monkeypatch.setattr(ahead, "build", refuse)
    assert main(["kernels", "build", str(tmp_path), "--arch", "90a"]) == 2
    (tmp_path / "none").mkdir()
    assert main(["kernels", "build", str(tmp_path / "none"), "--arch", "90a"]) == 2
    assert "has no readable configuration" in capsys.readouterr().err
    assert main(["kernels", "build", str(tmp_path), "--arch", "90a", "--seed", "1"]) == 2
    assert "has no key to change by --seed" in capsys.readouterr().err


def test_what_could_not_be_kept_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command.kernel_cache, "versions", lambda: {"flash-attn-4": "4.0.0b36"})
    monkeypatch.setattr(command.kernel_cache, "why_not_kept", lambda: "Read-only file system")
    job = command.Job(ahead.Model(2, 1, 16, 300), [], frozenset(), ())
    with pytest.raises(UserError, match=r"cannot be kept in .* \(Read-only file system\); set ROLLTREE_CACHE_DIR"):
        command.compile_kernels(job, "90a")


def test_what_a_run_needs(tmp_path: Path) -> None:
    Qwen3Config(num_attention_heads=8, num_key_value_heads=4, head_dim=128, vocab_size=99).save_pretrained(tmp_path)
    text = (Path(__file__).parents[3] / "examples" / "grpo_kl_cpu.toml").read_text()
    (tmp_path / "run.toml").write_text(text)
    given = ["--model.path", str(tmp_path), "--algorithm.objective", "gspo", "--rollout.top_p", "0.9"]
    job = command.job_of(tmp_path / "run.toml", given, None)
    assert job.model == ahead.Model(8, 4, 128, 99, torch.float32, hidden=4096)
    (term,) = job.terms
    assert isinstance(term, TokenTerm)
    assert term.objective.ratio_level == "sequence"
    assert job.columns == {"ref_logprob"}
    assert command.launched(job)["filters"] == ((), ("top_p",))
    with pytest.raises(UserError, match=r"for a run give --model\.dtype"):
        command.job_of(tmp_path / "run.toml", given, "bfloat16")
