"""The loop of a run: prompts become groups of responses, judged groups become batches, batches become updates.

Read in this order: ``orchestrator`` (the steps of a run, from start to checkpoint), ``controller`` (samples groups and
hands out batches), ``budget`` (the rules that bound staleness) and ``buffer`` (states of the groups), ``prompts``,
``sources`` (their stream) and ``demonstrations``, ``judging`` (verdicts), ``learner`` (the update), ``evaluation``
(held-out problems).
``workers`` are other processes; ``fleet`` (engines) and ``hosted`` (verifiers) use them.
``parts`` lists the objects that ``app/build.py`` makes of a configuration. ``metrics``, ``utilization``, ``trace``,
``trackers`` and ``failures`` record the run; ``archive``, ``entries`` and ``unfinished`` put open groups into
checkpoints; ``replay`` trains on recorded groups; ``preflight`` checks a run before it starts; ``runtime`` holds
threads, signals and progress.
"""
