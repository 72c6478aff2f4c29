"""``rolltree kernels build``: compiles a run's kernels ahead of time, also on a machine without the GPU."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from packaging.version import Version

from rolltree.kernels import Objective, ahead, kernel_cache, linear_divergence, linear_terms_loss, plan_terms_loss

from ..batches.batch import FIELDS
from ..batches.pack import pack
from ..data.columns import COLUMNS
from ..data.segment import LeafStatus, Segment
from ..data.tree import TokenTree
from ..errors import UserError
from ..model.losses.distillation import Distilled
from ..model.losses.head_pass import of_kernels
from ..rollout.native.draws import FILTERS
from ..rollout.native.engine import EngineConfig
from ..train.terms import LossTerm, TokenTerm
from .assembly.methods import loss_terms
from .assembly.sampling import sampling_params
from .config import load_config


@dataclass(frozen=True)
class Job:
    """The properties of a run that determine its kernels."""

    model: ahead.Model
    terms: Sequence[LossTerm]
    columns: frozenset[str]  # token columns that a role fills, in addition to those that the terms need
    filters: tuple[str, ...]  # names of the sampling filters; a greedy evaluation has none


def job_of(path: Path, overrides: Sequence[str], dtype: str | None) -> Job:
    """Return the job of a run's TOML file, or of a model's folder: GRPO, sampled without filters.

    Args:
        path: the file or the folder.
        overrides: keys of the file to change, as for `load_config`.
        dtype: number type of a folder's model; None: bfloat16.

    Raises:
        UserError: the file or the model's configuration cannot be read, ``dtype`` is given with a file, which has its
            own, or overrides with a folder.
    """
    if path.is_dir():
        if overrides:
            raise UserError(f"A model's folder has no key to change by {overrides[0]}; give the TOML file of a run.")
        model = kernels_model(path, dtype or "bfloat16")
        return Job(model, [TokenTerm(Objective.preset("grpo"))], frozenset(), ())
    config = load_config(path, overrides)
    if dtype is not None:
        raise UserError("--dtype applies to a model's folder; for a run give --model.dtype.")
    columns = {f"{name}_logprob" for name, role in (("ref", "reference"), ("teacher", "teacher"))
               if config.roles.has(role)}  # fmt: skip
    params = sampling_params(config.rollout)
    return Job(
        kernels_model(Path(config.model.path), config.model.dtype),
        [term.now() for term, _ in loss_terms(config)],
        frozenset(columns),
        tuple(name for name, off in FILTERS.items() if (getattr(params, name) or off) != off),
    )


def compile_kernels(job: Job, arch: str) -> None:
    """Fill the kernel caches that the run reads on a GPU of ``arch``.

    Raises:
        UserError: Triton is missing or in interpreter mode, or the cache cannot be written.
    """
    if importlib.util.find_spec("triton") is None:
        raise UserError("Triton is not installed, and it compiles the kernels; install rolltree on Linux.")
    versions = kernel_cache.versions()
    flash = "flash-attn-4" in versions
    if not flash:
        print("flash-attn 4 is not installed, so only Triton's kernels are built; rolltree[hopper] installs it.")
    elif reason := kernel_cache.why_not_kept():
        raise UserError(
            f"Kernels cannot be kept in {kernel_cache.directory()} ({reason}); set ROLLTREE_CACHE_DIR to a writable "
            "folder."
        )
    count = seconds = 0.0
    try:
        for built in ahead.build(ahead.TARGETS[arch], job.model, flash=flash, **launched(job)):
            count, seconds = count + built.compiled, seconds + built.seconds
            print(f"{built.name:<48} {built.compiled:>3} compiled {built.seconds:>6.1f} s", flush=True)
    except RuntimeError as error:
        raise UserError(str(error)) from error
    under = ", ".join(f"{name} {version}" for name, version in versions.items())
    print(f"{count:.0f} kernels for {ahead.TARGETS[arch].arch} in {seconds:.0f} s, under {under}.")
    from triton import knobs

    folders = [knobs.cache.dir] + ([kernel_cache.directory()] if flash else [])
    print(f"To use them on another machine, copy {' and '.join(map(str, folders))}.")


def launched(job: Job) -> dict[str, Any]:
    """Return the arguments of `ahead.build` that depend on more of the run than its model."""
    return {"filters": tuple(dict.fromkeys([(), job.filters])), "losses": losses(job)}


def losses(job: Job) -> Iterator[tuple[str, Any]]:
    """Yield (name, function) of each loss and gradient: trees that share sampled tokens or only prompts, with and
    without the sampler's log-probs."""
    for forked in (True, False):
        for on_policy in (True, False):
            name = f"loss, {'forks' if forked else 'prompts'}{', on policy' if on_policy else ''}"
            yield name, functools.partial(update, job, tree(forked), on_policy)


def tree(forked: bool, length: int = 3) -> TokenTree:
    """Make a tree of two responses of ``length`` tokens; with ``forked`` they share as many sampled tokens before."""

    def sampled(n: int, token: int = 0) -> Segment:
        return Segment.sampled(np.full(n, token, np.int32), np.full(n, -1.0))

    parts = [
        Segment.prompt(np.zeros(5, np.int32)),
        sampled(length if forked else 0),
        sampled(length),
        sampled(length, token=1),
    ]
    result = TokenTree.from_nodes([-1, 0, 1, 1], parts, [2, 3], [LeafStatus.STOP] * 2)
    result.advantage[:] = 1.0, -1.0
    return result


def update(job: Job, of: TokenTree, on_policy: bool) -> None:
    """Run the head and loss, forward and backward, as the trainer does for a batch of one tree."""
    needed = {name for term in job.terms if isinstance(term, TokenTerm) for name in term.objective.needs_fields}
    for name in (needed | job.columns) & FIELDS & COLUMNS.keys():
        of.set(name, 0.5)
    for term in job.terms:
        term.prepare([of])
    (batch,) = pack([of], max_tokens=of.num_tokens)
    every = [term.on(batch, 1.0, on_policy, 1.0) for term in job.terms]
    terms = of_kernels(every)
    hidden, weight = ahead.head_of(job.model, batch.num_tokens)
    softcap = job.model.logit_softcap
    for each in every:
        if isinstance(each, Distilled):
            other, teacher = ahead.head_of(job.model, batch.num_tokens)
            heads = hidden, weight, other.detach(), teacher.detach()
            linear_divergence(*heads, **each.options, softcap=softcap, teacher_softcap=softcap).loss.backward()
    plan = plan_terms_loss(
        terms, num_rows=len(hidden), vocabulary=len(weight), hidden_size=hidden.shape[1], device=hidden.device,
        row=batch.row,
    )  # fmt: skip
    options: dict[str, Any] = {"softcap": softcap, "plan": plan}
    linear_terms_loss(hidden, weight, batch.target, terms, row=batch.row, **options).loss.backward()


def kernels_model(path: Path, dtype: str) -> ahead.Model:
    """Return the properties of the model at ``path`` that kernels depend on, from its configuration alone."""
    from transformers import AutoConfig

    try:
        config: Any = AutoConfig.from_pretrained(path).get_text_config()
    except (OSError, ValueError) as error:
        raise UserError(f"The model '{path}' has no readable configuration; give a model's folder.") from error
    heads = config.num_attention_heads
    kinds = getattr(config, "layer_types", None)
    sliding = getattr(config, "sliding_window", None) is not None if kinds is None else "sliding_attention" in kinds
    return ahead.Model(
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocab=config.vocab_size,
        dtype=getattr(torch, dtype),
        softcap=getattr(config, "attn_logit_softcapping", None),
        window=sliding,
        logit_softcap=getattr(config, "final_logit_softcapping", None),
        page=EngineConfig.page_size,
        hidden=config.hidden_size,
        recurrent=recurrent_of(config),
    )


def recurrent_of(config: Any) -> ahead.Recurrent | None:
    """Return the properties of the recurrent layers of a configuration, by the names that Transformers gives them."""

    def first(*names: str) -> int:
        return next((getattr(config, name) for name in names if getattr(config, name, None)), 0)

    if channels := first("linear_head_dim"):
        heads, taps = first("linear_num_heads"), first("linear_conv_kernel_dim")
        return ahead.Recurrent("kimi", heads, heads, channels, channels, taps, 3 * heads * channels)
    if heads := first("linear_num_value_heads"):
        groups = first("linear_num_key_heads")
        dim, values, taps = (first(f"linear_{of}") for of in ("key_head_dim", "value_head_dim", "conv_kernel_dim"))
        width = 2 * groups * dim + heads * values
        if Version(transformers.__version__) < Version("5.23"):  # whose layers repeat the keys before they call kernels
            groups = heads
        return ahead.Recurrent("delta", heads, groups, dim, values, taps, width)
    if heads := first("mamba_num_heads", "mamba_n_heads"):
        groups, dim = first("n_groups", "mamba_n_groups"), first("ssm_state_size", "mamba_d_state")
        values, taps = first("mamba_head_dim", "mamba_d_head"), first("conv_kernel", "mamba_d_conv")
        return ahead.Recurrent("mamba", heads, groups, dim, values, taps, heads * values + 2 * groups * dim)
    if taps := first("conv_L_cache"):
        return ahead.Recurrent("mamba", 0, 0, 0, 0, taps, config.hidden_size)
    return None
