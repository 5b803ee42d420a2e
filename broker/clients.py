"""The zmq clients' side of the broker: each Submit becomes a ticket, its events go back as Delta and Finished frames.

A client that is gone can't be routed to: the first frame that doesn't go out cancels its request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing

import msgspec

from potluck.broker.effects import RequestFinished
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
        self._tasks: dict[tuple[bytes, str], asyncio.Task[None]] = {}

    def submit(self, peer: bytes, submit: Submit) -> None:
        """Starts a request and streams it back until it ends."""
        key = (peer, submit.request)
        inner = msgspec.structs.replace(submit, request=f"{peer.hex()[:32]}:{submit.request}"[:128])
        try:
            ticket = self._gateway.submit(inner, cause=f"client {peer.hex()[:12]}")
        except PotluckError as error:
            self._reply(peer, Rejected(submit.request, ErrorInfo.of(error)))
            return
        self._tickets[key] = ticket
        self._reply(peer, Accepted(submit.request, self._gateway.model, ticket.prompt_tokens))
        task = asyncio.get_running_loop().create_task(self._stream(key, ticket))
        self._tasks[key] = task
        task.add_done_callback(lambda ended: self._forget(key, ended))

    def cancel(self, peer: bytes, cancel: Cancel) -> None:
        """Ends a request that its client no longer wants."""
        key = (peer, cancel.request)
        if key in self._tickets:
            self._tickets.pop(key).cancel()
            self._tasks[key].cancel()  # a ticket that is cancelled has no more events, not even a last one

    def _forget(self, key: tuple[bytes, str], ended: asyncio.Task[None]) -> None:
        if self._tasks.get(key) is ended:
            del self._tasks[key]
            self._tickets.pop(key, None)

    async def _stream(self, key: tuple[bytes, str], ticket: Ticket) -> None:
        peer, name = key
        try:
            async with aclosing(ticket.events()) as events:
                async for event in events:
                    message: Message
                    if isinstance(event, RequestFinished):
                        message = Finished(name, event.reason, event.usage, event.timings, event.stop)
                    else:
                        message = Delta(name, event.text, event.tokens, event.logprobs)
                    if not self._reply(peer, message):
                        return
        except PotluckError as error:
            self._reply(peer, Rejected(name, ErrorInfo.of(error)))

    async def close(self) -> None:
        """Ends every stream."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
