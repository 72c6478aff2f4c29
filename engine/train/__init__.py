"""Training: from packed trees and loss terms to updated weights, and checkpoints of all that.

``terms`` describes the summands of an update's loss: which leaves or tokens each counts, its objective, its normaliser.
``trainer`` sums their gradients over micro-batches (`forward_backward`) and applies them (`optim_step`); it contains no
algorithm. ``critic`` trains a value model for PPO by the same trainer. ``phases`` measures which part of an update the
device computes when. ``checkpoint`` writes and reads everything that a run needs to continue.

Read ``terms``, then ``trainer``. The advantages come from `engine/methods`, the loss of a batch from `engine/model`.
"""
