"""Open channels to decode workers, by address; the least recently used beyond the bound are closed."""

import asyncio
from collections import OrderedDict

import grpc

from common.rpc.channel import Connector

MAX_CHANNELS = 64
CLOSE_GRACE_S = 60.0
"""Calls that are open on a channel with an old certificate may end within this time."""


class ChannelPool:
    def __init__(self, connector: Connector) -> None:
        self._connector = connector
        self._version = connector.version
        self._channels: OrderedDict[str, grpc.aio.Channel] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()

    def get(self, address: str) -> grpc.aio.Channel:
        """A channel to `address`. Channels reconnect by themselves, so a worker that restarts is found again; when our
        certificate has changed they are opened anew."""
        version = self._connector.version
        if version != self._version:
            self._version = version
            self._retire_all()
        channel = self._channels.pop(address, None) or self._connector.open(address)
        self._channels[address] = channel
        return channel

    async def trim(self) -> None:
        """Closes what exceeds the bound. Calls that are open on a closed channel are cancelled, so it is called when
        a hand-off has ended, and takes the channels that were not used for longest."""
        while len(self._channels) > MAX_CHANNELS:
            _, channel = self._channels.popitem(last=False)
            await channel.close(None)

    async def close(self) -> None:
        for task in self._closing:
            task.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)
        for channel in self._channels.values():
            await channel.close(None)
        self._channels.clear()

    def _retire_all(self) -> None:
        for channel in self._channels.values():
            closing = asyncio.create_task(channel.close(CLOSE_GRACE_S))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        self._channels.clear()
