from .api import LogprobOutput, linear_logprob
from .head import HeadLora
from .logits import logprob_from_logits
from .parallel import VocabShards

__all__ = ["HeadLora", "LogprobOutput", "VocabShards", "linear_logprob", "logprob_from_logits"]
