"""The zmq clients' side of the broker: each Submit becomes a request, its events go back as Delta and Finished frames.

A client whose connection closes has its requests cancelled. Where no closing is told of, it still can't be routed to:
the first frame that doesn't go out cancels its request. Events go out as they come, without a task per request: with
many streams that is most of what a broker does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import msgspec

from potluck.broker.effects import RequestFailed, RequestFinished, RequestText
from potluck.broker.gateway import Gateway, Ticket
from potluck.wire.errors import PotluckError
from potluck.wire.messages import Accepted, Cancel, Delta, ErrorInfo, Finished, Message, Rejected, Submit

Reply = Callable[[bytes, Message], bool]
"""Sends a message to a client; False if it can't be reached."""


class ZmqClients:
    """Requests of zmq clients that run now."""

    def __init__(self, gateway: Gateway, reply: Reply) -> None:
        self._gateway = gateway
        self._reply = reply
        self._tickets: dict[tuple[bytes, str], Ticket] = {}

    def submit(self, peer: bytes, submit: Submit) -> None:
        """Starts a request and streams it back until it ends."""
        name = submit.request
        inner = msgspec.structs.replace(submit, request=f"{peer.hex()}:{name}")
        try:
            ticket = self._gateway.submit(
                inner, cause=f"client {peer.hex()[:12]}", sink=partial(self._event, peer, name)
            )
        except PotluckError as error:
            self._reply(peer, Rejected(name, ErrorInfo.of(error)))
            return
        self._tickets[peer, name] = ticket
        self._reply(peer, Accepted(name, self._gateway.model, ticket.prompt_tokens))

    def cancel(self, peer: bytes, cancel: Cancel) -> None:
        """Ends a request that its client no longer wants."""
        ticket = self._tickets.pop((peer, cancel.request), None)
        if ticket is not None:
            ticket.cancel()

    def closed(self, peer: bytes) -> None:
        """Ends all requests of a client that is gone: those that wait before those whose slots they would get."""
        for client, name in reversed(list(self._tickets)):
            if client == peer:
                self.cancel(peer, Cancel(name))

    def _event(self, peer: bytes, name: str, event: RequestText | RequestFinished | RequestFailed) -> None:
        message: Message
        match event:
            case RequestText():
                message = Delta(name, event.text, event.tokens, event.logprobs)
            case RequestFinished():
                message = Finished(name, event.reason, event.usage, event.timings, event.stop)
            case RequestFailed():
                message = Rejected(name, ErrorInfo.of(event.error))
        heard = self._reply(peer, message)
        if not isinstance(event, RequestText):
            self._tickets.pop((peer, name), None)
        elif not heard:
            # Not at once: the core's effects of this moment are still being carried out.
            asyncio.get_running_loop().call_soon(self.cancel, peer, Cancel(name))
