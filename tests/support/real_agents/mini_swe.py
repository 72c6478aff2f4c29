"""mini-swe-agent with its own configuration, which calls tools or writes commands in its text."""

import json
import os
import sys
from pathlib import Path

os.environ |= {"MSWEA_SILENT_STARTUP": "1", "MSWEA_CONFIGURED": "1"}

import minisweagent
import yaml
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel
from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel

name, kind = ("mini.yaml", LitellmModel) if sys.argv[1] == "tools" else ("mini_textbased.yaml", LitellmTextbasedModel)
config = yaml.safe_load((Path(minisweagent.__file__).parent / "config" / name).read_text())
own = {key: value for key, value in config.get("model", {}).items() if key != "model_name"}
model = kind(model_name="openai/policy", **own | {"cost_tracking": "ignore_errors"})
wanted = ("system_template", "instance_template", "cost_limit")
limits = {key: value for key, value in config["agent"].items() if key in wanted}
agent = DefaultAgent(model, LocalEnvironment(), **limits, step_limit=5)
with open(os.environ["ROLLTREE_TASK"]) as file:
    agent.run(json.load(file)["messages"][0]["content"])
with open(os.environ["ROLLTREE_REWARD"], "w") as file:
    json.dump({"reward": 1.0, "calls": agent.n_calls}, file)
