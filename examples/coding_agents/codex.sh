#!/bin/sh
# An episode of Codex: command = ["sh", "examples/coding_agents/codex.sh"], with the settings in codex.toml beside it.
set -eu
mkdir -p "$HOME/.codex"
cp "$(dirname "$0")/codex.toml" "$HOME/.codex/config.toml"
task=$(python3 -c 'import json, os; print(json.load(open(os.environ["ROLLTREE_TASK"]))["messages"][-1]["content"])')
exec codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox --disable multi_agent \
    --config "model_providers.rolltree.base_url=\"$OPENAI_BASE_URL\"" "$task"
