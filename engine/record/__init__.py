"""The records of a run, on disk and on the screen: directory, metrics, trace, trackers, rollout files, failures and progress."""
