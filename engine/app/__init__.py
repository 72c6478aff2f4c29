"""The program: commands, configuration, and the parts of a run.

`cli` is the command line. For ``rolltree train`` it calls `config.load_config` (TOML and overrides to `settings`), then
`build.build`, which makes every part of the run (with `build_checks`, `build_sampling`, `build_learning` and
`build_workers`) and gives them to `loop.Orchestrator`; `console` shows the progress. Nothing below this package reads
the configuration as a whole.

The other commands: `dry_run` (plan), `methods`, `show` (``rollout``), `compile` (``kernels build``),
`doctor`, and the packages `report` (HTML pages on runs) and `server` (``serve``). Read `cli`, `config`, `build` first.
"""
