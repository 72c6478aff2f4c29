"""An agent of agent_cpu.toml: a loop of turns and tools over OpenAI's client, as for any endpoint."""

from __future__ import annotations

import json
from typing import Any

from rolltree.engine.programs.chat.toolbox import CHAT_TOOLS

TURNS = 3


async def solve(task: dict[str, Any], client: Any) -> None:
    """Answer the task with the calculator; the verifier judges the last answer."""
    messages = list(task["messages"])
    for _ in range(TURNS):
        answer = await client.chat.completions.create(model="policy", messages=messages, tools=task["tools"])
        said = answer.choices[0].message
        messages.append(said.model_dump(exclude_none=True))
        if not said.tool_calls or answer.choices[0].finish_reason == "length":
            return
        for call in said.tool_calls:
            try:
                result = CHAT_TOOLS[call.function.name](**json.loads(call.function.arguments))
            except Exception as error:  # for the model to read
                result = f"error: {type(error).__name__}: {error}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
