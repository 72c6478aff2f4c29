"""Makes the two models that `two_policies_cpu.toml` starts from: one that answers sums and one that judges answers.

The generator is warmed up as in arithmetic_warmup.py. The verifier begins as the generator and learns to answer the
question after a solution by 1 (right) or 0 (wrong), in training the right digit in six of ten cases.
"""

from __future__ import annotations

import math
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from rolltree.engine import TokenTree, pack
from rolltree.engine.parts.resolve import import_object
from rolltree.engine.prompts.prompts import held_out
from rolltree.engine.prompts.sources import PromptSource
from rolltree.engine.settings import TrainConfig
from rolltree.engine.train.config import TrainerConfig
from rolltree.engine.train.terms import TokenTerm
from rolltree.engine.train.trainer import Trainer, Weighted
from rolltree.kernels import Objective

STEPS = 60
LEARNING_RATE = 1e-3
RIGHT_SHARE = 0.6
SEED = 1234

create_generator, worked, quick = (
    import_object(f"{Path(__file__).with_name('arithmetic_warmup.py')}:{name}")
    for name in ("create", "worked", "quick")
)


def create(config: TrainConfig, directory: Path) -> None:
    """Write the generator to ``directory`` and the verifier to the path of `[models.verifier]`."""
    create_generator(config, directory)
    create_verifier(config, directory)


def create_verifier(config: TrainConfig, directory: Path) -> None:
    """Write the verifier, which begins as the generator in ``directory``."""
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="rolltree")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    source = PromptSource(
        config.data, tokenizer, SEED + 1, held_out(config.data, config.evaluation.problems, tokenizer)
    )
    learn(model, verdicts(source, tokenizer, config.rollout.program_options["question"]))
    target = Path(str(config.models["verifier"].path))
    shutil.rmtree(target, ignore_errors=True)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def verdicts(source: PromptSource, tokenizer: PreTrainedTokenizerFast, question: str) -> Iterator[TokenTree]:
    """Yield problems with a solution and the question, each with a verdict; only this is learned."""
    rng, end = random.Random(SEED), tokenizer.eos_token_id
    while True:
        (prompt,) = source.next(1)
        whole = worked(prompt.entry)
        said = whole if rng.random() < 0.5 else quick(prompt.entry, rng)
        right = said.rpartition(" ")[2] == whole.rpartition(" ")[2]
        verdict = "1" if right == (rng.random() < RIGHT_SHARE) else "0"
        path = [*prompt.token_ids, *tokenizer(said)["input_ids"], end, *tokenizer(question)["input_ids"]]
        yield TokenTree.from_sequences(path, [[*tokenizer(verdict)["input_ids"], end]])


def learn(model: AutoModelForCausalLM, stream: Iterator[TokenTree]) -> None:
    """Train on the verdicts by next-token prediction, with a cosine schedule of the learning rate."""
    trainer = Trainer(model, TrainerConfig(lr=LEARNING_RATE, betas=(0.9, 0.98), lr_warmup_steps=10))
    term = TokenTerm(Objective(surrogate="nll"))
    for step in range(STEPS):
        trees = [next(stream) for _ in range(64)]
        trainer.lr_scale = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / STEPS))
        terms = [Weighted(term, term.normalizer(trees))]
        tokens = sum(tree.logical_tokens for tree in trees)
        for batch in pack(trees, max_tokens=16384):
            trainer.forward_backward(batch, terms, tokens, temperature=1.0, on_policy=True)
        trainer.optim_step()
    print(f"warm-up of the verifier: {STEPS} steps", flush=True)
