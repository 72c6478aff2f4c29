"""The program: commands, configuration, and runs made of it.

`cli` is the command line. For ``rolltree train`` it calls `config.load_config` (TOML and overrides to `settings`), then
`assembly.run.build`, which makes a `loop.orchestrator.Orchestrator` of all its parts; `console` shows the progress.
Nothing below this package reads the configuration as a whole.

The other commands: `dry_run` and `plan` (plans), `methods`, `show` (``rollout``), `compile` (``kernels build``),
`doctor`, and the packages `report` (HTML pages on runs) and `server` (``serve``). Read `cli`, `config`, `assembly.run`
first.
"""
