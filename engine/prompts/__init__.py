"""The prompts of a run: where they come from, in which order, and the group of responses to each."""
