"""verl: rolltree's objectives and advantages in its registries, and its fused head on `linear_logprob`.

verl finds this module by the entry point ``verl.plugins`` in every process and imports it; ``VERL_USE_EXTERNAL_PLUGINS=
none`` prevents that. Nothing has to be called. Then

* ``actor.policy_loss.loss_mode = "rolltree_<name>"`` selects the objective ``<name>`` of ``rolltree methods``, with
  the clip bounds of the actor's own keys (``clip_ratio_low``, ``clip_ratio_high``, ``clip_ratio_c``), its
  ``loss_agg_mode`` and its rollout correction; entropy bonus and KL stay verl's;
* ``algorithm.adv_estimator = "rolltree_<name>"`` selects the advantage ``<name>``;
* ``model.use_fused_kernels = true`` with ``fused_kernel_options.impl_backend = "triton"`` computes log-probs and
  entropy with `linear_logprob`: also on a CPU, with a temperature for each token, and in chunks of rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import register_adv_est, register_policy_loss
from verl.utils.kernel import linear_cross_entropy as verl_head

from rolltree.kernels import Objective, PolicyFields, linear_logprob, policy_loss
from rolltree.kernels.policy_loss import PRESETS

from ..data.tree import TokenTree
from ..methods.advantages import ADVANTAGES
from ..model.sharding import whole

AGGREGATIONS = {
    "token-mean": "token_mean",
    "token-sum": "token_sum",
    "seq-mean-token-sum": "seq_mean_token_sum",
    "seq-mean-token-mean": "seq_mean_token_mean",
    "seq-mean-token-sum-norm": "seq_mean_token_sum_norm",
}
OF_GROUPS = ("group_norm", "group_mean", "rloo", "maxrl", "opo")
"""Advantages that follow from the rewards and lengths of one prompt's responses."""
METRICS = ("actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower")


def objectives() -> list[str]:
    """Return the presets that need only log-probs, old log-probs and advantages."""
    by_name = {name: Objective.preset(name) for name in PRESETS}
    return [
        name
        for name, o in by_name.items()
        if o.needs_fields.keys() <= {"old_logprob"} and not o.needs_entropy and o.ratio_level != "segment"
    ]


def loss(
    preset: str,
    old_log_prob: Tensor,  # [B, T]
    log_prob: Tensor,  # [B, T]
    advantages: Tensor,  # [B, T]
    response_mask: Tensor,  # [B, T]
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,  # [B, T]
) -> tuple[Tensor, dict[str, Any]]:
    """Compute a policy loss with verl's signature: `policy_loss` on the tokens that the mask selects.

    Args:
        preset: name of the objective; the other arguments are verl's.

    Returns:
        The loss [], and metrics; clip fractions and KL weight tokens as the loss does.

    Raises:
        ValueError: ``loss_agg_mode`` is unknown, or a global count is missing with several ranks.
    """
    if loss_agg_mode not in AGGREGATIONS:
        raise ValueError(f"rolltree: loss_agg_mode '{loss_agg_mode}' is not one of {', '.join(AGGREGATIONS)}.")
    mask = response_mask.bool()
    lengths = mask.sum(1)
    options: dict[str, Any] = {
        "aggregation": AGGREGATIONS[loss_agg_mode],
        "eps_low": _first(config.clip_ratio_low, config.clip_ratio),
        "eps_high": _first(config.clip_ratio_high, config.clip_ratio),
    }
    if Objective.preset(preset).clip_ratio_c is not None:
        options["clip_ratio_c"] = config.get("clip_ratio_c", 3.0)
    fields = PolicyFields.flat(
        advantages[mask],
        old_logprob=old_log_prob[mask],
        weight=None if rollout_is_weights is None else rollout_is_weights[mask],
        cu_seqlens=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)),
    )
    batch = config.global_batch_info
    normalizer = _normalizer(loss_agg_mode, lengths, response_mask.shape[1], batch)
    out = policy_loss(log_prob[mask], fields, Objective.preset(preset, **options), normalizer=normalizer)
    metrics = {name: (out.metrics[name][0] / out.metrics[name][1]).item() for name in METRICS if name in out.metrics}
    return out.loss * batch.get("dp_size", 1), metrics


def _normalizer(mode: str, lengths: Tensor, width: int, batch: dict[str, Any]) -> float | Tensor:
    of_tokens = mode == "token-mean"
    if mode == "token-sum":
        return 1.0
    name = "batch_num_tokens" if of_tokens else "global_batch_size"
    count = batch.get(name)
    if count is None:
        if batch.get("dp_size", 1) > 1:
            raise ValueError(f"rolltree: {name} of the global batch is needed where dp_size > 1.")
        count = lengths.sum() if of_tokens else (lengths > 0).sum()
    return count * _first(batch.get("loss_scale_factor"), width) if mode == "seq-mean-token-sum-norm" else count


def advantage(
    name: str,
    token_level_rewards: Tensor,  # [B, T]
    response_mask: Tensor,  # [B, T]
    index: Sequence[Any],  # [B], identifies the prompt of each row
    **_: Any,  # arguments that verl passes to other estimators
) -> tuple[Tensor, Tensor]:  # [B, T] each
    """Compute the advantage ``name`` with verl's signature; advantages and returns are the same."""
    rewards = token_level_rewards.sum(1).double().cpu().numpy()
    lengths = response_mask.sum(1).cpu().numpy()
    groups: dict[Any, list[int]] = {}
    for i, prompt in enumerate(index):
        groups.setdefault(prompt, []).append(i)
    of_rows = np.zeros(len(rewards))
    trees = []
    for members in groups.values():
        tree = TokenTree.from_sequences([0], [[k + 1] * int(lengths[i]) for k, i in enumerate(members)])
        tree.rewards["reward"] = rewards[members]
        trees.append(tree)
    for members, values in zip(groups.values(), ADVANTAGES[name](trees).values, strict=True):
        of_rows[members] = values
    spread = torch.from_numpy(of_rows).to(token_level_rewards)[:, None] * response_mask
    return spread, spread


def fused_head(
    hidden: Tensor,  # [..., H]
    weight: Tensor,  # [V, H]
    labels: Tensor,  # [...]
    temperature: float | Tensor = 1.0,  # or [...]
    reduction: str = "none",
    dist_process_group: Any = None,
) -> tuple[Tensor, Tensor]:  # each [...]
    """Return log-probs and entropies like verl's `linear_cross_entropy`, differentiable in hidden and weight.

    Raises:
        ValueError: a reduction other than "none".
    """
    if reduction != "none":
        raise ValueError(f"rolltree: the fused head has no reduction '{reduction}'; verl's models ask for 'none'.")
    out = linear_logprob(
        hidden.reshape(-1, hidden.shape[-1]),
        whole(weight),  # FSDP2 shards an untied head, which verl's models do not call, so it is not gathered
        labels.reshape(-1),
        temperature=temperature.reshape(-1).float() if isinstance(temperature, Tensor) else float(temperature),
        want=("entropy",),
        tp_group=dist_process_group,
    )
    assert out.entropy is not None
    return out.logprob.view(labels.shape), out.entropy.view(labels.shape)


def _first(value: Any, otherwise: Any) -> Any:
    return otherwise if value is None else value


def register() -> None:
    """Register everything with verl; importing this module does it."""
    entered: Callable[..., Any]
    for preset in objectives():
        entered = partial(loss, preset)
        register_policy_loss(f"rolltree_{preset}")(entered)
    for name in OF_GROUPS:
        entered = partial(advantage, name)
        register_adv_est(f"rolltree_{name}")(entered)
    verl_head.linear_cross_entropy = fused_head
    logging.getLogger("rolltree").info("verl's fused head (impl_backend = triton) is rolltree's linear_logprob.")


register()
