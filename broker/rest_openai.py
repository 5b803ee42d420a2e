"""What OpenAI's two endpoints have in common: sampling fields and their defaults, usage, token log-probabilities."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from potluck.broker.gateway import PromptCodec
from potluck.broker.rest_body import Body, MaxTokens, unsupported
from potluck.broker.rest_stream import Reply
from potluck.wire import limits
from potluck.wire.errors import InvalidValueError
from potluck.wire.sampling import Sampling

# OpenAI has neither top_k nor min_p: temperature and top_p alone say how tokens are drawn, and 1.0 of both means the
# model's own distribution. A cut that the client can't see in its own request would change that in secret, so both are
# off on /v1 until asked for. /completion has llama.cpp's defaults, where both are part of the contract.
DEFAULTS = Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)

CHOICES = 128
"""Answers to one HTTP request, over all its prompts."""

Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
Bias = Annotated[float, Meta(ge=-100.0, le=100.0)]


class StreamOptions(msgspec.Struct, frozen=True):
    """`stream_options`."""

    include_usage: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """`response_format`; text is the only one served."""

    type: str


class OpenAIBody(Body, kw_only=True, frozen=True):
    """Fields of both endpoints, with OpenAI's bounds."""

    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[int, Bias], Meta(max_length=limits.LOGIT_BIASES)] | None = None
    n: Annotated[int, Meta(ge=1, le=8)] | None = None
    max_tokens: MaxTokens | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None

    @property
    def choices(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def refuse_unsupported(self) -> None:
        """Raises InvalidValueError for what can't be done."""
        super().refuse_unsupported()
        if self.response_format is not None and self.response_format.type != "text":
            raise unsupported("response_format", "Only the type text is served.")
        if self.stream_options is not None and not self.stream:
            raise InvalidValueError("stream_options needs stream to be true.", param="stream_options")
        if any(token < 0 for token in self.logit_bias or ()):
            raise InvalidValueError("logit_bias: a token id can't be negative.", param="logit_bias")

    def sampling(self, top_logprobs: int) -> Sampling:
        """How tokens are drawn; `top_logprobs` as in `Sampling`."""
        given: dict[str, Any] = {
            name: value
            for name in ("temperature", "presence_penalty", "frequency_penalty")
            if (value := getattr(self, name)) is not None
        }
        return msgspec.structs.replace(
            DEFAULTS,
            **self.shared_sampling(DEFAULTS),
            **given,
            logit_bias=tuple((self.logit_bias or {}).items()),
            top_logprobs=top_logprobs,
        )


def bounded(max_tokens: int | None) -> int | None:
    """A client may ask for more than fits: the core cuts it to the context's room."""
    return None if max_tokens is None else min(max_tokens, limits.PROMPT_TOKENS)


class PromptDetails(msgspec.Struct):
    """How much of the prompt was still in the cache."""

    cached_tokens: int


class UsageBody(msgspec.Struct):
    """OpenAI's `usage`."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


def usage(replies: Sequence[Reply], n: int) -> UsageBody:
    """Tokens of the whole request: a prompt with several answers counts once."""
    ends = [reply.end.usage for reply in replies]
    prompt, completion = (
        sum(end.prompt_tokens for end in ends[::n]),
        sum(end.completion_tokens for end in ends),
    )
    cached = sum(end.cached_tokens for end in ends[::n])
    return UsageBody(prompt, completion, prompt + completion, PromptDetails(cached))


@functools.cache
def fingerprint(model: str) -> str:
    """`system_fingerprint`: the same as long as this version of Potluck serves this model."""
    return "fp_" + hashlib.sha256(f"{version('potluck')} {model}".encode()).hexdigest()[:10]


@dataclass(frozen=True, slots=True)
class Header:
    """What every chunk of an answer repeats, and how its tokens are spelled."""

    id: str
    created: int
    model: str
    codec: PromptCodec
    n: int
    include_usage: bool

    @property
    def fingerprint(self) -> str:
        """`system_fingerprint`."""
        return fingerprint(self.model)

    def token_text(self, token: int) -> str:
        """A token's text alone; not valid UTF-8 alone gives a replacement character."""
        return self.codec.decode([token])


def logprob(value: float) -> float:
    """JSON has no infinity: OpenAI writes -9999.0 for what is as good as impossible."""
    return max(value, -9999.0) if value == value else -9999.0  # noqa: PLR0124 - not a number, whoever sent it


UsageOrNull: TypeAlias = UsageBody | msgspec.UnsetType | None
"""Left out of a chunk unless usage was asked for, then null until the last one."""
