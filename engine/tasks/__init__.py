"""Sources of problems: each yields a text, or the messages of a conversation, and an entry for the verifier.

``problem`` defines `Problem`. ``tables`` reads them from where `data.path` says: ``files`` has the forms of files,
``shards`` the files of a folder, ``hub`` the Hugging Face hub, and ``rows`` makes a problem of a row. ``gym`` generates
them (`data.tasks`). ``games`` and ``verifiers`` yield rows of prompts for an environment, as a source of a user's own
does (`data.source`). `engine/prompts/sources.py` puts prompts into the chat template and hands them to the controller;
the entries go to `engine/rewards`. Read ``problem``, then ``tables``.
"""

from .games import Games
from .gym import GymProblems
from .problem import Problem
from .rows import problem_of
from .tables import read_problems, read_tables

__all__ = ["Games", "GymProblems", "Problem", "problem_of", "read_problems", "read_tables"]
