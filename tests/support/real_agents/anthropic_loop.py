"""A loop of turns and tools over Anthropic's client, whole or streamed; or a talk of three turns without tools."""

import json
import os
import sys
from typing import Any

import anthropic

PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
TOOLS = [{"name": "calculator", "description": "Computes.", "input_schema": PARAMETERS}]

client = anthropic.Anthropic()
with open(os.environ["ROLLTREE_TASK"]) as file:
    messages: list[Any] = [{"role": "user", "content": json.load(file)["messages"][0]["content"]}]
calls, talk = 0, "talk" in sys.argv
while True:
    asked: Any = {"model": "policy", "max_tokens": 200, "messages": messages, "system": "Be brief."}
    asked |= {} if talk else {"tools": TOOLS}
    if sys.argv[1] == "stream":
        with client.messages.stream(**asked) as stream:
            said = stream.get_final_message()
    else:
        said = client.messages.create(**asked)
    calls += 1
    messages.append({"role": "assistant", "content": said.content})
    if talk and calls < 3:
        messages.append({"role": "user", "content": "Say more."})
        continue
    used = [block.id for block in said.content if block.type == "tool_use"]
    if not used:
        break
    messages.append(
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": id_, "content": "42"} for id_ in used]}
    )
with open(os.environ["ROLLTREE_REWARD"], "w") as file:
    json.dump({"reward": 1.0, "calls": calls}, file)
