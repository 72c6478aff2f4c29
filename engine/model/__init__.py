"""A Hugging Face decoder computed on packed trees: from a directory of weights to the gradients of a batch.

``loading`` reads a model, with attention that understands trees (``attention``, ``varlen``) and fused layers
(``fused_layers``). A `TreeBatch` (`engine/data`) then passes through

1. ``decoder``: final hidden states of the packed tokens, or log-probs without a loss;
2. ``head``: the language-model head, as the fused ops take it;
3. ``loss``: loss terms and their backward, for a whole batch or in pieces of a large tree.

``roles`` scores trees with other weights (reference, teacher, proximal policy), ``self_check`` compares trees with flat
sequences before training, ``sharding`` applies FSDP2. Read ``decoder``, then ``loss``, then ``attention``.
"""
