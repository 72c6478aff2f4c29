"""An agent of pydantic-ai: by chats, Responses or Anthropic's messages."""

import json
import os
import sys
from typing import Any

from pydantic_ai import Agent

if sys.argv[1] == "messages":
    from pydantic_ai.models.anthropic import AnthropicModel as Model
elif sys.argv[1] == "responses":
    from pydantic_ai.models.openai import OpenAIResponsesModel as Model
else:
    from pydantic_ai.models.openai import OpenAIChatModel as Model

agent: Any = Agent(Model("policy"), instructions="Be brief.")


@agent.tool_plain
def calculator(expression: str) -> str:
    """Computes."""
    return "42"


with open(os.environ["ROLLTREE_TASK"]) as file:
    run = agent.run_sync(json.load(file)["messages"][0]["content"])
usage = run.usage() if callable(run.usage) else run.usage
with open(os.environ["ROLLTREE_REWARD"], "w") as file:
    json.dump({"reward": 1.0, "calls": usage.requests}, file)
