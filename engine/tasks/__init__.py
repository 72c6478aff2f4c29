"""Sources of problems: each yields a text, or the messages of a conversation, and an entry for the verifier.

``problem`` defines `Problem`. ``problems`` are those of a place such as `data.path`, each made when it is asked for:
``tables`` finds the rows there (``files``: the forms of files, ``texts`` and ``parquet``; ``shards``: the files of a
folder; ``hub``: the Hugging Face hub), ``sequences`` and ``stored`` leave them on disk, and ``rows`` makes a problem of
a row. ``gym`` generates problems (`data.tasks`). ``games`` and ``verifiers`` yield rows of prompts for an environment,
as a source of a user's own does (`data.source`). `engine/prompts/sources.py` puts prompts into the chat template and
hands them to the controller; the entries go to `engine/rewards`. Read ``problem``, then ``problems``.
"""

from .games import Games
from .gym import GymProblems
from .problem import Problem
from .problems import Problems, read_problems
from .rows import problem_of
from .tables import read_tables

__all__ = ["Games", "GymProblems", "Problem", "Problems", "problem_of", "read_problems", "read_tables"]
