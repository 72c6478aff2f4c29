"""Groups of responses to new prompts, with log-probs: the native engine and its peers."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from rolltree.engine import EngineConfig, NativeEngine, SamplingParams

from .. import workloads
from ..runner import Bench, Calls, Case, UnsupportedError

PLAIN = "transformers generate"


@dataclass(frozen=True)
class Inputs:
    model: PreTrainedModel
    prompts: list[list[int]]
    group: int
    new_tokens: int
    stops: tuple[int, ...]
    """Tokens that end a response; none if lengths are forced."""

    @property
    def tokens(self) -> int:
        """Sampled tokens with forced lengths."""
        return len(self.prompts) * self.group * self.new_tokens


def make_model(device: torch.device, *, small: bool) -> PreTrainedModel:
    """Return a model of random weights: four small layers for a CPU, or the shape of Qwen3 0.6B."""
    shape = (4, 256, 768, 8, 4, 32, 1024) if small else (28, 1024, 3072, 16, 8, 128, 151936)
    layers, width, ffn, heads, kv_heads, dim, vocabulary = shape
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=dim,
        max_position_embeddings=16384,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config).to(device, torch.float32 if small else torch.bfloat16).eval()


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """Yield a case of forced lengths, and one whose responses end at one of the tokens that come up about every 64."""
    small = device.type == "cpu"
    model = cache(partial(make_model, device, small=small))
    vocabulary, dtype = (1024, "float32") if small else (151936, "bfloat16")
    count, prompt, group, new_tokens = (1, 64, 4, 16) if quick else (4, 512, 16, 128) if small else (16, 4096, 16, 512)
    prompts = torch.randint(vocabulary, (count, prompt)).tolist()
    name = f"{count} x ({prompt} + {group}x{new_tokens}) V={vocabulary} {dtype}"
    yield Case(f"{name} forced lengths", lambda: Inputs(model(), prompts, group, new_tokens, ()))
    stops = tuple(range(vocabulary // 64))
    yield Case(f"{name} natural lengths", lambda: Inputs(model(), prompts, group, new_tokens, stops))


def model_cases(path: Path, device: torch.device, quick: bool) -> Iterator[Case]:
    """Yield cases of a pretrained model in bf16 and fp32, with random prompts and forced lengths."""
    vocabulary = workloads.vocabulary_of(path)
    for dtype in (torch.bfloat16, torch.float32):
        model = cache(partial(workloads.pretrained, path, dtype, device))
        shapes = [(1, 16, 4, 8)] if quick else [(2, 128, 8, 128), (2, 512, 16, 64), (2, 512, 64, 64)]
        for count, prompt, group, new_tokens in shapes:
            prompts = torch.randint(vocabulary, (count, prompt)).tolist()
            name = f"{path.name} {count} x ({prompt} + {group}x{new_tokens}) {str(dtype).removeprefix('torch.')}"
            yield Case(
                name,
                lambda model=model, prompts=prompts, group=group, new_tokens=new_tokens: Inputs(  # type: ignore[misc]
                    model().eval(), prompts, group, new_tokens, ()
                ),
            )


def kv_tokens(model: PreTrainedModel, tokens: int) -> int:
    """Return the capacity of a KV cache: ``tokens`` tokens, or fewer if four fifths of the device's free memory hold
    fewer."""
    if model.device.type != "cuda":
        return tokens
    config: Any = model.config
    token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * model.dtype.itemsize
    free, _ = torch.cuda.mem_get_info(model.device)
    return min(tokens, int(0.8 * free) // token)


def native(x: Inputs, *, compile: bool = False) -> Calls:
    """Time the native engine; every call starts with an empty cache, as prompts are new."""
    capacity = kv_tokens(x.model, 2 * (x.tokens + sum(map(len, x.prompts))))
    engine = NativeEngine(x.model, config=EngineConfig(kv_tokens=capacity, compile=compile))
    params = SamplingParams(n=x.group, max_new_tokens=x.new_tokens, ignore_eos=True, stop_token_ids=x.stops)

    def call() -> None:
        engine.forget_prefixes()
        trees = engine.generate(x.prompts, params)
        assert x.stops or sum(int(tree.response_length.sum()) for tree in trees) == x.tokens

    return {"generate": call}


def vllm_engine(model: PreTrainedModel, longest: int, **options: Any) -> Any:
    """Return vLLM's engine in this process, with prefix caching unless ``options`` say otherwise, compiled."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from rolltree.engine.rollout.vllm.engine import VllmEngine

    directory = tempfile.mkdtemp(prefix="rolltree-bench-")
    model.save_pretrained(directory)
    if model.device.type == "cuda":
        options["gpu_memory_utilization"] = 0.5
    else:
        options |= {"kv_cache_memory_bytes": 1 << 30, "enable_chunked_prefill": True}
    return VllmEngine(directory, dtype=str(model.dtype).removeprefix("torch."), max_model_len=longest, **options).llm


def vllm(x: Inputs) -> Calls:
    """Time vLLM as its users call it: `n` samples of each prompt, prefix caching, compiled."""
    llm = vllm_engine(x.model, len(x.prompts[0]) + x.new_tokens)
    import vllm

    params = vllm.SamplingParams(
        n=x.group,
        max_tokens=x.new_tokens,
        ignore_eos=True,
        stop_token_ids=list(x.stops),
        logprobs=0,
        detokenize=False,
    )
    prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in x.prompts]

    def call() -> None:
        llm.reset_prefix_cache()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert x.stops or sum(len(o.token_ids) for output in outputs for o in output.outputs) == x.tokens

    return {"generate": call}


class SampledLogprobs(LogitsProcessor):
    """Records the log-probs of what ``generate`` samples, step by step: the scores of all steps that it would keep are
    80 GB for 256 responses of 512 tokens and a vocabulary of 151,936."""

    def __init__(self) -> None:
        self.steps: list[Tensor] = []  # [N] each
        self.scores: Tensor | None = None  # [N, V], the scores of the last step, whose tokens are not known yet

    def __call__(
        self,
        input_ids: Tensor,  # [N, T]
        scores: Tensor,  # [N, V]
    ) -> Tensor:
        self.note(input_ids[:, -1])
        self.scores = scores
        return scores

    def note(
        self,
        token: Tensor,  # [N], log-probs by the last scores
    ) -> None:
        if self.scores is not None:
            picked = self.scores.gather(1, token[:, None]).squeeze(1).float()
            self.steps.append(picked - self.scores.float().logsumexp(-1))


def transformers_generate(x: Inputs) -> Calls:
    """Time Transformers' generate with all groups as one batch, with the log-probs of the sampled tokens."""
    model: Any = x.model
    ids = torch.tensor(x.prompts, device=model.device)
    config = GenerationConfig(
        do_sample=True,
        top_k=0,
        num_return_sequences=x.group,
        max_new_tokens=x.new_tokens,
        eos_token_id=list(x.stops) or None,
        pad_token_id=0,
    )

    def call() -> None:
        attention = model.config._attn_implementation
        model.set_attn_implementation("sdpa")  # an engine may have set another attention
        noted = SampledLogprobs()
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, generation_config=config, logits_processor=[noted])
        noted.note(out[:, -1])
        assert torch.stack(noted.steps, 1).shape == out[:, ids.shape[1] :].shape
        model.set_attn_implementation(attention)

    return {"generate": call}


def transformers_continuous(x: Inputs) -> Calls:
    """Time Transformers' continuous batching, which returns no log-probs; every sample is a separate prompt."""
    model: Any = x.model
    if not hasattr(model, "generate_batch"):
        raise UnsupportedError("this version of Transformers has no generate_batch")
    if model.device.type == "cpu":
        raise UnsupportedError("it needs an accelerator")
    config = GenerationConfig(
        do_sample=True, max_new_tokens=x.new_tokens, eos_token_id=list(x.stops) or -1, pad_token_id=0
    )
    prompts = [prompt for prompt in x.prompts for _ in range(x.group)]

    def call() -> None:
        attention = model.config._attn_implementation
        model.set_attn_implementation("sdpa")
        outputs = model.generate_batch(inputs=prompts, generation_config=config)
        assert len(outputs) == len(prompts)
        model.set_attn_implementation(attention)

    return {"generate": call}


BENCH = Bench(
    op="rollout",
    directions=("generate",),
    cases=cases,
    providers={
        "rolltree": native,
        "rolltree compiled": partial(native, compile=True),
        "vllm": vllm,
        "transformers continuous batching": transformers_continuous,
        PLAIN: transformers_generate,
    },
    speedup_over=PLAIN,
    model_cases=model_cases,
    alone=True,
    warmup=0,  # calls are long, and the first one, which is not timed, has compiled and captured all
)
