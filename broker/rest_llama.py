"""POST /completion: the llama.cpp server's own body and answers, so that its clients need no change.

Fields and defaults as in llama.cpp's tools/server/README.md. What it knows beyond these is ignored, but for grammars.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from potluck.broker.effects import RequestText
from potluck.broker.gateway import PromptCodec
from potluck.broker.rest_body import Body, Prompt, Token
from potluck.broker.rest_openai import bounded, logprob
from potluck.broker.rest_stream import Reply
from potluck.wire import limits
from potluck.wire.errors import InvalidValueError
from potluck.wire.messages import Submit
from potluck.wire.sampling import Sampling, TokenLogprobs

DEFAULTS = Sampling()
RANDOM_SEED = (1 << 32) - 1
"""What llama.cpp reports for a seed that it drew."""
NEVER = -1e6
"""`false` as a bias."""

Penalty = Annotated[float, Meta(ge=-100.0, le=100.0)]
Bias = Annotated[float, Meta(ge=-1e6, le=1e6)]


class LlamaBody(Body, kw_only=True, frozen=True):
    """The llama.cpp server's request."""

    prompt: Prompt | Annotated[list[Token], Meta(min_length=1, max_length=limits.PROMPT_TOKENS)]
    n_predict: Annotated[int, Meta(ge=-2)] | None = None
    """-1 and -2: until the context is full."""
    temperature: Annotated[float, Meta(ge=-100.0, le=100.0)] | None = None
    """Below 0 means 0: the likeliest token."""
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: (
        Annotated[dict[int, Bias | bool], Meta(max_length=limits.LOGIT_BIASES)]
        | Annotated[list[tuple[int, Bias | bool]], Meta(max_length=limits.LOGIT_BIASES)]
        | None
    ) = None
    n_probs: Annotated[int, Meta(ge=0, le=limits.TOP_LOGPROBS)] | None = None
    return_tokens: bool | None = None

    def refuse_unsupported(self) -> None:
        """Raises InvalidValueError for what can't be done."""
        super().refuse_unsupported()
        if self.n_predict == 0:
            raise InvalidValueError("n_predict: an answer has at least one token.", param="n_predict")
        if any(token < 0 or bias is True for token, bias in self.biases):
            raise InvalidValueError(
                "logit_bias: pairs of a token id and a number or false.", param="logit_bias"
            )

    @property
    def biases(self) -> list[tuple[int, float | bool]]:
        """`logit_bias`, whichever way it came."""
        return list(self.logit_bias.items()) if isinstance(self.logit_bias, dict) else self.logit_bias or []

    @property
    def probabilities(self) -> bool:
        """Whether the tokens' log-probabilities are wanted."""
        return bool(self.n_probs)

    def sampling(self) -> Sampling:
        """How tokens are drawn."""
        given: dict[str, Any] = {
            name: value
            for name in ("presence_penalty", "frequency_penalty")
            if (value := getattr(self, name)) is not None
        }
        return msgspec.structs.replace(
            DEFAULTS,
            **self.shared_sampling(DEFAULTS),
            **given,
            temperature=DEFAULTS.temperature if self.temperature is None else max(0.0, self.temperature),
            logit_bias=tuple((token, NEVER if bias is False else float(bias)) for token, bias in self.biases),
            top_logprobs=self.n_probs or -1,
        )

    def submit(self) -> Submit:
        """The request it asks for."""
        limit = self.n_predict if self.n_predict is not None and self.n_predict > 0 else None
        return Submit(
            request="",
            prompt=self.prompt if isinstance(self.prompt, str) else None,
            tokens=None if isinstance(self.prompt, str) else tuple(self.prompt),
            model=self.model or "",
            max_tokens=bounded(limit),
            stop=self.stops,
            sampling=self.sampling(),
            seed_given=self.seed_given,
            ignore_eos=bool(self.ignore_eos),
            timeout_s=self.timeout_s,
        )


# ---- answers


class TopProbability(msgspec.Struct):
    """One of the likeliest tokens."""

    id: int
    token: str
    bytes: list[int]
    logprob: float


class Probability(TopProbability):
    """A sampled token and those that were likeliest in its place."""

    top_logprobs: list[TopProbability]


class LlamaTimings(msgspec.Struct):
    """How long the prompt and the answer took. `prompt_n` leaves out what was still in the cache (`cache_n`)."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class LlamaPiece(msgspec.Struct, kw_only=True):
    """One event of a stream, but for the last."""

    index: int = 0
    content: str
    tokens: list[int]
    stop: bool = False
    id_slot: int = -1
    tokens_predicted: int
    tokens_evaluated: int
    completion_probabilities: list[Probability] | UnsetType = UNSET


class LlamaAnswerBody(msgspec.Struct, kw_only=True):
    """The whole answer, or the last event of a stream."""

    index: int = 0
    content: str
    tokens: list[int]
    id_slot: int = -1
    stop: bool = True
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    tokens_cached: int
    generation_settings: dict[str, Any]
    prompt: str | list[int]
    has_new_line: bool
    truncated: bool = False
    stop_type: str
    stopping_word: str
    timings: LlamaTimings
    completion_probabilities: list[Probability] | UnsetType = UNSET


class LlamaAnswer:
    """Says a reply the way the llama.cpp server does."""

    ending = b""

    def __init__(self, body: LlamaBody, model: str, codec: PromptCodec) -> None:
        self.body = body
        self.model = model
        self.codec = codec

    def piece(self, choice: int, event: RequestText, before: Reply) -> Iterator[LlamaPiece]:
        """Text. Held-back text is nothing to say unless a token counts."""
        if event.text or self.body.probabilities or self.body.return_tokens:
            yield LlamaPiece(
                content=event.text,
                tokens=list(event.tokens),
                tokens_predicted=len(before.tokens) + len(event.tokens),
                tokens_evaluated=before.prompt_tokens,
                completion_probabilities=self._probabilities(event.tokens, event.logprobs),
            )

    def last(self, choice: int, reply: Reply) -> Iterator[LlamaAnswerBody]:
        """Everything but the text, which has gone out already."""
        answer = self._answer(reply)
        answer.content, answer.tokens, answer.completion_probabilities = "", [], UNSET
        yield answer

    def closing(self, replies: Sequence[Reply]) -> Iterator[LlamaAnswerBody]:
        """Nothing."""
        yield from ()

    def whole(self, replies: Sequence[Reply]) -> LlamaAnswerBody:
        """The answer in one piece."""
        return self._answer(replies[0])

    def _answer(self, reply: Reply) -> LlamaAnswerBody:
        used, stop = reply.end.usage, reply.end.stop
        limit = reply.end.reason == "length"
        return LlamaAnswerBody(
            content=reply.text,
            tokens=reply.tokens if self.body.return_tokens else [],
            model=self.model,
            tokens_predicted=used.completion_tokens,
            tokens_evaluated=used.prompt_tokens,
            tokens_cached=used.prompt_tokens + used.completion_tokens,
            generation_settings=self._settings(),
            prompt=self.body.prompt,
            has_new_line="\n" in reply.text,
            stop_type="limit" if limit else "word" if stop is not None else "eos",
            stopping_word=stop or "",
            timings=timings(reply),
            completion_probabilities=self._probabilities(reply.tokens, reply.logprobs),
        )

    def _settings(self) -> dict[str, Any]:
        """What the request came to, in llama.cpp's names."""
        sampling = msgspec.structs.asdict(self.body.sampling())
        for name, theirs in (("penalty_last_n", "repeat_last_n"), ("top_logprobs", "n_probs")):
            sampling[theirs] = sampling.pop(name)
        return {
            **sampling,
            "seed": sampling["seed"] if self.body.seed_given else RANDOM_SEED,
            "n_probs": self.body.n_probs or 0,
            "n_predict": -1 if self.body.n_predict is None else self.body.n_predict,
            "stop": self.body.stops,
            "stream": bool(self.body.stream),
            "ignore_eos": bool(self.body.ignore_eos),
            "samplers": ["penalties", "top_k", "top_p", "min_p", "temperature"],
        }

    def _probabilities(
        self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> list[Probability] | UnsetType:
        if not self.body.probabilities:
            return UNSET
        found = []
        for token, given in zip(tokens, logprobs, strict=False):
            text = self.codec.decode([token])
            top = [self._top(*pair) for pair in given.top]
            found.append(Probability(token, text, list(text.encode()), logprob(given.chosen), top))
        return found

    def _top(self, token: int, value: float) -> TopProbability:
        text = self.codec.decode([token])
        return TopProbability(token, text, list(text.encode()), logprob(value))


def timings(reply: Reply) -> LlamaTimings:
    """The core's seconds in llama.cpp's terms: prompt until the first token (without the wait), then the answer."""
    spent, used = reply.end.timings, reply.end.usage
    prompt_n, predicted_n = used.prompt_tokens - used.cached_tokens, used.completion_tokens
    prompt_ms = max(0.0, spent.first_token_s - spent.queued_s) * 1000
    predicted_ms = max(0.0, spent.total_s - spent.first_token_s) * 1000
    return LlamaTimings(
        cache_n=used.cached_tokens,
        prompt_n=prompt_n,
        prompt_ms=prompt_ms,
        prompt_per_token_ms=_ratio(prompt_ms, prompt_n),
        prompt_per_second=_ratio(prompt_n * 1000, prompt_ms),
        predicted_n=predicted_n,
        predicted_ms=predicted_ms,
        predicted_per_token_ms=_ratio(predicted_ms, predicted_n),
        predicted_per_second=_ratio(predicted_n * 1000, predicted_ms),
    )


def _ratio(value: float, per: float) -> float:
    """0 where there is nothing to divide by: JSON has no infinity."""
    return value / per if per else 0.0
