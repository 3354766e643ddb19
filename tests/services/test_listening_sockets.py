"""Listening sockets, the same for every process that serves HTTP."""

from __future__ import annotations

import socket

from services.listening import address_of, listen
from services.settings import Address


def test_what_is_accepted_sends_without_waiting_for_acknowledgements() -> None:
    with listen(Address("127.0.0.1", 0)) as listener:
        listener.setblocking(True)
        listener.settimeout(5.0)
        address = address_of(listener)
        with socket.create_connection((address.host, address.port), 5.0):
            accepted, _ = listener.accept()
            with accepted:
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
