#!/bin/sh
# An episode of opencode: command = ["sh", "examples/coding_agents/opencode.sh"], with the settings in opencode.json
# beside it. The title is given, as opencode else asks the model for one.
set -eu
mkdir -p "$HOME/.config/opencode"
cp "$(dirname "$0")/opencode.json" "$HOME/.config/opencode/opencode.json"
task=$(python3 -c 'import json, os; print(json.load(open(os.environ["ROLLTREE_TASK"]))["messages"][-1]["content"])')
exec opencode run --auto --title task "$task"
