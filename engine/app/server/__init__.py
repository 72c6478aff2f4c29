"""A server of OpenAI's and Anthropic's protocols over a rollout engine, for agent harnesses on the same machine.

A request's body is checked and turned into token ids (`rolltree.engine.protocols`); one thread steps the engine
(`rolltree.engine.fleet.host`) for the requests of all clients (`rolltree.engine.fleet.rollouts`); the answer is
formatted as JSON or as a stream of events. `app` has the endpoints and ties these together, so begin there; `serve` is
the command `rolltree serve`.
"""

from .app import make_app

__all__ = ["make_app"]
