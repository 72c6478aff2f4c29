"""Parts of an algorithm that a configuration names: functions of trees, each kind in a table by name.

After the responses of a group are judged (`engine/rewards`), its tree passes through these in order:

1. ``groups`` decides about the whole group: accept, drop, sample more, retry, add responses.
2. ``shaping`` makes one reward of the verifier's named rewards.
3. ``credit`` computes advantages from the rewards of all trees of an update.
4. ``selections`` chooses the leaves or tokens that each loss term counts, and the pairs of preference losses.

``curricula`` choose the prompts before all this, by the groups of earlier steps. ``schedules`` gives the numbers that
change with the step, such as a term's weight. A user's own function or class, named ``file.py:object``, stands in for
any of them. Read ``credit`` first. `rolltree methods` prints the first paragraph of each docstring, so a default that
is inferred, not read from a source, is marked there.
"""
