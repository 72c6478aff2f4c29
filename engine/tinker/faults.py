"""The errors of requests, as a client gets them: at once by a status, or as the answer to a future."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel, ValidationError

from ..protocols.http import RefusedError

Body = TypeVar("Body", bound=BaseModel)


class FaultError(RefusedError):
    """A request that cannot be carried out; the message is one sentence that names the thing and the remedy.

    It is the reply to a request that is refused at once, and the answer to a future otherwise.
    """


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
