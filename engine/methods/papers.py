"""Parts that belong to an objective by its paper: names only, so that the configuration can read them."""

OWN_ADVANTAGE = {
    "dr_grpo": "group_mean",
    "rloo": "rloo",
    "ngrpo": "virtual_max",
    "w_reinforce": "signed",
    "nft": "nft",
    "gpg": "gpg",
}
"""The advantage of an objective's paper, where it is not `group_norm`: used unless `algorithm.advantage` is given."""
OWN_SELECTION = {"raft": "rewarded", "weighted_nll": "reward_weighted"}
"""The selection of an objective's paper, used unless `select` is given."""
