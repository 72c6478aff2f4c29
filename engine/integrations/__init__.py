"""Other libraries' trainers and calls on rolltree's trees and kernels; rolltree's own loop uses nothing from here.

``transformers`` patches a model so that its loss uses the fused head; ``generate`` answers ``model.generate`` with the
rollout engine; ``trl`` accelerates TRL's trainers; ``verl`` registers objectives, advantages and the fused head, and
``verl_trees`` lets verl's FSDP workers train on trees. ``trees``, which both trainers use, turns a flat batch into
packed trees: read it first.
"""
