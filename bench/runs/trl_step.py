"""A step of TRL's GRPO trainer, plain and accelerated: the update alone, and with the group that it samples.

On a CPU a case with the full vocabulary takes TRL minutes: give ``--limit 900``. With ``--model DIR`` the policy is the
pretrained model in this directory, and the prompts have words that hold one token each.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rolltree.engine import CostModel

from .. import workloads
from ..runner import Bench, Calls, Case

TRL = "TRL"
WORDS = 1000  # tokens of the tokenizer; the model has more


@dataclass(frozen=True)
class Inputs:
    device: torch.device
    prompt: int
    group: int
    response: int
    make: Callable[[], PreTrainedModel]
    """Makes the policy."""
    checkpointing: bool = True  # TRL's default


def small(
    device: torch.device, longest: int, width: int, ffn: int, layers: int, heads: int, vocabulary: int
) -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(heads // 2, 1),
        head_dim=128 if device.type == "cuda" else 32,
        max_position_embeddings=longest,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """Yield long and short prompts, for a small model with a large vocabulary on the CPU, for Qwen3 0.6B's shape on
    CUDA."""
    if quick:
        model = partial(small, device, 80, 64, 128, 2, 2, 2048)
        yield Case("64+4x16 layers 2 width 64 V=2048", partial(Inputs, device, 64, 4, 16, model))
        return
    if device.type == "cpu":
        for prompt in (512, 32):
            model = partial(small, device, prompt + 128, 256, 768, 4, 8, 151936)
            yield Case(f"{prompt}+8x128 layers 4 width 256 V=151936", partial(Inputs, device, prompt, 8, 128, model))
        return
    for prompt, group in ((1024, 8), (4096, 8), (4096, 16)):
        model = partial(small, device, prompt + 1024, 1024, 3072, 28, 16, 151936)
        yield Case(f"{prompt}+{group}x1024 Qwen3 0.6B", partial(Inputs, device, prompt, group, 1024, model))


def model_cases(path: Path, device: torch.device, quick: bool) -> Iterator[Case]:
    """Yield cases of a pretrained model in bf16 and fp32: its weights have this dtype for both providers."""
    prompt, group, response = (32, 4, 8) if quick else (512, 8, 64)
    for dtype in (torch.bfloat16, torch.float32):
        model = partial(workloads.pretrained, path, dtype, device)
        name = f"{path.name} {prompt}+{group}x{response} {str(dtype).removeprefix('torch.')}"
        yield Case(name, partial(Inputs, device, prompt, group, response, model))


def _tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of `WORDS` words, ``w0`` and so on."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    ids_by_token = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{i}": 3 + i for i in range(WORDS)}}
    words = Tokenizer(models.WordLevel(ids_by_token, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def trainer(x: Inputs, parts: dict[str, bool] | None) -> Calls:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from rolltree.engine.integrations.trl import accelerate

    g = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 3 + WORDS, (x.prompt,), generator=g)
    rows = [{"prompt": " ".join(f"w{i - 3}" for i in ids.tolist())}] * x.group
    policy = x.make()
    vocabulary = policy.config.get_text_config().vocab_size
    with tempfile.TemporaryDirectory() as directory:
        trl_trainer: Any = GRPOTrainer(
            policy,
            reward_funcs=lambda completions, **_: [float(i % 3) for i, _ in enumerate(completions)],
            args=GRPOConfig(
                output_dir=directory,
                per_device_train_batch_size=x.group,
                num_generations=x.group,
                max_completion_length=x.response,
                gradient_checkpointing=x.checkpointing,
                bf16=x.device.type == "cuda",
                use_cpu=x.device.type == "cpu",
                report_to=[],
                disable_tqdm=True,
                learning_rate=1e-6,
            ),
            train_dataset=Dataset.from_list(rows),
            processing_class=_tokenizer(),
        )
    trl_trainer.eos_token_ids = [vocabulary - 1]  # hardly ever sampled, so all completions have one length
    trl_trainer.generation_config.eos_token_id = trl_trainer.eos_token_ids
    if parts is not None:
        accelerate(trl_trainer, **parts)
    trl_trainer.current_gradient_accumulation_steps = 1
    if x.checkpointing:
        trl_trainer.model.gradient_checkpointing_enable()
    model, optimizer = trl_trainer.model.train(), trl_trainer.create_optimizer()
    of_batch = {k: v.to(x.device) for k, v in batch(x, ids, vocabulary, g).items()}

    def update() -> None:
        trl_trainer.compute_loss(model, dict(of_batch)).backward()
        learn()

    def learn() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def step() -> None:
        trl_trainer._buffered_inputs = None  # makes the trainer sample again
        trl_trainer.training_step(model, rows, None)
        learn()

    return {"update": update, "step": step}


def batch(x: Inputs, prompt: Tensor, vocabulary: int, g: torch.Generator) -> dict[str, Tensor]:
    """Return the inputs that TRL makes of a group, with random tokens."""
    G, C = x.group, x.response
    return {
        "prompt_ids": prompt.expand(G, -1),
        "prompt_mask": torch.ones(G, x.prompt, dtype=torch.long),
        "completion_ids": torch.randint(3, vocabulary - 1, (G, C), generator=g),
        "completion_mask": torch.ones(G, C, dtype=torch.long),
        "advantages": torch.randn(G, generator=g),
        "num_items_in_batch": torch.tensor(G * C),
    }


def flop_ratio(x: Inputs) -> float:
    """Return the FLOP of TRL's update over those of the accelerated one.

    TRL multiplies the head four times (it forms the logits again), and on a CPU for every token of the prompts too.
    Layers count three times, or four with checkpointing.
    """
    cost = CostModel.of(x.make())
    tree = workloads.group(x.prompt, x.response, x.group)
    layers = 4 if x.checkpointing else 3
    scored, positions = x.group * x.response, x.group * (x.prompt + x.response - 1)
    trl_flop = layers * (cost.flat(tree) - cost.scored * scored)
    trl_flop += 4 * cost.scored * (positions if x.device.type == "cpu" else scored)
    return trl_flop / (layers * (cost.shared(tree) - cost.scored * scored) + 3 * cost.scored * scored)


BENCH = Bench(
    op="trl_step",
    directions=("update", "step"),
    cases=cases,
    model_cases=model_cases,
    providers={
        TRL: partial(trainer, parts=None),
        "rolltree, head": partial(trainer, parts={"tree": False, "layers": False, "rollouts": False}),
        "rolltree, head and tree": partial(trainer, parts={"layers": False, "rollouts": False}),
        "rolltree, all parts": partial(trainer, parts={}),
    },
    speedup_over=TRL,
    speedup_ceiling=flop_ratio,
    ceiling_is="the FLOP of TRL's update over those of the accelerated one, sampling left out",
)
