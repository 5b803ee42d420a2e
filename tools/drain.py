"""`potluck drain`: a device's work goes to others while requests run on, so that it can be switched off."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from potluck.runtime.client import Client
from potluck.wire.errors import UnavailableError
from potluck.wire.messages import Draining

EVERY_S = 0.5
"""Between two looks at how far it is."""


async def drain(
    client: Client, device: str, say: Callable[[str], None], *, wait: bool, timeout_s: float
) -> Draining:
    """Asks the broker, and waits until the device has no work. Raises UnavailableError after `timeout_s`."""
    said = ""
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                now = await client.drain(device)
                if now.done or not wait:
                    return now
                if now.text != said:
                    said = now.text
                    say(f"{device}: {said}")
                await asyncio.sleep(EVERY_S)
    except TimeoutError:
        raise UnavailableError(
            f"{device} still has work after {timeout_s:g} s. {said}",
            hint=f"It goes on; look again with potluck drain {device}, or undo it with --undo.",
            device=device,
        ) from None
