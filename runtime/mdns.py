"""Multicast DNS over zeroconf: makes a broker known on some addresses of this machine, and hears of others.

Everything of zeroconf is in this file. Decides nothing: `finding` reads and judges the answers, `discovery` says when.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Collection, Sequence
from ipaddress import IPv4Address, IPv6Address
from typing import Any, Self

from zeroconf import Error as ZeroconfError
from zeroconf import IPVersion, ServiceStateChange
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from potluck.runtime.finding import BROKERS, SERVICE, Advert, Broker, read_answer

ASK_MS = 3000
"""How long one broker's answer about its port and addresses is waited for."""
CLOSE_S = 3.0
"""What taking an advertisement back may take at the end."""


class NoMulticastError(Exception):
    """The network could not be asked by multicast; the text is for people."""


class Mdns:
    """Sockets for multicast DNS on some of this machine's addresses. Close it, so that others forget what it said."""

    def __init__(self, zeroconf: AsyncZeroconf) -> None:
        self._zeroconf = zeroconf
        self._browser: AsyncServiceBrowser | None = None
        self._asking: dict[str, asyncio.Task[None]] = {}

    @classmethod
    async def open(cls, addresses: Sequence[IPv4Address | IPv6Address]) -> Self:
        """Opens the sockets on these addresses; only on the IPv4 ones where IPv6 does not work.

        Raises NoMulticastError.
        """
        if not addresses:
            raise NoMulticastError("there is no address to use")
        hosts = [str(address) for address in addresses]
        four = [str(address) for address in addresses if address.version == 4]
        try:
            zeroconf = _sockets(hosts)
        except NoMulticastError:
            if four in ([], hosts):
                raise
            zeroconf = _sockets(four)
        made = cls(zeroconf)
        try:
            await zeroconf.zeroconf.async_wait_for_start()
            if not zeroconf.zeroconf.engine.senders:
                raise NoMulticastError("no interface takes part in multicast")
        except (OSError, ZeroconfError) as error:
            await made.close()
            raise NoMulticastError(_reason(error)) from error
        except BaseException:
            await made.close()
            raise
        return made

    async def advertise(
        self, advert: Advert, port: int, addresses: Sequence[IPv4Address | IPv6Address]
    ) -> str:
        """Makes a broker known. Returns its name, with a number behind it if another broker has that name already.

        Raises NoMulticastError.
        """
        info = AsyncServiceInfo(
            SERVICE,
            f"{advert.label}.{SERVICE}",
            port=port,
            properties=advert.texts(),
            # A host name of its own: two brokers of the same name must not get each other's addresses.
            server=f"potluck-{secrets.token_hex(4)}.local.",
            parsed_addresses=[str(address) for address in addresses],
        )
        try:
            announced = await self._zeroconf.async_register_service(info, allow_name_change=True)
            await announced
        except (OSError, ZeroconfError) as error:
            raise NoMulticastError(_reason(error)) from error
        return info.name.removesuffix(f".{SERVICE}")

    def browse(self, heard: Callable[[str, Broker | None], None]) -> None:
        """Calls `heard` with the name of each broker there is or comes; with None when one says goodbye."""

        def changed(zeroconf: Any, service_type: str, name: str, state_change: ServiceStateChange) -> None:
            asking = self._asking.pop(name, None)
            if asking is not None:
                asking.cancel()
            if state_change is ServiceStateChange.Removed:
                heard(name, None)
            elif len(self._asking) < BROKERS:
                self._asking[name] = asyncio.get_running_loop().create_task(self._ask(name, heard))

        self._browser = AsyncServiceBrowser(self._zeroconf.zeroconf, SERVICE, handlers=[changed])

    async def _ask(self, name: str, heard: Callable[[str, Broker | None], None]) -> None:
        try:
            info = AsyncServiceInfo(SERVICE, name)
            if await info.async_request(self._zeroconf.zeroconf, ASK_MS):
                addresses = info.parsed_addresses(IPVersion.All)
                heard(name, read_answer(name, info.port, addresses, info.properties))
        except (OSError, ValueError, ZeroconfError):
            pass  # an answer that can't be read is none
        finally:
            if self._asking.get(name) is asyncio.current_task():
                del self._asking[name]

    async def close(self) -> None:
        """Takes back what was made known, and closes the sockets. Never raises."""
        asking = list(self._asking.values())
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        with contextlib.suppress(OSError, ZeroconfError, TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                if self._browser is not None:
                    await self._browser.async_cancel()
                await self._zeroconf.async_close()


def _sockets(hosts: Collection[str]) -> AsyncZeroconf:
    try:
        return AsyncZeroconf(interfaces=list(hosts))
    except (OSError, RuntimeError, ZeroconfError) as error:
        raise NoMulticastError(_reason(error)) from error


def _reason(error: Exception) -> str:
    detail = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return f"multicast does not work here: {detail}"


__all__ = ["Mdns", "NoMulticastError"]
