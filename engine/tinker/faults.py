"""The errors of requests, as a client gets them: at once by a status, or as the answer to a future."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel, ValidationError

from ..protocols.http import RefusedError

Body = TypeVar("Body", bound=BaseModel)


class FaultError(Exception):
    """A request that cannot be carried out; the message is one sentence.

    Args:
        message: names the thing and the remedy.
        status: of the reply, where the request is refused at once.
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


def refused(fault: FaultError) -> RefusedError:
    """Return the fault as the refusal of a request."""
    return RefusedError(str(fault), fault.status)


def read(kind: type[Body], raw: bytes) -> Body:
    """Return the body of a request.

    Raises:
        FaultError: it is no JSON of that kind; the message names the first field that is wrong.
    """
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise FaultError(f"{where}: {first['msg']}; see the client's {kind.__name__}.", 422) from None
