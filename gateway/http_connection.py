"""One HTTP connection that does not wait for its client for ever."""

import asyncio
import logging
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

log = logging.getLogger("twostroke.http")


class PunctualConnection(H11Protocol):
    """Is closed when the head of a request does not come whole, or its body does not go on, within `client_timeout_s`.
    A new connection owes a request's head; later ones may be idle for as long as the server lets them."""

    client_timeout_s: float

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._patience: asyncio.TimerHandle | None = None
        self._awaits_head = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's does
        super().connection_made(transport)
        self._await_client(head=True)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look_for_what_is_due()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look_for_what_is_due()  # the next request may have begun to come already

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _look_for_what_is_due(self) -> None:
        if self.conn.their_state is h11.IDLE:
            if not self._awaits_head and self.conn.trailing_data[0]:
                self._await_client(head=True)
        elif self.conn.their_state is h11.SEND_BODY:
            self._await_client(head=False)
        else:
            self._stop_waiting()

    def _await_client(self, *, head: bool) -> None:
        self._stop_waiting()
        self._awaits_head = head
        self._patience = self.loop.call_later(self.client_timeout_s, self._give_up)

    def _stop_waiting(self) -> None:
        self._awaits_head = False
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _give_up(self) -> None:
        if self.flow.read_paused:  # it is we who do not read
            self._await_client(head=self._awaits_head)
            return
        part = "head" if self._awaits_head else "body"
        log.info("closing a connection: no more of a request's %s came for %g s", part, self.client_timeout_s)
        self.transport.close()


def connection_class(client_timeout_s: float) -> type[PunctualConnection]:
    """For a server that makes its connections itself."""
    return type("PunctualConnection", (PunctualConnection,), {"client_timeout_s": client_timeout_s})
