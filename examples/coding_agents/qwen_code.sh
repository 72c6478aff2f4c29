#!/bin/sh
# An episode of Qwen Code: command = ["sh", "examples/coding_agents/qwen_code.sh"], with the settings in qwen_code.json
# beside it: without them a second agent extracts memories at the end, whose answer is the episode's last.
set -eu
mkdir -p "$HOME/.qwen"
cp "$(dirname "$0")/qwen_code.json" "$HOME/.qwen/settings.json"
export OPENAI_MODEL=policy
task=$(python3 -c 'import json, os; print(json.load(open(os.environ["ROLLTREE_TASK"]))["messages"][-1]["content"])')
exec qwen --auth-type openai --yolo --prompt "$task"
