"""Pings, by frames of HTTP/2 written by hand: gRPC's own clients hide them."""

import contextlib
import socket
import struct
import time

from engine.serving import grpc_server
from tests.serving.fake_core import FakeCore
from tests.serving.running_server import running

_SECONDS = 20.0
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEADER_BYTES = 9
_SETTINGS, _PING, _GOAWAY = 4, 6, 7
_ACK = 1
_ENHANCE_YOUR_CALM = 11


class Connection:
    """A connection without calls that answers nothing by itself."""

    def __init__(self, server):
        host, _, port = server.address.partition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=_SECONDS)
        self._read = b""
        self._socket.sendall(_PREFACE)
        self.send(_SETTINGS)
        self.send(_SETTINGS, _ACK)

    def send(self, kind, flags=0, payload=b""):
        length = struct.pack(">I", len(payload))[1:]
        self._socket.sendall(length + struct.pack(">BBI", kind, flags, 0) + payload)

    def ping(self):
        """Sends a ping; True: it was answered, False: the connection was closed instead."""
        with contextlib.suppress(OSError):
            self.send(_PING, payload=b"treadle.")
            return any(kind == _PING and flags & _ACK for kind, flags, _ in self.frames())
        return False

    def frames(self):
        """Frames as (kind, flags, payload) as they come, up to the end of the connection."""
        while len(head := self._take(_HEADER_BYTES)) == _HEADER_BYTES:
            length = int.from_bytes(head[:3])
            yield head[3], head[4], self._take(length)

    def _take(self, length):
        while len(self._read) < length and (more := self._socket.recv(4096)):
            self._read += more
        taken, self._read = self._read[:length], self._read[length:]
        return taken

    def close(self):
        self._socket.close()


@contextlib.contextmanager
def connected(**settings):
    with running(FakeCore(), **settings) as server:
        connection = Connection(server)
        with contextlib.closing(connection):
            yield connection


def _reason(connection):
    """The error code and the words of the GOAWAY that ends a connection."""
    (end,) = [payload for kind, _, payload in connection.frames() if kind == _GOAWAY]
    return int.from_bytes(end[4:8]), end[8:]


def test_pings_without_pause_close_the_connection():
    with connected() as connection:
        for _ in range(8):
            connection.send(_PING, payload=b"treadle.")
        assert _reason(connection) == (_ENHANCE_YOUR_CALM, b"too_many_pings")


def test_pings_at_the_permitted_rate_are_answered_without_a_call():
    with connected(ping_seconds=0.1) as connection:
        for _ in range(8):
            assert connection.ping()
            time.sleep(0.15)


def test_client_that_answers_no_ping_is_cut_off_and_one_that_does_is_kept():
    with connected(keepalive_seconds=0.2, keepalive_timeout_seconds=0.2) as connection:
        num_pings = 0
        for kind, flags, payload in connection.frames():
            if kind == _PING and not flags & _ACK:
                num_pings += 1
                if num_pings < 4:
                    connection.send(_PING, _ACK, payload)
        assert num_pings == 4


def test_documented_times_are_the_defaults():
    settings = grpc_server.ServerSettings()
    assert settings.ping_seconds == 10.0
    assert settings.keepalive_seconds + settings.keepalive_timeout_seconds == 40.0
