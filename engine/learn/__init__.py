"""How the policy learns from judged trees: scoring, credit, updates, and the learner's part of a checkpoint."""
