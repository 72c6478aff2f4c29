"""Episodes whose steps wait: the tool of a Python function, of a server of MCP, and a server of OpenEnv.

Each episode of a group calls the tool three times and then answers; a call waits for the seconds of the case. A tiny
model is made to write the calls, of one token each, so that the time is that of steps and of what surrounds them.
``OpenEnv, clients alone`` are as many official clients in one event loop, with no model: the bound of OpenEnv.
A case with a prompt is a whole step of training on OpenEnv, beside TRL's (:mod:`.environment_steps`).
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rolltree.engine import EngineConfig, NativeEngine, SamplingParams
from rolltree.engine.programs import EnvironmentTurns
from rolltree.engine.programs.chat.toolbox import tool_schemas
from rolltree.engine.programs.servers.openenv import find_server
from rolltree.engine.programs.servers.process import PORT, Command

from ..runner import Bench, Calls, Case, UnsupportedError
from . import environment_steps

SERVERS = Path(__file__).with_name("environment_servers.py")
STEPS = environment_steps.STEPS
TRL = "TRL, OpenEnv"
BEGIN, END = "<assistant>", "<end>"
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}<tool_call></tool_call>{% endif %}"
    "{% for m in messages %}{{ '<assistant>' if m.role == 'assistant' else '[' + m.role + ']' }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MESSAGES = [{"role": "user", "content": "Wait."}]


@dataclass(frozen=True)
class Inputs:
    episodes: int
    seconds: float
    """The time that each step waits."""
    prompt: int = 0
    """Letters of the prompt of a step of training; 0: episodes alone."""

    def only_episodes(self) -> None:
        """Refuse a step of training.

        Raises:
            UnsupportedError: it is one.
        """
        if self.prompt:
            raise UnsupportedError("only OpenEnv's episodes are trained on")


@cache
def command(kind: str) -> Command:
    return Command([sys.executable, str(SERVERS), kind, PORT])


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """Yield one episode and many whose steps wait, and many whose steps do not."""
    if device.type != "cpu":
        return  # the model has no part in the time
    many = 8 if quick else 64
    for episodes, seconds in ((1, 0.2), (many, 0.2), (many, 0.0)):
        of = "episode" if episodes == 1 else "episodes"
        yield Case(f"{episodes} {of} of {STEPS} steps of {seconds:g} s", partial(Inputs, episodes, seconds))
    episodes, prompt = (2, 64) if quick else (8, 1024)
    for seconds in (0.2, 0.0):
        name = f"a step of {episodes} episodes of {STEPS} steps of {seconds:g} s, {prompt} letters"
        yield Case(name, partial(Inputs, episodes, seconds, prompt))


@cache
def _engine(call: str) -> NativeEngine:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    inner = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=END, pad_token=END)
    tokenizer.add_tokens([BEGIN], special_tokens=True)
    tokenizer.add_tokens([call])
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=259, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=16, max_position_embeddings=2048, eos_token_id=256, pad_token_id=256,
            bos_token_id=None,
        )
    )  # fmt: skip
    return NativeEngine(model.eval(), tokenizer, EngineConfig(kv_tokens=131_072))


def _episodes(x: Inputs, program: EnvironmentTurns, tools: Sequence[Any]) -> Calls:
    """Time a group of episodes, which call ``step`` of ``tools``."""
    arguments = {"seconds": x.seconds, "place": "here"}
    call = f"<tool_call>{json.dumps({'name': 'step', 'arguments': arguments})}</tool_call>"
    engine = _engine(call)
    tokenizer: Any = engine.tokenizer
    begin, end = tokenizer.convert_tokens_to_ids(BEGIN), tokenizer.convert_tokens_to_ids(END)
    turns = [[*tokenizer(text)["input_ids"], end] for text in [call] * STEPS + ["."]]

    def allowed(ids: Any) -> list[int]:
        starts = (ids == begin).nonzero()[0]  # of the turns after the first
        return [turns[len(starts)][len(ids) - 1 - int(starts[-1]) if len(starts) else len(ids)]]

    prompt = tokenizer.apply_chat_template(
        MESSAGES, tools=tool_schemas(tools), add_generation_prompt=True, tokenize=True, return_dict=False
    )
    params = SamplingParams(n=x.episodes, max_new_tokens=800, prefix_allowed_tokens_fn=allowed)
    context = {"messages": MESSAGES, "tools": tools}

    def play() -> None:
        (tree,) = engine.generate([prompt], params, program, contexts=[context])
        answers = [tokenizer.decode(path.response).count("waited") for path in tree.flatten()]
        if answers != [STEPS] * x.episodes:
            raise ValueError(f"An episode has {min(answers)} answers of {STEPS}.")

    return {"episodes": play}


def python(x: Inputs) -> Calls:
    x.only_episodes()
    return _episodes(x, EnvironmentTurns(max_turns=STEPS + 1), [f"{SERVERS}:step"])


def mcp(x: Inputs) -> Calls:
    x.only_episodes()
    tools = [{"mcp": f"{command('mcp').address()}/mcp"}]
    return _episodes(x, EnvironmentTurns(max_turns=STEPS + 1), tools)


def openenv(x: Inputs) -> Calls:
    import openenv.core.generic_client  # noqa: F401  # the server needs it

    if x.prompt:
        return environment_steps.of_rolltree(x.episodes, x.seconds, x.prompt, command("openenv").address())
    program = EnvironmentTurns("openenv", {"url": command("openenv").address()}, max_turns=STEPS + 1)
    return _episodes(x, program, list(program.tools))


def clients(x: Inputs) -> Calls:
    """Time the clients that the package brings."""
    from openenv.core.generic_client import GenericEnvClient

    x.only_episodes()
    address = command("openenv").address()
    find_server(address, None).offer()  # as the providers do before they are timed

    async def episode() -> None:
        client = GenericEnvClient(address, websocket_ping_interval_s=None)
        await client.reset()
        for _ in range(STEPS):
            await client.step({"seconds": x.seconds, "place": "here"})
        await client.close()

    async def every() -> None:
        await asyncio.gather(*(episode() for _ in range(x.episodes)))

    return {"episodes": lambda: asyncio.run(every())}


def trl(x: Inputs) -> Calls:
    import openenv.core.generic_client  # noqa: F401  # the server needs it

    if not x.prompt:
        raise UnsupportedError("its episodes end in an update")
    return environment_steps.of_trl(x.episodes, x.seconds, x.prompt, command("openenv").address())


BENCH = Bench(
    op="environments",
    directions=("episodes", "step"),
    cases=cases,
    providers={"Python": python, "MCP": mcp, "OpenEnv": openenv, "OpenEnv, clients alone": clients, TRL: trl},
    speedup_over=TRL,
    alone=True,
    warmup=0,
)
