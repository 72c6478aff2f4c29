"""Every method that a user may look for is found by its name, also where the configuration calls it otherwise."""

from __future__ import annotations

import re

from rolltree.engine.app.cli import main
from rolltree.engine.app.keys import config_keys
from rolltree.engine.app.methods import KINDS, about
from rolltree.engine.app.recipes import recipe_names
from rolltree.engine.methods.other_names import OTHER_NAMES
from rolltree.engine.settings import TrainConfig
from rolltree.engine.settings.rewards import OF_PARTS
from rolltree.kernels import Objective
from rolltree.kernels.policy_loss import PRESETS

CATALOGUE = """
reinforce grpo ppo dual_clip dapo dr_grpo bnpo luspo gpg cispo sapo gspo gspo_token gmpo segment_ratio dppo_tv
dppo_kl clip_cov kl_cov dro vespo decoupled_ppo rollout_is off_policy_mask on_policy_pg dcpo_clip ngrpo clip_tensor
w_reinforce nft token_entropy_mask random_token_subset prob_mask sft weighted_nll raft pear eksft dpo tree_pair_dpo
opd aux_nll span_losses hpt rover laser visurf group_norm group_mean std_floor rloo reinforce_pp
reinforce_pp_baseline remax opo passk_best maxrl gae dense_returns optimal_token_baseline oblr_baseline gdpo
task_norm role_baseline turn_credit tree_path_mean segment_value_diff treerl_ga_la sibling_group depth_norm
branch_mean progress_bonus virtual_max cumulative_std external_member flat treepo spo_tree spo_chain entropy_tree
arpo latr cure s_grpo deepsearch prefix_value_probe igrpo scaf_grpo context_swap expo guide prefix_rft prefix_reset
retry_turn tool_loop multi_role early_abort group_temperature ead ragged_groups dynamic_sampling adaptive_oversample
pass_window pre_gate dump_ucb gvm_alloc dars brorl on_demand_rollouts stage_schedule domain_ratio_batch
task_balanced mixture_weights live_source shared_prompt_reuse disjoint_prompts rule_verifier code_sandbox
named_rewards gated_rewards rm_reducer model_reward judge_reward rubric hybrid_verifier noise_backward noise_forward
overlong_shaping cosine_length repetition_penalty gated_length difficulty_length majority_vote semantic_entropy
outcome_exploration logprob_reward logratio_reward span_rewards prm_clip prm_delta group_reward zero_variance_drop
down_select best_of_n ssr rollout_store external_ingest negative_drop kl_loss kl_reward kl_schedule ref_reset
ref_ema entropy_bonus entropy_adaptive temperature_target full_batch_epochs lora fp32_master schedule_any
staleness_one_knob stream_bus partial_rollout weight_push delta_sync routing_replay placement scoring_service
reward_service group_shards tree_training compact_rows multi_model env_pool external_logp
"""
"""The names of methods in literature that are of general use."""


def lines(capsys, *arguments: str) -> list[str]:
    assert main(["methods", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def test_methods_of_a_verifier_names_its_options(capsys):
    said = "\n".join(lines(capsys, "regex"))
    assert "regex (reward.verifier)" in said
    assert "options: pattern, ignore_case=False" in said
    assert "recipes: ttrl" in "\n".join(lines(capsys, "majority"))
    assert not any("options" in line for line in lines(capsys, "task"))


def test_every_method_is_found_by_its_name():
    for name in CATALOGUE.split():
        assert list(about(name)), name


def test_methods_lists_every_verifier_of_a_run():
    (kind,) = (kind for kind in KINDS if kind.title == "verifiers")
    assert sorted(kind.parts) == sorted(OF_PARTS)


def test_another_name_is_served_by_what_is_there():
    known, parts = {key.key for key in config_keys()}, {key: kind.parts for kind in KINDS for key in kind.keys}
    options = {"schedule", "floor", "policy_loss", *Objective.__dataclass_fields__}
    for name, served in OTHER_NAMES.items():
        found = re.findall(r"`([^`]*)`", served)
        assert found or served.startswith("always: "), name
        for reference in found:
            kind, _, recipe = reference.partition(" ")
            key, _, part = reference.partition(" = ")
            if kind == "recipe":
                assert recipe in recipe_names(), reference
            elif part:
                assert part in parts[key], reference
            elif "." in reference or reference in TrainConfig.model_fields:
                assert any(one == key or one.startswith(f"{key}.") for one in known), reference
            else:
                assert reference in options, reference
        assert name not in {*recipe_names(), *PRESETS, *(part for kind in KINDS for part in kind.parts)}, name
