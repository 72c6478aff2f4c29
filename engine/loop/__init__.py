"""The loop of a run: prompts become groups of responses, judged groups become batches, batches become updates.

Read in this order: ``orchestrator`` (the steps of a run, from start to checkpoint), ``controller`` (samples groups and
hands out batches), ``budget`` (the rules that bound staleness), ``buffer`` (states of the groups), ``judging``
(verdicts), ``callback`` (what the group callback answers), ``evaluation`` (held-out problems), ``checkpoints``.
``replay`` trains on recorded groups and ``replay_store`` on earlier ones again.
"""
