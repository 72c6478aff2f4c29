"""Where problems come from: reasoning_gym generators and files of prompts."""

from .files import read_problems
from .gym import GymProblems
from .problem import Problem

__all__ = ["GymProblems", "Problem", "read_problems"]
