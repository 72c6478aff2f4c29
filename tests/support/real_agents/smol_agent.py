"""An agent of smolagents: one that calls tools, or one that writes code."""

import json
import os
import sys

from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool


@tool
def calculator(expression: str) -> str:
    """Computes.

    Args:
        expression: The expression.
    """
    return "42"


address, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
kind = CodeAgent if sys.argv[1] == "code" else ToolCallingAgent
model = OpenAIServerModel("policy", api_base=address, api_key=key)
agent = kind(tools=[calculator], model=model, max_steps=4, verbosity_level=0)
with open(os.environ["ROLLTREE_TASK"]) as file:
    agent.run(json.load(file)["messages"][0]["content"])
with open(os.environ["ROLLTREE_REWARD"], "w") as file:
    json.dump(1.0, file)
