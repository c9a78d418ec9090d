"""Messages between client and server over a socket, with mutual TLS and clear errors.

A folder for TLS holds cert.pem and key.pem of the party itself and peer.pem, the certificate of the
other party: no other certificate is accepted.
"""

from __future__ import annotations

import os
import socket
import ssl
import struct
import sys
import threading
from pathlib import Path

FILES = ("cert.pem", "key.pem", "peer.pem")
HEADER = struct.Struct("<Q")
LONGEST = 1 << 33  # bytes of a message


class Broken(Exception):
    """The other party cannot be reached, is not who it should be, or has ended."""


class Connection:
    """A connection to the other party."""

    def __init__(self, connection: socket.socket, other: str, seconds: float) -> None:
        connection.settimeout(seconds)
        self.connection = connection
        self.other = other
        self.seconds = seconds
        self.finished = threading.Event()

    def send(self, message: bytes) -> None:
        """One message."""
        try:
            self.connection.sendall(HEADER.pack(len(message)) + message)
        except OSError as error:
            raise self._broken(error) from error

    def receive(self) -> bytes:
        """The next message of the other party."""
        (size,) = HEADER.unpack(self._read(HEADER.size))
        if size > LONGEST:
            raise Broken(f"the {self.other} sent something that is no message")
        return self._read(size)

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            try:
                part = self.connection.recv(min(size - len(data), 1 << 20))
            except OSError as error:
                raise self._broken(error) from error
            if not part:
                raise Broken(f"the {self.other} closed the connection")
            data += part
        return bytes(data)

    def _broken(self, error: OSError) -> Broken:
        return Broken(reason(error, self.other, self.seconds))

    def watch(self) -> None:
        """From now on, end this process if the other party goes away.

        Engines notice that late or never.
        """
        raw = self.connection

        def wait() -> None:
            poll = socket.socket(fileno=os.dup(raw.fileno()))
            poll.settimeout(0.5)
            while not self.finished.is_set():
                try:
                    part = poll.recv(1, socket.MSG_PEEK)
                except TimeoutError:
                    continue
                except OSError:
                    part = b""
                if part == b"" and not self.finished.is_set():
                    print(
                        f"the {self.other} broke the connection during the inference",
                        file=sys.stderr,
                        flush=True,
                    )
                    os._exit(3)
                self.finished.wait(0.5)  # there is a message to be read

        threading.Thread(target=wait, daemon=True).start()


def reason(error: OSError, other: str, seconds: float) -> str:
    """What an error of a socket means."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"the {other} has a wrong certificate ({error.verify_message}): peer.pem must be the "
            f"{other}'s cert.pem"
        )
    if isinstance(error, ssl.SSLError) and "ALERT" in str(error):
        return (
            f"the {other} refused this party's certificate: its peer.pem must be the cert.pem "
            f"of this party"
        )
    if isinstance(error, ssl.SSLError):
        return f"the {other} does not speak TLS here: {error.reason or error}"
    if isinstance(error, TimeoutError):
        return f"the {other} sent nothing for {seconds:g} s"
    return f"the connection to the {other} broke: {error.strerror or error}"


def context(folder: Path, role: str) -> ssl.SSLContext:
    """Of mutual TLS 1.3. role: "server" or "client"."""
    missing = [name for name in FILES if not (folder / name).exists()]
    if missing:
        raise FileNotFoundError(
            f"{folder} lacks {', '.join(missing)}: it must hold cert.pem and key.pem of the "
            f"{role} and peer.pem, the certificate of the other party"
        )
    sides = {"server": ssl.PROTOCOL_TLS_SERVER, "client": ssl.PROTOCOL_TLS_CLIENT}
    made = ssl.SSLContext(sides[role])
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    if role == "server":
        made.num_tickets = 0  # so that nothing is sent while `watch` waits
    made.check_hostname = False  # one certificate is accepted, whatever its name
    made.verify_mode = ssl.CERT_REQUIRED
    made.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    made.load_verify_locations(folder / "peer.pem")
    return made


def listener(host: str, port: int) -> socket.socket:
    """A socket that waits for a client."""
    try:
        return socket.create_server((host, port))
    except OSError as error:
        raise Broken(f"cannot listen on {host}:{port}: {error.strerror}") from error


def accepted(waiting: socket.socket, tls: Path | None, seconds: float) -> Connection:
    """The next client."""
    security = context(tls, "server") if tls else None
    connection, _ = waiting.accept()
    connection.settimeout(seconds)
    if security:
        try:
            connection = security.wrap_socket(connection, server_side=True)
        except OSError as error:
            raise Broken(reason(error, "client", seconds)) from error
    return Connection(connection, "client", seconds)


def connected(host: str, port: int, tls: Path | None, seconds: float) -> Connection:
    """To the server."""
    security = context(tls, "client") if tls else None
    try:
        connection = socket.create_connection((host, port), seconds)
    except OSError as error:
        why = error.strerror or error
        raise Broken(f"no server answers at {host}:{port}: {why}") from error
    if security:
        try:
            connection = security.wrap_socket(connection)
        except OSError as error:
            raise Broken(reason(error, "server", seconds)) from error
    return Connection(connection, "server", seconds)


def free_port(host: str) -> int:
    """A port that nothing listens on."""
    with socket.create_server((host, 0)) as made:
        return made.getsockname()[1]
