"""Environments with the templates of published models, through the engine: ends of turns, XML calls, refusals."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rolltree.engine import LeafStatus, NativeEngine, SamplingParams
from rolltree.engine.app.assembly.run import build
from rolltree.engine.app.config import load_config
from rolltree.engine.app.console import Console
from rolltree.engine.app.dry_run import plan_lines
from rolltree.engine.data.segment import Origin
from rolltree.engine.data.tree import TokenTree
from rolltree.engine.errors import UserError
from rolltree.engine.programs import EnvironmentTurns, Observation
from rolltree.engine.programs.chat.toolbox import tool_schema

from ...support import chat_templates as templates
from ...support.conversations import write_conversations

ASKED = [{"role": "user", "content": "Six times seven?"}]
needs_trl = pytest.mark.skipif(not templates.names(), reason="TRL is not installed: pip install rolltree[trl]")


def engine_of(tokenizer: PreTrainedTokenizerFast, ends: Sequence[str]) -> NativeEngine:
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=1, head_dim=16,
            num_attention_heads=2, num_key_value_heads=1, bos_token_id=None, eos_token_id=None, pad_token_id=None,
        )
    )  # fmt: skip
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(list(ends))
    return NativeEngine(model, tokenizer)


def talk(name: str, turns: Sequence[str], program: EnvironmentTurns, tools: tuple[str, ...] = ()) -> TokenTree:
    """A response in which the model says ``turns``, each with its end token."""
    tokenizer = templates.tokenizer(name)
    engine = engine_of(tokenizer, templates.ends(name))
    schemas = [tool_schema(tool) for tool in tools] or None
    asked = tokenizer.apply_chat_template(ASKED, tools=schemas, tokenize=False)
    text = tokenizer.apply_chat_template(ASKED, tools=schemas, add_generation_prompt=True, tokenize=False)
    same = next((i for i, (a, b) in enumerate(zip(asked, text, strict=False)) if a != b), len(asked))
    begun = text[same:]
    begin = tokenizer("<|" * begun.startswith("assistant") + begun, add_special_tokens=False)["input_ids"]
    script = [tokenizer(turn, add_special_tokens=False)["input_ids"] for turn in turns]

    def allowed(ids: Any) -> list[int]:
        so_far, turn, at = ids.tolist(), 0, 0
        for i in range(len(so_far) - len(begin) + 1):
            if so_far[i : i + len(begin)] == begin:
                turn, at = turn + 1, i + len(begin)
        return [script[turn][len(so_far) - at]]

    prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    params = SamplingParams(n=1, max_new_tokens=600, prefix_allowed_tokens_fn=allowed)
    context = {"messages": ASKED, "tools": tools}
    (tree,) = engine.generate([prompt], params, program, contexts=[context])
    return tree


class Echo:
    """Repeats what it hears; the third turn is the last."""

    def __init__(self, context: Any) -> None:
        self.heard: list[str] = []

    def step(self, messages: Any) -> Observation:
        self.heard.append(messages[-1]["content"])
        said = [{"role": "user", "content": f"you said {self.heard[-1]}<|im_end|>"}]
        return Observation(said, done=len(self.heard) == 3, reward=1.0)


ENDINGS = [
    ("qwen3", ["<|im_end|>", "<|endoftext|>", "<|im_end|>"]),
    ("qwen3_5_think", ["<|endoftext|>", "<|endoftext|>", "<|endoftext|>"]),
    ("llama3_1", ["<|eom_id|>", "<|end_of_text|>", "<|eot_id|>"]),
    ("glm4moe", ["<|user|>", "<|user|>", "<|endoftext|>"]),
    ("glm4moe", ["<|endoftext|>", "<|observation|>", "<|user|>"]),
    ("gptoss", ["<|return|>", "<|return|>", "<|return|>"]),
    ("phi3", ["<|endoftext|>", "<|end|>", "<|endoftext|>"]),
    ("gemma3", ["<end_of_turn>", "<eos>", "<eos>"]),
]


@needs_trl
@pytest.mark.parametrize(("name", "ends"), ENDINGS)
def test_any_of_the_models_end_tokens_ends_a_turn(name: str, ends: list[str]) -> None:
    """The environment hears each turn, and the conversation goes on as if the template's own token had ended it."""
    said = ["a", "b", "c"]
    tree = talk(name, [turn + end for turn, end in zip(said, ends, strict=True)], EnvironmentTurns(Echo))
    assert (tree.meta["given_rewards"], tree.status[0]) == ({0: 3.0}, LeafStatus.STOP)
    tokenizer = templates.tokenizer(name)
    (leaf,) = tree.flatten()
    text, wanted = tokenizer.decode(leaf.response), ""
    whole = list(ASKED)
    for number, end in enumerate(ends):
        wanted += said[number] + end
        if number < 2:
            answer = {"role": "user", "content": f"you said {said[number]}<|im_end|>"}
            whole += [{"role": "assistant", "content": f"TURN{number}"}, answer]
            full = tokenizer.apply_chat_template(whole, add_generation_prompt=True, tokenize=False)
            after = full[full.index(f"TURN{number}") + len("TURN0") :]
            closers = {"gptoss": ["<|end|>"], "glm4moe": [end]}.get(name, templates.ends(name))
            closer = next((closer for closer in closers if after.startswith(closer)), "")
            wanted += after[len(closer) :]
    assert text == wanted
    origin = tree.origin[tree.response_rows(0)]
    assert (leaf.loss_mask == (origin == Origin.SAMPLED)).all()


XML = "<tool_call>\n<function=calculator>\n<parameter=expression>\n6*7\n</parameter>\n</function>\n</tool_call>"
GLM = "\n<tool_call>calculator\n<arg_key>expression</arg_key>\n<arg_value>6*7</arg_value>\n</tool_call>"
CALLS = [
    ("qwen3_5_think", f"Yes.\n</think>\n\n{XML}<|im_end|>", "\n<|im_start|>user\n<tool_response>\n42\n</tool_response>"
     "<|im_end|>\n<|im_start|>assistant\n<think>\n"),
    ("nemotron_3_nano", f"{XML}<|im_end|>", "\n<|im_start|>user\n<tool_response>\n42\n</tool_response>\n<|im_end|>\n"
     "<|im_start|>assistant\n<think>\n"),
    ("qwen3_5_think", f"{XML[:40]}<|im_end|>", "\n<|im_start|>user\n<tool_response>\nerror: that is no call of a "
     "tool; there are calculator\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n"),
    ("glm4moe", f"{GLM}<|observation|>", "\n<tool_response>\n42\n</tool_response><|assistant|>"),
    ("llama3_1", '{"name": "calculator", "parameters": {"expression": "6*7"}}<|eom_id|>',
     '<|start_header_id|>ipython<|end_header_id|>\n\n"42"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n'),
    ("gptoss", "<|channel|>commentary to=functions.calculator "
     '<|constrain|>json<|message|>{"expression": "6*7"}<|call|>',
     '<|start|>functions.calculator to=assistant<|channel|>commentary<|message|>"42"<|end|><|start|>assistant'),
    ("lfm2_2_5", "<|tool_call_start|>[calculator(expression='6*7')]<|tool_call_end|><|im_end|>",
     "\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"),
]  # fmt: skip


@needs_trl
@pytest.mark.parametrize(("name", "call", "answer"), CALLS)
def test_a_tool_is_called_in_the_form_that_the_template_teaches(name: str, call: str, answer: str) -> None:
    last = f"So 42{templates.ends(name)[0]}"
    tree = talk(name, [call, last], EnvironmentTurns(), ("calculator",))
    text = templates.tokenizer(name).decode(tree.flatten()[0].response)
    assert text == call + answer + last
    assert tree.status[0] == LeafStatus.STOP


REWRITES = (
    "{% for m in messages %}{% if loop.last and m.role == 'user' %}Now: {% endif %}<{{ m.role }}>{{ m.content }}<end>\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Marks the last message, which is not the last one later."""
UNENDED = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
NO_USER = (
    "{% for m in messages %}{% if m.role != 'user' or loop.first %}<{{ m.role }}>{{ m.content }}<end>{% endif %}"
    "{% endfor %}"
)
SHORT = "{% if messages | length > 1 %}{{ raise_exception('short') }}{% endif %}{{ messages[0].content }}"
ONE_SIDE = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"


@pytest.mark.check(but=1)
@pytest.mark.parametrize(
    ("template", "needle"),
    [
        (REWRITES, "rewrites the prompt once the conversation goes on: 'Now: "),
        (UNENDED, "ends an assistant's turn with none of the model's end-of-sequence tokens"),
        (NO_USER, "leaves out messages of user after an assistant's turn"),
        (SHORT, "cannot write messages of user, assistant: short"),
        (
            "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
            "leaves out what the assistant says",
        ),
    ],
)
def test_a_template_that_does_not_only_add_is_refused_before_the_run(
    tmp_path: Path, template: str, needle: str
) -> None:
    toml = write_conversations(tmp_path)
    words = AutoTokenizer.from_pretrained(tmp_path / "model")
    words.chat_template = template.replace("<end>", words.eos_token)
    words.save_pretrained(tmp_path / "model")
    config = load_config(toml, [f"--output_dir={tmp_path / 'runs'}"])
    with pytest.raises(UserError, match=needle):
        build(config, console=Console())
    with pytest.raises(UserError, match=needle):
        list(plan_lines(config))


def test_an_unknown_tool_format_is_refused_before_the_run(tmp_path: Path) -> None:
    toml = write_conversations(tmp_path)
    given = ['--data.tools=["calculator"]', '--rollout.program_options.tool_format="xml"']
    with pytest.raises(UserError, match=r"no tool_format 'xml'; known are .*qwen_xml"):
        build(load_config(toml, [f"--output_dir={tmp_path / 'runs'}", *given]), console=Console())
