"""POST /v1/completions: OpenAI's older body, bare prompts instead of chats, and its answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta

from potluck.broker.effects import RequestText
from potluck.broker.rest_body import Prompt, Token, unsupported
from potluck.broker.rest_openai import (
    CHOICES,
    Header,
    OpenAIBody,
    UsageBody,
    UsageOrNull,
    bounded,
    logprob,
    usage,
)
from potluck.broker.rest_stream import DONE, Reply
from potluck.wire import limits
from potluck.wire.errors import InvalidValueError
from potluck.wire.messages import Submit
from potluck.wire.sampling import TokenLogprobs

MAX_TOKENS = 16
"""OpenAI's default here; a bare prompt often has no end of its own."""

Tokens = Annotated[list[Token], Meta(min_length=1, max_length=limits.PROMPT_TOKENS)]


class CompletionBody(OpenAIBody, kw_only=True, frozen=True):
    """OpenAI's, with `min_p`, `top_k`, `repeat_penalty`, `repeat_last_n`, `ignore_eos` and `timeout_s` added."""

    prompt: (
        Prompt | Annotated[list[Prompt | Token | Tokens], Meta(min_length=1, max_length=limits.PROMPT_TOKENS)]
    )
    """A string, its tokens, or a list of either: one answer (or `n`) each."""
    logprobs: Annotated[int, Meta(ge=0, le=limits.TOP_LOGPROBS)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None

    def refuse_unsupported(self) -> None:
        """Raises InvalidValueError for what can't be done."""
        super().refuse_unsupported()
        if self.echo:
            raise unsupported("echo", "The prompt is not repeated.")
        if self.suffix:
            raise unsupported("suffix", "Text can't be filled in before a suffix.")
        if self.best_of is not None and self.best_of != 1:
            raise unsupported("best_of", "Only 1 is.")

    def submits(self) -> list[Submit]:
        """One request per prompt. Raises InvalidValueError."""
        prompts = prompts_of(self.prompt)
        if len(prompts) * self.choices > CHOICES:
            raise InvalidValueError(
                f"prompt: {CHOICES} answers at most, {len(prompts)} times n asked.", param="prompt"
            )
        return [
            Submit(
                request="",
                prompt=prompt if isinstance(prompt, str) else None,
                tokens=None if isinstance(prompt, str) else prompt,
                model=self.model or "",
                max_tokens=bounded(self.max_tokens or MAX_TOKENS),
                stop=self.stops,
                sampling=self.sampling(-1 if self.logprobs is None else self.logprobs),
                seed_given=self.seed_given,
                ignore_eos=bool(self.ignore_eos),
                timeout_s=self.timeout_s,
            )
            for prompt in prompts
        ]


def prompts_of(given: str | list[str | int | list[int]]) -> list[str | tuple[int, ...]]:
    """The prompts in their order. Raises InvalidValueError for tokens and prompts in one list."""
    if isinstance(given, str):
        return [given]
    tokens = [item for item in given if isinstance(item, int)]
    if len(tokens) == len(given):
        return [tuple(tokens)]
    if tokens:
        raise InvalidValueError("prompt: a list holds either tokens or prompts.", param="prompt")
    return [item if isinstance(item, str) else tuple(item) for item in given if not isinstance(item, int)]


# ---- answers


class TextLogprobs(msgspec.Struct):
    """OpenAI's older `logprobs`: four lists side by side, one entry per token."""

    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


class TextChoice(msgspec.Struct):
    """One answer, or news of it."""

    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: str | None = None


class Completion(msgspec.Struct, kw_only=True):
    """The whole answer, or one event of a streamed one."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    usage: UsageOrNull = UNSET
    system_fingerprint: str


class TextAnswer:
    """Says a reply the way OpenAI's completions endpoint does."""

    ending = DONE

    def __init__(self, header: Header, *, logprobs: bool) -> None:
        self.header = header
        self.logprobs = logprobs
        self._offsets: dict[int, int] = {}

    def piece(self, choice: int, event: RequestText, before: Reply) -> Iterator[Completion]:
        """Text. Held-back text is nothing to say unless a token counts."""
        if event.text or self.logprobs:
            yield self._chunk(
                TextChoice(choice, event.text, self._logprobs(choice, event.tokens, event.logprobs))
            )

    def last(self, choice: int, reply: Reply) -> Iterator[Completion]:
        """Why it ended."""
        yield self._chunk(TextChoice(choice, "", finish_reason=reply.end.reason))

    def closing(self, replies: Sequence[Reply]) -> Iterator[Completion]:
        """The usage, if asked for."""
        if self.header.include_usage:
            yield self._chunk(None, usage(replies, self.header.n))

    def whole(self, replies: Sequence[Reply]) -> Completion:
        """The answer in one piece."""
        choices = [
            TextChoice(
                index, reply.text, self._logprobs(index, reply.tokens, reply.logprobs), reply.end.reason
            )
            for index, reply in enumerate(replies)
        ]
        return self._completion(choices, usage(replies, self.header.n))

    def _chunk(self, choice: TextChoice | None, total: UsageBody | None = None) -> Completion:
        choices = [] if choice is None else [choice]
        return self._completion(choices, total if self.header.include_usage else UNSET)

    def _completion(self, choices: list[TextChoice], total: UsageOrNull) -> Completion:
        return Completion(
            id=self.header.id,
            created=self.header.created,
            model=self.header.model,
            choices=choices,
            usage=total,
            system_fingerprint=self.header.fingerprint,
        )

    def _logprobs(
        self, choice: int, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> TextLogprobs | None:
        """The sampled token is always among `top_logprobs`, as OpenAI has it."""
        if not self.logprobs:
            return None
        found = TextLogprobs([], [], [], [])
        at = self._offsets.get(choice, 0)
        for token, given in zip(tokens, logprobs, strict=False):
            text, chosen = self.header.token_text(token), logprob(given.chosen)
            found.text_offset.append(at)
            found.token_logprobs.append(chosen)
            found.tokens.append(text)
            top = {self.header.token_text(other): logprob(value) for other, value in given.top}
            found.top_logprobs.append({**top, text: chosen})
            at += len(text)
        self._offsets[choice] = at
        return found
