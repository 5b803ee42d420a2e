"""Errors as HTTP sees them: OpenAI's error object for whatever goes wrong, before the first byte or after it.

The status, type and code are those of `wire.errors`; here is only how they look. FastAPI's own `{"detail": ...}` never
leaves the house.
"""

from __future__ import annotations

import math
import re
from http import HTTPStatus

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from potluck.wire.errors import InvalidValueError, PotluckError, RequestError

RETRY_AFTER_S = 5
"""What a client that should come back is told when the error does not know better."""

_AT = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>.*)`$")
_MISSING = re.compile(r"missing required field `(?P<field>\w+)`")


class BodyTooLargeError(RequestError):
    """The body is larger than the limit."""

    code = "body_too_large"
    http_status = 413


class Failure(msgspec.Struct):
    """The `error` of an answer. Facts of the error (`n_ctx`, `retry_after_s`, `device`, ...) stand beside these."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(msgspec.Struct):
    """What any request that fails is answered with."""

    error: Failure


def error_object(error: PotluckError) -> dict[str, object]:
    """The error in OpenAI's shape, with its facts beside the four usual fields."""
    where = {"device": error.device, "stage": error.stage, "phase": error.phase}
    return {
        **error.facts,
        **{name: value for name, value in where.items() if value},
        "message": f"{error.what} {error.hint}".strip(),
        "type": error.kind,
        "param": error.param,
        "code": error.code,
    }


def error_response(error: PotluckError, **beside: object) -> Response:
    """The whole HTTP answer; `beside` stands next to `error` in its body. 429 and 503 say when to come back."""
    headers = {}
    if error.http_status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
        after = error.facts.get("retry_after_s")
        if not isinstance(after, int | float) or not 0 <= after < math.inf:
            after = RETRY_AFTER_S
        headers["retry-after"] = str(math.ceil(after))
    return json_response({"error": error_object(error), **beside}, error.http_status, headers)


def json_response(body: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Anything msgspec can encode, as an answer."""
    return Response(msgspec.json.encode(body), status, headers, "application/json")


def invalid(error: msgspec.ValidationError, parent: str = "") -> InvalidValueError:
    """What msgspec found wrong, with the parameter it found it in: `messages[0].role`."""
    text = str(error)
    at, missing = _AT.search(text), _MISSING.search(text)
    path = [part for part in (parent, at["path"] if at else "", missing["field"] if missing else "") if part]
    param = ".".join(path) or None
    said = text[: at.start()] if at else text
    return InvalidValueError(f"{param or 'The body'}: {said[:1].lower()}{said[1:]}.", param=param)


async def on_potluck_error(_request: Request, error: Exception) -> Response:
    """An error of the tree says itself how it is answered."""
    return error_response(error if isinstance(error, PotluckError) else PotluckError())


async def on_http_error(request: Request, error: Exception) -> Response:
    """The router's own errors: no such path, no such method."""
    status = HTTPStatus(error.status_code if isinstance(error, HTTPException) else 500)
    what = f"{request.method} {request.url.path}: {status.phrase}."
    kind = "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
    body = {"message": what, "type": kind, "param": None, "code": status.name.lower()}
    headers = error.headers if isinstance(error, HTTPException) else None
    return json_response({"error": body}, status, dict(headers or {}))


async def on_unexpected_error(request: Request, _error: Exception) -> Response:
    """A fault of ours: its text stays in the log, which uvicorn writes; the client gets the request's id for asking."""
    request_id = str(getattr(request.state, "request_id", ""))
    error = PotluckError(
        "Something went wrong here.", hint="The broker's log says what.", request_id=request_id
    )
    response = error_response(error)
    response.headers["x-request-id"] = request_id
    return response


async def on_client_gone(_request: Request, _error: Exception) -> Response:
    """Nobody reads this; 499 is what logs usually call it."""
    return Response(status_code=499)


HANDLERS = {
    PotluckError: on_potluck_error,
    HTTPException: on_http_error,
    ClientDisconnect: on_client_gone,
    Exception: on_unexpected_error,
}
"""For Starlette's `add_exception_handler`."""
