"""As `cases`, for rows that are decided when a training begins, when a part is made or when a model is loaded."""

from __future__ import annotations

from typing import Any

from .cases import AGENT, CALLBACK, COMPARED_TERM, ENGINES, GIVEN, MODELS, MORE, PLAIN, REFERENCE, Case

FILTERS = "`rollout.top_p`, `top_k`, `min_p`"
TRAINING: dict[tuple[str, str], Case] = {
    (FILTERS, "`loop.staleness` = {staleness} with loop.correction = '{correction}'"): (
        "loop.staleness=1  rollout.top_p=0.9", "loop.staleness=1  rollout.top_p=0.9  loop.correction=none",
        "`loop.staleness` = 1 with loop.correction = 'truncate' uses the sampler's log-probs"),
    (FILTERS, "`replay`"): ("replay={share=0.5}  rollout.top_k=5", "rollout.top_k=5", "`replay` uses the sampler's"),
    (FILTERS, "`loop.train_context` = 'plain'"): (f"{PLAIN}  rollout.min_p=0.1", f"{CALLBACK}  rollout.min_p=0.1",
        "`loop.train_context` = 'plain' uses the sampler's log-probs"),
    (FILTERS, "`trainer.{key}` = {count}"): ("trainer.epochs=3  rollout.top_k=5", "trainer.epochs=3",
        "`trainer.epochs` = 3 uses the sampler's log-probs"),
    ("`trainer.ranks` above 1", "no `rollout.engines`"): ("trainer.ranks=2", f"trainer.ranks=2  {ENGINES}",
        "`trainer.ranks` = 2 needs engines in other processes"),
}  # fmt: skip

PLAYS = "rollout.program=generate_then_verify  rollout.program_options={generate_tokens=7}"
PARTS: dict[tuple[str, str], Case] = {
    ("an objective of chosen tokens", "no `select`"): ("algorithm.objective=sft",
        "algorithm.objective=sft  algorithm.select=best",
        "algorithm.objective = 'sft' trains on chosen tokens; choose them with `select` (the objective needs"),
    ("an objective that compares with the policy before the update", '`algorithm.old_logprob` = "behaviour"'): (
        "algorithm.objective=decoupled_ppo", "algorithm.objective=decoupled_ppo  algorithm.old_logprob=recompute",
        'set algorithm.old_logprob to "recompute"'),
    ("an objective that needs a reference, a teacher or a critic", "no such role"): (
        "algorithm.objective_options={kl_coef=0.1}", f"algorithm.objective_options={{kl_coef=0.1}}  {REFERENCE}",
        "needs ref_logprob (kl_coef is not 0); give the run a [roles.reference]"),
    ("an objective that reads the teacher's log-probs", "`roles.teacher.context`"): (
        f"algorithm.objective=opd  {MORE}  {COMPARED_TERM}", f"algorithm.objective=grpo  {MORE}  {COMPARED_TERM}",
        "algorithm.objective = 'opd' needs teacher_logprob, which a teacher"),
    ("an objective of values", "which no run has"): ("algorithm.objective=clip_tensor", "algorithm.objective=grpo",
        "which a run does not have; choose another objective"),
    ("`algorithm.cut` below 1", "an objective of whole responses"): ("algorithm.cut=0.9  algorithm.objective=gspo",
        "algorithm.cut=0.9", "reads whole responses"),
    ("a preference loss with a reference", "no `roles.reference`"): (
        "algorithm.terms=[{name='t',pairs='best_and_worst'}]",
        f"{REFERENCE}  algorithm.terms=[{{name='t',pairs='best_and_worst'}}]",
        "algorithm.terms.t needs a reference policy; give the run a [roles.reference]"),
    ("a part that reads the divergence from the reference", "no `roles.reference`"): (
        f"{GIVEN}  algorithm.terms=[{{name='t',objective='sft',select='calm'}}]",
        f"{GIVEN}  algorithm.terms=[{{name='t',objective='sft',select='calm'}}]  {REFERENCE}",
        "= 'calm' reads the column policy_kl; give the run a [roles.reference]"),
    ("a loss term with ratios of segments", '`rollout.program` = "agent"'): (
        f"{AGENT}  rollout.program_options={{command=['x']}}  algorithm.objective=segment_ratio",
        "algorithm.objective=segment_ratio", "The loss term 'actor' has ratios of segments"),
    ("`roles.critic`", "an advantage that sets no targets"): ("roles.critic={}  algorithm.advantage=group_norm",
        "roles.critic={}", "'group_norm' sets no column value_target on 2 of 2 trees"),
    ("a program that returns tokens of older policies", "`rollout.top_p`, `top_k`, `min_p`"): (
        "rollout.program=mcts  rollout.top_p=0.9", "rollout.program=mcts",
        "`rollout.program` = 'mcts', which may return tokens of older policies, uses the sampler's log-probs"),
    ("`models.NAME.roles`", "a program without the role"): (
        f"{PLAYS}  models={{critic={{}}}}",
        f"{PLAYS}  {MODELS}",
        "`models.critic` plays the role 'critic', which rollout.program = 'generate_then_verify' does not have; its "
        "roles are generator, verifier",
    ),
    ("`models.NAME.roles`", "the program's first role"): (
        f"{PLAYS}  models={{generator={{}}}}",
        f"{PLAYS}  {MODELS}",
        "`models.generator` plays the role 'generator', in which rollout.program = 'generate_then_verify' begins and "
        "which [model] plays; choose among verifier",
    ),
    ("`models.NAME.roles`", "another policy's role"): (
        f"{PLAYS}  models={{verifier={{}},second={{roles=['verifier']}}}}",
        f"{PLAYS}  models={{second={{roles=['verifier']}}}}", "both play the role 'verifier'; leave one out"),
    ("`algorithm.advantage_options.rewards` of roles", "a program without the role"): (
        f"{PLAYS}  algorithm.advantage=by_role  algorithm.advantage_options={{rewards={{judge='a'}}}}",
        f"{PLAYS}  algorithm.advantage=by_role  algorithm.advantage_options={{rewards={{verifier='a'}}}}",
        "names the role 'judge', which rollout.program = 'generate_then_verify' does not have; its roles are "
        "generator, verifier",
    ),
}  # fmt: skip
FACTS: dict[tuple[str, str], tuple[dict[str, Any], dict[str, Any], str]] = {
    ("a loss term with a state", "`trainer.ranks` above 1"): (
        {"has_state": True},
        {"has_state": False},
        "'key' has a state, and with trainer.ranks = 2 each rank",
    ),
    ("a part that reads the divergence from the reference", "`trainer.tensor` above 1"): (
        {"divergence": "policy_kl"},
        {},
        "reads the column policy_kl, which `trainer.tensor` above 1 does not compute; set it to 1",
    ),
    ("`trainer.tensor` above 1", "a model of another type"): (
        {"model_type": "gemma3_text", "heads": (4, 2)},
        {"model_type": "llama", "heads": (4, 2)},
        "`trainer.tensor` = 2 splits models of the types llama, mistral, qwen2, qwen3, not of 'gemma3_text'",
    ),
    ("`trainer.tensor` above 1", "heads that it does not divide"): (
        {"model_type": "qwen3", "heads": (4, 1)},
        {"model_type": "qwen3", "heads": (4, 2)},
        "`trainer.tensor` = 2 does not divide the model's 4 attention heads and 1 key-value heads; choose a divisor",
    ),
    ("`demonstrations`", "`trainer.max_tokens`"): (
        {"demonstration": 16385},
        {"demonstration": 16384},
        "has 16385 tokens, over trainer.max_tokens, 16384; leave it out, or raise",
    ),
    ("`demonstrations`", "the model's positions"): (
        {"demonstration": 2001, "positions": 2000},
        {"demonstration": 2000, "positions": 2000},
        "has 2001 tokens, over the model's positions, 2000",
    ),
    ("`data.max_prompt_tokens` + `max_new_tokens`", "the model's positions"): (
        {"positions": 1279},
        {"positions": 1280},
        "= 1280 tokens) is longer than the model's 1279 positions",
    ),
    **{
        (feature, other): ({fact: False, "key": key, "path": "p"}, {"key": key, "path": "p"}, says)
        for feature, other, fact, key, says in (
            ("`roles.teacher`", "the policy's vocabulary", "same_vocabulary", "k", "k = 'p' has another vocabulary"),
            ("`roles.reference.path`", "the policy's parameters", "same_shapes", "k", "k = 'p' has other parameter"),
            ("`models.NAME.path`", "the tokenizer of `model.path`", "same_tokens", "k", "`k` = 'p' has another token"),
        )
    },
    ("`loop.score_early`", "a teacher of whom only hidden states are read"): (
        {"scores_early": False},
        {},
        "has nothing to score",
    ),
    ('`rollout.backend` = "vllm"', "pictures of a model that is not Qwen's"): (
        {"pictures_of": "Gemma"},
        {},
        "not of Gemma; set it to 'native'",
    ),
}
"""For rows that no configuration fires without large models: facts that fire them, and facts that do not."""
