"""The terms of a loss on the head: those of log-probs in one pass, and those that compare whole distributions."""
