from .api import LogprobOutput, linear_logprob

__all__ = ["LogprobOutput", "linear_logprob"]
