"""POST /v1/chat/completions: OpenAI's chat body and its answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from potluck.broker.effects import RequestText
from potluck.broker.rest_body import MaxTokens, Prompt, unsupported
from potluck.broker.rest_openai import Header, OpenAIBody, UsageBody, UsageOrNull, bounded, logprob, usage
from potluck.broker.rest_stream import DONE, Reply
from potluck.wire import limits
from potluck.wire.errors import InvalidValueError
from potluck.wire.messages import ChatMessage, Submit
from potluck.wire.sampling import TokenLogprobs

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""OpenAI's roles, and what chat templates call them. Whether a template knows `tool` is for the template to say."""


class Part(msgspec.Struct, frozen=True):
    """One part of a message's content; only text is served."""

    type: str
    text: Prompt | None = None


class Turn(msgspec.Struct, kw_only=True, frozen=True):
    """One message."""

    role: str
    content: Prompt | list[Part] | None = None
    tool_calls: list[Any] | None = None


class ChatBody(OpenAIBody, kw_only=True, frozen=True):
    """OpenAI's chat request, with `min_p`, `top_k`, `repeat_penalty`, `repeat_last_n`, `ignore_eos`, `timeout_s`."""

    messages: Annotated[list[Turn], Meta(min_length=1, max_length=limits.CHAT_MESSAGES)]
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=limits.TOP_LOGPROBS)] | None = None
    tools: list[Any] | None = None
    functions: list[Any] | None = None

    def refuse_unsupported(self) -> None:
        """Raises InvalidValueError for what can't be done."""
        super().refuse_unsupported()
        for name in ("tools", "functions"):
            if getattr(self, name):
                raise unsupported(name, "The model can't call tools here yet.")
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidValueError("top_logprobs needs logprobs to be true.", param="top_logprobs")

    def submit(self) -> Submit:
        """The request it asks for. Raises InvalidValueError."""
        top = (self.top_logprobs or 0) if self.logprobs else -1
        given = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return Submit(
            request="",
            messages=tuple(
                chat_message(turn, f"messages[{index}]") for index, turn in enumerate(self.messages)
            ),
            model=self.model or "",
            max_tokens=bounded(given),
            stop=self.stops,
            sampling=self.sampling(top),
            seed_given=self.seed_given,
            ignore_eos=bool(self.ignore_eos),
            timeout_s=self.timeout_s,
        )


def chat_message(turn: Turn, path: str) -> ChatMessage:
    """One message as the template takes it. Raises InvalidValueError naming the part that can't be served."""
    role = ROLES.get(turn.role)
    if role is None:
        raise InvalidValueError(f"{path}.role: known are {', '.join(ROLES)}.", param=f"{path}.role")
    if turn.tool_calls:
        raise unsupported(f"{path}.tool_calls", "The model can't call tools here yet.")
    if turn.content is None and role != "assistant":
        raise InvalidValueError(f"{path}.content is missing.", param=f"{path}.content")
    if turn.content is None or isinstance(turn.content, str):
        return ChatMessage(role, turn.content or "")
    texts = []
    for index, part in enumerate(turn.content):
        where = f"{path}.content[{index}]"
        if part.type != "text":
            raise unsupported(where, f"Parts of type {part.type[:64]} are not, only text is.")
        if part.text is None:
            raise InvalidValueError(f"{where}.text is missing.", param=f"{where}.text")
        texts.append(part.text)
    return ChatMessage(role, "\n".join(texts))


# ---- answers


class TopLogprob(msgspec.Struct):
    """One of the likeliest tokens."""

    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(TopLogprob):
    """A sampled token and those that were likeliest in its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """OpenAI's `logprobs` of a chat choice."""

    content: list[ContentLogprob]
    refusal: None = None


class Message(msgspec.Struct):
    """What the model said."""

    content: str
    role: str = "assistant"
    refusal: None = None


class Choice(msgspec.Struct):
    """One answer."""

    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: str


class ChatCompletion(msgspec.Struct, kw_only=True):
    """The whole answer."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: UsageBody
    system_fingerprint: str


class ChunkDelta(msgspec.Struct):
    """What is new: the role first, then text."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChunkChoice(msgspec.Struct):
    """News of one answer."""

    index: int
    delta: ChunkDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatCompletionChunk(msgspec.Struct, kw_only=True):
    """One event of a streamed answer."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: UsageOrNull = UNSET


class ChatAnswer:
    """Says a reply the way OpenAI's chat endpoint does."""

    ending = DONE

    def __init__(self, header: Header, *, logprobs: bool) -> None:
        self.header = header
        self.logprobs = logprobs
        self._begun: set[int] = set()

    def piece(self, choice: int, event: RequestText, before: Reply) -> Iterator[ChatCompletionChunk]:
        """Text, after the role for the first of a choice. Held-back text is nothing to say unless a token counts."""
        yield from self._role(choice)
        if event.text or self.logprobs:
            yield self._chunk(
                ChunkChoice(
                    choice, ChunkDelta(content=event.text), self._logprobs(event.tokens, event.logprobs)
                )
            )

    def last(self, choice: int, reply: Reply) -> Iterator[ChatCompletionChunk]:
        """Why it ended."""
        yield from self._role(choice)
        yield self._chunk(ChunkChoice(choice, ChunkDelta(), finish_reason=reply.end.reason))

    def closing(self, replies: Sequence[Reply]) -> Iterator[ChatCompletionChunk]:
        """The usage, if asked for."""
        if self.header.include_usage:
            yield self._chunk(None, usage(replies, self.header.n))

    def whole(self, replies: Sequence[Reply]) -> ChatCompletion:
        """The answer in one piece."""
        return ChatCompletion(
            id=self.header.id,
            created=self.header.created,
            model=self.header.model,
            choices=[
                Choice(
                    index, Message(reply.text), self._logprobs(reply.tokens, reply.logprobs), reply.end.reason
                )
                for index, reply in enumerate(replies)
            ],
            usage=usage(replies, self.header.n),
            system_fingerprint=self.header.fingerprint,
        )

    def _role(self, choice: int) -> Iterator[ChatCompletionChunk]:
        if choice not in self._begun:
            self._begun.add(choice)
            yield self._chunk(ChunkChoice(choice, ChunkDelta(role="assistant", content="")))

    def _chunk(self, choice: ChunkChoice | None, total: UsageBody | None = None) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self.header.id,
            created=self.header.created,
            model=self.header.model,
            system_fingerprint=self.header.fingerprint,
            choices=[] if choice is None else [choice],
            usage=total if self.header.include_usage else UNSET,
        )

    def _logprobs(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> ChatLogprobs | None:
        if not self.logprobs:
            return None
        content = []
        for token, given in zip(tokens, logprobs, strict=False):
            text = self.header.token_text(token)
            top = [self._top(*pair) for pair in given.top]
            content.append(ContentLogprob(text, logprob(given.chosen), list(text.encode()), top))
        return ChatLogprobs(content)

    def _top(self, token: int, value: float) -> TopLogprob:
        text = self.header.token_text(token)
        return TopLogprob(text, logprob(value), list(text.encode()))
