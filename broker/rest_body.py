"""What every generating endpoint reads from a body: the bounded bytes, typed and checked, and the fields they share.

Bodies are msgspec structs and not Pydantic models: the wire's own types and limits apply, one error names the path of
one value, and a large prompt is decoded once. `null` means the same as a field that isn't there, as OpenAI's clients
send it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta
from starlette.requests import Request

from potluck.broker.rest_errors import BodyTooLargeError, invalid
from potluck.wire import limits
from potluck.wire.errors import InvalidValueError, RequestError
from potluck.wire.parts import Timeout
from potluck.wire.sampling import Sampling

log = logging.getLogger(__name__)

BODY_BYTES = 8 << 20

Unit = Annotated[float, Meta(ge=0.0, le=1.0)]
Prompt = Annotated[str, Meta(max_length=limits.PROMPT_CHARS)]
Token = Annotated[int, Meta(ge=0, lt=1 << 31)]
Int64 = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Stop = Annotated[str, Meta(min_length=1, max_length=limits.STOP_CHARS)]
Stops = Annotated[list[Stop], Meta(max_length=limits.STOP_STRINGS)]
MaxTokens = Annotated[int, Meta(ge=1)]

HARMLESS = frozenset(
    {"user", "metadata", "store", "service_tier", "parallel_tool_calls", "tool_choice", "safety_identifier"}
    | {
        "prompt_cache_key",
        "cache_prompt",
        "id_slot",
        "n_keep",
        "response_fields",
        "samplers",
        "timings_per_token",
    }
)
"""Fields that are ignored without a word: they don't change the text, or ask for what is done anyway."""


class Body(msgspec.Struct, kw_only=True, frozen=True):
    """Fields that all three generating endpoints know, with the same bounds."""

    model: Annotated[str, Meta(max_length=limits.TEXT_CHARS)] | None = None
    stream: bool | None = None
    stop: Stop | Stops | None = None
    seed: Int64 | None = None
    """Any 64-bit integer; the samplers use its lower 32 bits. llama.cpp's -1 draws one."""
    top_k: Annotated[int, Meta(ge=-1, le=1_000_000)] | None = None
    """0 and -1 switch it off."""
    top_p: Unit | None = None
    min_p: Unit | None = None
    repeat_penalty: Annotated[float, Meta(ge=0.01, le=100.0)] | None = None
    repeat_last_n: Annotated[int, Meta(ge=-1, le=65_536)] | None = None
    """How many of the last tokens the penalties count: 0 none, -1 all."""
    ignore_eos: bool | None = None
    timeout_s: Timeout | None = None
    """The request fails (504) if it is not finished within this many seconds."""
    grammar: Any = None
    json_schema: Any = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end the answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def seed_given(self) -> bool:
        """Whether the client chose the seed."""
        return self.seed is not None and self.seed != -1

    def refuse_unsupported(self) -> None:
        """Raises for what would change the answer and isn't there: to ignore it would be to answer something else."""
        for name in ("grammar", "json_schema"):
            if getattr(self, name):
                raise unsupported(name, "Answers can't be held to a grammar yet.")

    def shared_sampling(self, defaults: Sampling) -> dict[str, Any]:
        """What `Sampling` takes from these fields; `defaults` stands in for what wasn't given."""
        window = defaults.penalty_last_n if self.repeat_last_n is None else self.repeat_last_n
        return {
            "top_k": defaults.top_k if self.top_k is None else max(0, self.top_k),
            "top_p": defaults.top_p if self.top_p is None else self.top_p,
            "min_p": defaults.min_p if self.min_p is None else self.min_p,
            "repeat_penalty": defaults.repeat_penalty if self.repeat_penalty is None else self.repeat_penalty,
            "penalty_last_n": 65_536 if window == -1 else window,
            "seed": (self.seed or 0) % (1 << 32) if self.seed_given else 0,
        }


BodyType = TypeVar("BodyType", bound=Body)


def unsupported(param: str, why: str) -> InvalidValueError:
    """For a value that OpenAI or llama.cpp would take and Potluck doesn't."""
    return InvalidValueError(f"{param} is not supported: {why}", hint="Leave it out.", param=param)


async def read_body(request: Request, wanted: type[BodyType]) -> BodyType:
    """The request's body as one of the types above. Raises RequestError that names the offending field."""
    body = decode(await read_bytes(request), wanted)
    body.refuse_unsupported()
    return body


async def read_bytes(request: Request, limit: int = BODY_BYTES) -> bytes:
    """The body, refused as soon as it is known to be over `limit`. Raises BodyTooLargeError, ClientDisconnect."""
    announced = request.headers.get("content-length", "")
    chunks, size = [], int(announced) if announced.isdecimal() and len(announced) < 20 else 0
    if size <= limit:
        size = 0
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                break
            chunks.append(chunk)
    if size > limit:
        raise BodyTooLargeError(f"The body is over the limit of {limit} bytes.", limit_bytes=limit)
    return b"".join(chunks)


def decode(raw: bytes, wanted: type[BodyType]) -> BodyType:
    """JSON as `wanted`. Fields it doesn't know are ignored with one line in the log."""
    try:
        fields: Mapping[str, msgspec.Raw] = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        body = msgspec.json.decode(raw, type=wanted)
    except msgspec.ValidationError as error:
        raise invalid(error) from error
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise RequestError(
            f"The body is not valid JSON: {error}.", hint="Send one JSON object in UTF-8."
        ) from error
    unknown = sorted(fields.keys() - set(wanted.__struct_fields__) - HARMLESS)
    if unknown:
        log.info(
            "Ignored unknown fields of a request: %.500s", ", ".join(repr(name[:64]) for name in unknown[:16])
        )
    return body
