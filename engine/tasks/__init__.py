"""Sources of problems: each yields a text, or the messages of a conversation, and an entry for the verifier.

``problem`` defines `Problem`. ``files`` reads them from parquet and jsonl (`data.path`), ``gym`` generates them
(`data.tasks`). ``games`` and ``verifiers`` yield rows of prompts for an environment, as a source of a user's own does
(`data.source`). `engine/prompts/sources.py` puts prompts into the chat template and hands them to the controller; the
entries go to `engine/rewards`. Read ``problem``, then ``files``.
"""

from .files import problem_of, read_file, read_problems
from .games import Games
from .gym import GymProblems
from .problem import Problem

__all__ = ["Games", "GymProblems", "Problem", "problem_of", "read_file", "read_problems"]
