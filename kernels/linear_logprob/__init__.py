from .api import LogprobOutput, linear_logprob
from .head import HeadLora

__all__ = ["HeadLora", "LogprobOutput", "linear_logprob"]
