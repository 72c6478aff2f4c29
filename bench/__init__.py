"""rolltree.bench: times every op and whole steps against plain PyTorch, peers and the hardware's limits.

Read in this order: ``runner`` (what a benchmark, a case and a provider are, and how one runs), ``timing`` (interleaved
measurement), ``schema`` and ``journal`` (rows and failures in files), ``cli`` (the command line). Each op is a file
with one ``BENCH``: of the kernels ``linear_logprob``, ``linear_policy_loss``, ``linear_divergence``,
``logprob_from_logits``, ``policy_loss``, ``tree_attention``, ``tree_recurrence``, ``tree_decode``, ``layer_ops``,
``sample_tokens`` and ``ceilings``; of whole programs ``tree_step``, ``picture_step``, ``rl_step``, ``trl_step``,
``rollout``, ``treepo``, ``speculation`` (and ``recorded``), ``loop`` (and ``long_tail``), ``agents`` and
``agent_calls``.

``shapes`` makes cases of the user's own sizes, ``against`` (with ``served``, its processes) times two checkouts,
``suite`` runs the same cases with pytest-benchmark, ``job`` whole jobs by several trainers, ``gpu`` the tests and
figures of a machine with a GPU, ``sweep`` tile sizes. ``readme`` and ``plot`` make tables and pictures of recorded
rows. ``simulate`` times a run's driver and simulates runs on many GPUs.
"""
