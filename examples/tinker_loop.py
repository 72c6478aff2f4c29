"""GRPO by Tinker's client; the reward is the share of digits in an answer. See docs/tinker.md for how to run it."""

from __future__ import annotations

import sys

import tinker
from tinker import types

QUESTIONS = ["What is a good number?", "How old are trees?", "Tell me a date.", "How far is the moon?"]
GROUP, ADAM, PARAMS = 8, types.AdamParams(learning_rate=1e-3), types.SamplingParams(max_tokens=16)


def data_of(prompt: list[int], group: list[types.SampledSequence], rewards: list[float]) -> list[types.Datum]:
    """A datum for each answer: its advantage is how far its reward is above the group's mean."""
    data, before, mean = [], [0.0] * (len(prompt) - 1), sum(rewards) / len(rewards)
    for one, reward in zip(group, rewards, strict=True):
        inputs = {
            "target_tokens": prompt[1:] + one.tokens,
            "logprobs": before + one.logprobs,
            "advantages": before + [reward - mean] * len(one.tokens),
        }
        data.append(types.Datum(types.ModelInput.from_ints(prompt + one.tokens[:-1]), inputs))
    return data


(served,) = tinker.RestClient().get_server_capabilities().result().supported_models
training = tinker.ServiceClient().create_lora_training_client(served.model_name, rank=16, seed=0).result()
tokenizer = training.get_tokenizer()
prompts = [tokenizer.encode(f"Question: {question}\nAnswer:") for question in QUESTIONS]
for step in range(int(sys.argv[1]) if sys.argv[1:] else 20):
    sampler = training.save_weights_and_get_sampling_client().result()
    sampled = [sampler.sample(types.ModelInput.from_ints(prompt), GROUP, PARAMS) for prompt in prompts]
    groups = [future.result().sequences for future in sampled]
    texts = [[tokenizer.decode(one.tokens) or " " for one in group] for group in groups]
    rewards = [[sum(map(str.isdigit, text)) / len(text) for text in some] for some in texts]
    data = [one for three in zip(prompts, groups, rewards, strict=True) for one in data_of(*three)]
    training.forward_backward(data, "importance_sampling")
    training.optim_step(ADAM).result()
    print(f"step {step}: reward {sum(map(sum, rewards)) / len(data):.3f}")
