"""The records of a run: its directory, metrics, trace, trackers, rollout files, failures and progress."""
