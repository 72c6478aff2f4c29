"""A whole training step on trees of rollouts: packed as trees, and flat or masked by plain Transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from rolltree.engine import CostModel, TokenTree, TreeBatch, batch_loss, fuse_layers, pack
from rolltree.engine.model import varlen
from rolltree.engine.train.checkpointing import checkpoint_layers
from rolltree.kernels import Objective, linear_policy_loss

from .. import workloads
from ..runner import Bench, Calls, Case, UnsupportedError

FLAT = "flat, transformers sdpa"
MAX_TOKENS = {"cuda": 32768, "cpu": 5120}  # tokens of a flat micro-batch: larger ones are slower on the CPU
MAX_TREE_TOKENS = 32768  # tokens of a packed micro-batch
LARGEST_MASK = 20480  # tokens


@dataclass(frozen=True)
class Inputs:
    model: PreTrainedModel
    tree: TokenTree

    @property
    def normalizer(self) -> int:
        return int(self.tree.loss_length.sum())


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """Yield the cases: on the CPU a small model and every kind of tree; on CUDA shapes of Qwen3 0.6B, 1.7B and 4B."""
    group, segments, agent = workloads.group, workloads.segments, workloads.agent
    if device.type == "cpu" or quick:
        trees = {"128+8x32": group(128, 32, 8)}
        if not quick:
            trees = {
                "512+8x128": group(512, 128, 8),
                "1024+16x128": group(1024, 128, 16),
                "256+segments of 64, 7 deep, 16 wide": segments(256, 64, 7, 16),
                "256+4 conversations of 6x(32+64)": agent(256, 32, 64, 6, 4),
                "32+4x512": group(32, 512, 4),
            }
        small = cache(partial(_qwen3, device, torch.float32, 256, 768, 4, 8, 4, 32, 1024))
        for name, tree in trees.items():
            yield Case(f"{name} layers 4 width 256 V=1024 float32", partial(lambda tree: Inputs(small(), tree), tree))
        return
    sizes = {"0.6B": (1024, 3072, 28, 16), "1.7B": (2048, 6144, 28, 16), "4B": (2560, 9728, 36, 32)}
    wide = {
        "4096+8x1024": group(4096, 1024, 8),
        "16384+64x1024": group(16384, 1024, 64),
        "4096+8 conversations of 8x(512+1024)": agent(4096, 512, 1024, 8, 8),
        "1024+64x8192": group(1024, 8192, 64),
    }
    for size, names in {"0.6B": list(wide), "1.7B": ["4096+8x1024"], "4B": ["4096+8x1024"]}.items():
        width, ffn, layers, heads = sizes[size]
        model = cache(partial(_qwen3, device, torch.bfloat16, width, ffn, layers, heads, 8, 128, 151936))
        for name in names:
            make = partial(lambda model, tree: Inputs(model(), tree), model, wide[name])
            yield Case(f"{name} Qwen3 {size} bfloat16", make)


def model_cases(path: Path, device: torch.device, quick: bool) -> Iterator[Case]:
    """Yield cases of a pretrained model in bf16 and fp32."""
    trees = {"32+4x16": workloads.group(32, 16, 4)}
    if not quick:
        trees = {"512+16x64": workloads.group(512, 64, 16), "128+8x128": workloads.group(128, 128, 8)}
    for dtype in (torch.bfloat16, torch.float32):
        model = cache(partial(workloads.pretrained, path, dtype, device))
        for name, tree in trees.items():
            yield Case(
                f"{path.name} {name} {str(dtype).removeprefix('torch.')}",
                lambda model=model, tree=tree: Inputs(model().train(), tree),  # type: ignore[misc]
            )


def _qwen3(
    device: torch.device,
    dtype: torch.dtype,
    width: int,
    ffn: int,
    layers: int,
    heads: int,
    kv: int,
    dim: int,
    vocab: int,
) -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        head_dim=dim,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config).to(device, dtype).train()
    if device.type == "cuda":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def step_of(model: PreTrainedModel, losses: Callable[[], Iterator[Tensor]]) -> Calls:
    """Return a step: forward and backward of every micro-batch, gradient clipping and AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)

    def step() -> None:
        for loss in losses():
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return {"step": step}


def own_model(x: Inputs, attention: str) -> Any:
    model: Any = copy.deepcopy(x.model)
    model.set_attn_implementation(attention)
    return model


def tree(x: Inputs, *, fused: bool = False, checkpointed: bool | None = None) -> Calls:
    """Time packed trees; ``fused``: with the layers that training fuses. ``checkpointed``: layers keep nothing but
    attention (True), or everything (False); None: as the model is given."""
    model = own_model(x, "rolltree")
    if fused:
        fuse_layers(model)
    if checkpointed is not None:
        model.gradient_checkpointing_disable()
    if checkpointed:
        checkpoint_layers(model)
    batches = pack([x.tree], max_tokens=MAX_TREE_TOKENS, device=model.device)
    objective = Objective()
    return step_of(
        model,
        lambda: (batch_loss(model, b, objective, normalizer=x.normalizer, old_logprob=None).loss for b in batches),
    )


def flat(x: Inputs) -> Calls:
    """Time a trainer without trees: every path separately, the head on the responses only."""
    model = own_model(x, "sdpa")
    sequences, batches = x.tree.flatten(), []
    for leaves in workloads.by_shape(x.tree, MAX_TOKENS[model.device.type]):
        of_batch = [sequences[leaf] for leaf in leaves]
        ids = torch.tensor([s.prompt + s.response for s in of_batch], device=model.device)
        advantage = torch.tensor([s.advantage for s in of_batch], device=model.device)
        batches.append((ids, len(of_batch[0].response), advantage))

    def losses() -> Iterator[Tensor]:
        for ids, response, advantage in batches:
            logits = model(input_ids=ids, use_cache=False, logits_to_keep=response + 1).logits[:, :-1].float()
            target = ids[:, -response:].flatten()
            logprob = -torch.nn.functional.cross_entropy(logits.flatten(0, 1), target, reduction="none")
            yield on_policy(logprob, advantage.repeat_interleave(response), x.normalizer)

    return step_of(model, losses)


def masked(x: Inputs) -> Calls:
    """Time Transformers on the packed tree with a dense mask."""
    tokens = x.tree.num_tokens
    if tokens > LARGEST_MASK:
        raise UnsupportedError(f"its mask would take {tokens * tokens / 2**30:.1f} GiB")
    model = own_model(x, "sdpa")
    (batch,) = pack([x.tree], max_tokens=tokens, device=model.device)
    row = torch.arange(tokens, device=model.device)
    visible = ((row <= row[:, None]) & (row[:, None] < batch.subtree_end))[None, None]
    return packed_step(model, [(batch, {"attention_mask": visible})], partial(logits_loss, x))


Loss = Callable[[Any, Tensor], Tensor]  # takes a model and its hidden states


def packed_step(
    model: Any, batches: Sequence[tuple[TreeBatch, dict[str, Any]]], loss_of: Callable[[TreeBatch], Loss]
) -> Calls:
    """Return a step on packed tokens with Transformers' decoder; each batch has the arguments of its attention."""
    prepared = [(batch, attention, loss_of(batch)) for batch, attention in batches]

    def losses() -> Iterator[Tensor]:
        decoder = model.get_decoder()
        for batch, attention, loss in prepared:
            ids = {"input_ids": batch.input_ids[None], "position_ids": batch.position_ids[None]}
            yield loss(model, decoder(**ids, **attention, use_cache=False).last_hidden_state[0])

    return step_of(model, losses)


def logits_loss(x: Inputs, batch: TreeBatch) -> Loss:
    """Return the loss by logits and PyTorch's cross entropy."""
    fields = batch.fields(Objective())
    learned = batch.loss_mask.nonzero().flatten()
    rows, targets = batch.row[learned], batch.target[learned]
    advantage = (fields.adv_pos + fields.adv_neg)[
        learned
    ]  # nothing is clipped on policy, so summed advantages are exact

    def loss(model: Any, hidden: Tensor) -> Tensor:
        logits = model.lm_head(hidden[rows]).float()
        logprob = -torch.nn.functional.cross_entropy(logits, targets, reduction="none")
        return on_policy(logprob, advantage, x.normalizer)

    return loss


def fused_loss(x: Inputs, batch: TreeBatch) -> Loss:
    """Return the loss fused with the head."""
    fields, target, objective = batch.fields(Objective()), batch.target, Objective()

    def loss(model: Any, hidden: Tensor) -> Tensor:
        head: Tensor = model.lm_head.weight
        out = linear_policy_loss(hidden, head, target, fields, objective, normalizer=x.normalizer, row=batch.row)
        return out.loss

    return loss


def by_sequence(
    module: torch.nn.Module,
    query: Tensor,  # [1, Hq, T, D]
    key: Tensor,  # [1, Hkv, T, D]
    value: Tensor,  # [1, Hkv, T, D]
    attention_mask: object,
    *,
    lengths: list[int],  # lengths of the packed sequences
    **kwargs: Any,
) -> tuple[Tensor, None]:  # [1, T, Hq, D]
    """Return causal SDPA of each sequence separately: no padding, and no pairs across sequences."""
    each = zip(*(x.split(lengths, dim=2) for x in (query, key, value)), strict=True)
    return torch.cat([sdpa_attention_forward(module, *qkv, None, **kwargs)[0] for qkv in each], dim=1), None


BY_SEQUENCE = "sdpa_by_sequence"
AttentionInterface.register(BY_SEQUENCE, by_sequence)

FLAT_MASK = torch.ones(1, 1, 1, 1, dtype=torch.bool)
"""Four dimensions keep a model from preparing any mask."""


def packed_flat(x: Inputs, loss_of: Callable[[Inputs, TreeBatch], Loss]) -> Calls:
    """Time every path separately, packed end to end, which shows how much of a speedup comes from the kernels."""
    model = own_model(x, BY_SEQUENCE)
    paths = [x.tree.chain(leaf) for leaf in range(x.tree.num_leaves)]
    batches = []
    cost = CostModel.of(model)  # by which no path is worth sharing with others
    for batch in pack(paths, max_tokens=MAX_TOKENS[model.device.type], device=model.device, unshare=cost):
        assert batch.cu_seqlens is not None
        batches.append((batch, {"attention_mask": FLAT_MASK, "lengths": batch.cu_seqlens.diff().tolist()}))
    return packed_step(model, batches, partial(loss_of, x))


def flex(x: Inputs, *, fused: bool = False, backend: str | None = None) -> Calls:
    """Time the packed tree with FlexAttention's block mask; ``fused``: with fused layers that keep everything, as
    rolltree trains. ``backend`` of FlexAttention's kernels; None: PyTorch's choice."""
    if x.model.device.type == "cpu":
        raise UnsupportedError("timed on CUDA only, compiling takes longer than the benchmark")
    from torch.nn.attention.flex_attention import create_block_mask

    tokens = x.tree.num_tokens
    if tokens > MAX_TREE_TOKENS:
        raise UnsupportedError(f"the tree of {tokens} tokens is larger than a micro-batch, and it cannot be split")
    model = own_model(x, "flex_attention")
    (batch,) = pack([x.tree], max_tokens=tokens, device=model.device)
    end = batch.subtree_end

    def visible(b: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return (key <= row) & (row < end[key])

    mask = create_block_mask(visible, None, None, tokens, tokens, device=model.device)
    if fused:
        fuse_layers(model)
        model.gradient_checkpointing_disable()
    options = {} if backend is None else {"kernel_options": {"BACKEND": backend}}
    return packed_step(model, [(batch, {"attention_mask": mask, **options})], partial(logits_loss, x))


def varlen_flat(x: Inputs) -> Calls:
    """Time every path separately, packed end to end, with flash-attn's kernel or torch's and rolltree's head."""
    if varlen.kernel() is None:
        raise UnsupportedError("it needs CUDA, and flash-attn or torch's varlen attention")
    model = own_model(x, "rolltree")
    paths = [x.tree.chain(leaf) for leaf in range(x.tree.num_leaves)]
    batches = pack(paths, max_tokens=MAX_TREE_TOKENS, device=model.device, unshare=CostModel.of(model))
    objective = Objective()
    return step_of(
        model,
        lambda: (batch_loss(model, b, objective, normalizer=x.normalizer, old_logprob=None).loss for b in batches),
    )


def on_policy(logprob: Tensor, advantage: Tensor, normalizer: int) -> Tensor:
    """Return the loss of the first update on a batch: the ratio is 1, its gradient that of the log-prob."""
    return -((logprob - logprob.detach()).exp() * advantage).sum() / normalizer


def flop_ratio(x: Inputs) -> float:
    """Return the FLOP of the flat step over those of the tree step; forward and backward scale alike."""
    cost = CostModel.of(x.model)
    return cost.flat(x.tree) / cost.shared(x.tree)


BENCH = Bench(
    op="tree_step",
    directions=("step",),
    cases=cases,
    providers={
        "rolltree, tree": tree,
        "rolltree, tree, as trained": partial(tree, fused=True, checkpointed=False),
        "rolltree, tree, as trained, attention kept": partial(tree, fused=True, checkpointed=True),
        FLAT: flat,
        "packed flat, sdpa": partial(packed_flat, loss_of=logits_loss),
        "packed flat, sdpa, rolltree's head": partial(packed_flat, loss_of=fused_loss),
        "varlen, flat": varlen_flat,
        "dense mask, transformers sdpa": masked,
        "flex_attention, transformers": flex,
        "flex_attention, fused layers": partial(flex, fused=True),
        "flex_attention, FLASH, fused layers": partial(flex, fused=True, backend="FLASH"),
    },
    speedup_over=FLAT,
    model_cases=model_cases,
    alone=True,
    speedup_ceiling=flop_ratio,
    ceiling_is="the FLOP of the flat step over the FLOP of the tree step",
)
