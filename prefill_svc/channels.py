"""Open channels to decode workers, by address; the least recently used beyond the bound are closed."""

from collections import OrderedDict

import grpc

from common.rpc.channel import open_channel

MAX_CHANNELS = 64


class ChannelPool:
    def __init__(self) -> None:
        self._channels: OrderedDict[str, grpc.aio.Channel] = OrderedDict()

    def get(self, address: str) -> grpc.aio.Channel:
        """A channel to `address`. Channels reconnect by themselves, so a worker that restarts is found again."""
        channel = self._channels.pop(address, None) or open_channel(address)
        self._channels[address] = channel
        return channel

    async def trim(self) -> None:
        """Closes what exceeds the bound. Calls that are open on a closed channel are cancelled, so it is called when
        a hand-off has ended, and takes the channels that were not used for longest."""
        while len(self._channels) > MAX_CHANNELS:
            _, channel = self._channels.popitem(last=False)
            await channel.close(None)

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close(None)
        self._channels.clear()
