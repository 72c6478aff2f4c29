"""An agent of openai-agents: by Responses or chats, whole or streamed, or in a talk of three turns without tools."""

import asyncio
import json
import os
import sys
from typing import Any

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

protocol, way = sys.argv[1:]  # a talk is whole
set_tracing_disabled(True)


@function_tool
def calculator(expression: str) -> str:
    """Computes.

    Args:
        expression: The expression.
    """
    return "42"


async def solve(question: str) -> int:
    kind: Any = OpenAIResponsesModel if protocol == "responses" else OpenAIChatCompletionsModel
    model = kind(model="policy", openai_client=AsyncOpenAI())
    tools: Any = [] if way == "talk" else [calculator]
    agent = Agent(name="agent", instructions="Be brief.", tools=tools, model=model)
    if way == "stream":
        run: Any = Runner.run_streamed(agent, question, max_turns=20)
        async for _ in run.stream_events():
            pass
    elif way == "talk":
        calls, said = 0, [{"role": "user", "content": question}]
        for _ in range(3):
            run = await Runner.run(agent, said)
            calls += len(run.raw_responses)
            said = [*run.to_input_list(), {"role": "user", "content": "Say more."}]
        return calls
    else:
        run = await Runner.run(agent, question, max_turns=20)
    return len(run.raw_responses)


with open(os.environ["ROLLTREE_TASK"]) as file:
    calls = asyncio.run(solve(json.load(file)["messages"][0]["content"]))
with open(os.environ["ROLLTREE_REWARD"], "w") as file:
    json.dump({"reward": 1.0, "calls": calls}, file)
