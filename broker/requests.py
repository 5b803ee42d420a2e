"""The life of one request inside the core: from tokens to text, from the last token to the end. Pure."""

from __future__ import annotations

from potluck.broker.config import BrokerConfig
from potluck.broker.effects import Effect, RequestFailed, RequestFinished, RequestText
from potluck.broker.events import RequestSubmitted
from potluck.broker.state import BrokerState, Request
from potluck.model.text import TextStream
from potluck.model.vocabulary import Vocabulary
from potluck.wire.errors import ContextExceededError, InvalidValueError, Phase, PotluckError
from potluck.wire.ids import SlotId
from potluck.wire.messages import Timings, Usage
from potluck.wire.sampling import TokenLogprobs


def context_exceeded(said: str, prompt_tokens: int, context_tokens: int) -> ContextExceededError:
    """The error for a prompt that does not fit, with both numbers."""
    return ContextExceededError(
        said,
        hint="Shorten the prompt, or start the broker with a larger --context.",
        phase=Phase.SUBMIT,
        param="prompt",
        n_prompt_tokens=prompt_tokens,
        n_ctx=context_tokens,
    )


def check_submission(event: RequestSubmitted, state: BrokerState, config: BrokerConfig, vocab: int) -> None:
    """Raises the RequestError that says why this can't be served, if it can't."""
    if event.request in state.requests:
        raise InvalidValueError(f"A request named {event.request} is already running.", param="request")
    check_request(event, config, vocab)


def check_request(event: RequestSubmitted, config: BrokerConfig, vocab: int) -> None:
    """Raises the RequestError that says why this can't be served at any time, if it can't."""
    prompt, context = len(event.tokens), config.context_tokens
    if prompt == 0:
        raise InvalidValueError("The prompt is empty.", hint="Send at least one token.", param="prompt")
    if prompt >= context:
        said = (
            f"The prompt has {prompt} tokens, the context holds {context} with at least one for the answer."
        )
        raise context_exceeded(said, prompt, context)
    if any(not 0 <= token < vocab for token in event.tokens):
        raise InvalidValueError(f"A token is outside the vocabulary of {vocab}.", param="prompt")
    if any(not 0 <= token < vocab for token, _ in event.sampling.logit_bias):
        raise InvalidValueError(
            f"logit_bias names a token outside the vocabulary of {vocab}.", param="logit_bias"
        )


def new_request(event: RequestSubmitted, config: BrokerConfig, now: float) -> Request:
    """A request that waits for its first slot; the answer is cut to what the context has room for."""
    room = config.context_tokens - len(event.tokens)
    timeout_s = config.request_timeout_s if event.timeout_s is None else event.timeout_s
    return Request(
        request=event.request,
        tokens=list(event.tokens),
        prompt_tokens=len(event.tokens),
        max_new=room if event.max_tokens is None else min(event.max_tokens, room),
        sampling=event.sampling,
        ignore_eos=event.ignore_eos,
        text=TextStream(event.stops),
        accepted_s=now,
        due_s=now + timeout_s if timeout_s > 0 else None,
        waiting_since_s=now,
    )


def take_token(
    request: Request, token: int, logprobs: TokenLogprobs | None, vocabulary: Vocabulary, now: float
) -> tuple[list[Effect], bool]:
    """The request's next token: what goes out, and whether it was the last one."""
    if request.first_token_s is None:
        request.first_token_s = now
    request.tokens.append(token)
    request.replaying = False
    ended = vocabulary.is_end(token) and not request.ignore_eos
    text = "" if ended else request.text.push(vocabulary.piece(token))
    stop = request.text.stopped
    full = request.generated >= request.max_new
    last = ended or stop is not None or full
    if last and stop is None:
        text += request.text.finish()
        stop = request.text.stopped
    effects: list[Effect] = [
        RequestText(request.request, text, (token,), () if logprobs is None else (logprobs,)),
    ]
    if last:
        reason = "stop" if ended or stop is not None else "length"
        effects.append(RequestFinished(request.request, reason, usage(request), timings(request, now), stop))
    return effects, last


def usage(request: Request) -> Usage:
    """Tokens in and out so far."""
    return Usage(request.prompt_tokens, request.generated)


def timings(request: Request, now: float) -> Timings:
    """Seconds since the request was accepted."""
    start = request.accepted_s
    return Timings(
        queued_s=(request.started_s if request.started_s is not None else now) - start,
        first_token_s=(request.first_token_s if request.first_token_s is not None else now) - start,
        total_s=now - start,
    )


def end(state: BrokerState, request: Request) -> None:
    """Takes the request out of the state; its slot is free at once and cleaned by the next request that gets it."""
    state.freed += request.slot is not None
    release_slot(state, request)
    state.waiting.pop(request.request, None)
    del state.requests[request.request]
    state.ended += 1


def release_slot(state: BrokerState, request: Request) -> None:
    """Gives the slot back. Frames keep their order, so it may be used again while old tokens are still on their way."""
    chain = state.chains.get(request.chain) if request.chain is not None else None
    if chain is not None and request.slot is not None:
        chain.slots[request.slot] = None
        if request.sent > 0:
            chain.dirty.add(SlotId(request.slot))
    request.chain = request.slot = None
    request.sent = request.done = 0


def fail(state: BrokerState, request: Request, error: PotluckError) -> RequestFailed:
    """Ends the request with an error."""
    end(state, request)
    return RequestFailed(request.request, error)
