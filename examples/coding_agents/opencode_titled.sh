#!/bin/sh
# An episode of opencode that asks the model for a title too, in a role of its own: command = ["sh",
# "examples/coding_agents/opencode_titled.sh"] and roles = ["title"], with the settings in opencode_titled.json beside it.
set -eu
mkdir -p "$HOME/.config/opencode"
cp "$(dirname "$0")/opencode_titled.json" "$HOME/.config/opencode/opencode.json"
task=$(python3 -c 'import json, os; print(json.load(open(os.environ["ROLLTREE_TASK"]))["messages"][-1]["content"])')
exec opencode run --auto "$task"
