from .api import LogprobOutput, linear_logprob
from .logits import logprob_from_logits

__all__ = ["LogprobOutput", "linear_logprob", "logprob_from_logits"]
