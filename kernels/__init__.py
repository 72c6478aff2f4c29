"""rolltree.kernels: exact fused ops for reinforcement learning of language models. No trainer, no model, no IO.

A token flows through them like this: `sample_tokens` draws it from logits, whose attention over a tree of cached keys
is `tree_decode_attention`. In training `tree_attention` gives its hidden state; `linear_logprob` scores it without
storing logits; `policy_loss` turns log-probs and advantages (`PolicyFields`) into a loss by an `Objective`; and
`linear_policy_loss` does both in one pass, by a plan (`plan_policy_loss`). `linear_divergence` compares the student's
and a teacher's distributions over the whole vocabulary in one pass of both heads.

Where to begin reading: ``reference.py`` in an op's folder is its definition, ``api.py`` its public function, ``op.py``
its registration with torch; `triton`, `cuda` and csrc/ hold the kernels. `policy_loss/objective.py`, `surrogates.py`
and `rules.py` define the objectives; `linear_policy_loss/api.py`, `op.py`, `fused.py` are the pass over the head.
`dispatch.py` chooses the backend, `checks.py` checks arguments. docs/kernels.md has examples.
"""

# Transformers looks for a package of its own called `kernels` and imports whatever is found under that name, which in a
# process started in a checkout of this repository is this folder. Registering the ops a second time would pull them
# from under the first registration, so under any other name than its own the package stays empty.
if __name__ == "rolltree.kernels":
    from .dispatch import BackendError, use_backend
    from .linear_divergence import DivergenceOutput, linear_divergence, linear_topk_divergence
    from .linear_logprob import HeadLora, LogprobOutput, VocabShards, linear_logprob, logprob_from_logits
    from .linear_policy_loss import (
        HeadPlan,
        LogprobTerm,
        Term,
        TermsLossOutput,
        linear_policy_loss,
        linear_terms_loss,
        plan_policy_loss,
        plan_terms_loss,
    )
    from .policy_loss import (
        Objective,
        PathIndex,
        PolicyFields,
        PolicyLossOutput,
        calm_tokens,
        entropy_quantile,
        gae,
        pair_loss,
        policy_loss,
        probability_mask,
        random_share,
        value_loss,
    )
    from .sampling import SampleOutput, kept_tokens, sample_tokens
    from .tree_attention import tree_attention
    from .tree_decode import DecodePlan, tree_decode_attention

    __all__ = [
        "BackendError",
        "DecodePlan",
        "DivergenceOutput",
        "HeadLora",
        "HeadPlan",
        "LogprobOutput",
        "LogprobTerm",
        "Objective",
        "PathIndex",
        "PolicyFields",
        "PolicyLossOutput",
        "SampleOutput",
        "Term",
        "TermsLossOutput",
        "VocabShards",
        "calm_tokens",
        "entropy_quantile",
        "gae",
        "kept_tokens",
        "linear_divergence",
        "linear_logprob",
        "linear_policy_loss",
        "linear_terms_loss",
        "linear_topk_divergence",
        "logprob_from_logits",
        "pair_loss",
        "plan_policy_loss",
        "plan_terms_loss",
        "policy_loss",
        "probability_mask",
        "random_share",
        "sample_tokens",
        "tree_attention",
        "tree_decode_attention",
        "use_backend",
        "value_loss",
    ]
