"""Where problems come from: reasoning_gym generators and files of prompts."""

from .files import problem_of, read_problems
from .games import Games
from .gym import GymProblems
from .problem import Problem

__all__ = ["Games", "GymProblems", "Problem", "problem_of", "read_problems"]
