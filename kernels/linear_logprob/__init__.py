from .api import LogprobOutput, linear_logprob
from .head import HeadLora
from .logits import logprob_from_logits
from .parallel import VocabShards
from .statistics import STATISTICS, linear_statistics

__all__ = [
    "STATISTICS",
    "HeadLora",
    "LogprobOutput",
    "VocabShards",
    "linear_logprob",
    "linear_statistics",
    "logprob_from_logits",
]
