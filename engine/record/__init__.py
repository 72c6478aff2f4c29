"""What a run writes and shows: its directory, metrics, trace, trackers, rollout files, failures and progress."""
