"""An OpenAI-compatible server over a rollout engine, for agent harnesses on the same machine."""

from .app import make_app

__all__ = ["make_app"]
