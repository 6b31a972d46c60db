"""TLS for the client on the driver, from librdkafka's settings.

kafka-python would create a context of its own. That context takes no PEM text, asks for a key's
password on the terminal, reads no revocation list, leaves a socket open when its handshake fails,
and waits forever for a broker that accepts the connection and never responds.
"""

from __future__ import annotations

import socket
import ssl
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Final

from sparkonce.sinks.kafka.connecting.refused import RefusedError
from sparkonce.sinks.kafka.connecting.settings import KafkaSettings

HANDSHAKE_S: Final = 2.5
"""Half of the time for the first connection, which leaves time to try another broker."""

_WANTS: Final = (ssl.SSLWantReadError, ssl.SSLWantWriteError)


def context(settings: KafkaSettings) -> ssl.SSLContext:
    """The context for kafka-python's connections.

    Raises:
        RefusedError: a file cannot be read, or does not hold what its setting names.
    """
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    made.sslsocket_class = TlsSocket
    made.check_hostname = settings.checks_hostname
    _trust(made, settings)
    if settings.certificate is not None:
        _identify(made, settings)
    return made


def _trust(made: ssl.SSLContext, settings: KafkaSettings) -> None:
    location, text = settings.text("ssl.ca.location"), _pem("ssl.ca.pem", settings)
    revoked = settings.text("ssl.crl.location")
    name = "ssl.ca.location"
    try:
        if text is not None:
            name = "ssl.ca.pem"
            made.load_verify_locations(cadata=text)
        elif location is None or location == "probe":
            made.load_default_certs()
        elif Path(location).is_dir():
            made.load_verify_locations(capath=location)
        else:
            made.load_verify_locations(cafile=location)
        if revoked is not None:
            name = "ssl.crl.location"
            made.load_verify_locations(cafile=revoked)
            made.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
    except OSError as error:  # SSLError is one
        raise RefusedError(_unreadable(name, settings, error)) from None


def _identify(made: ssl.SSLContext, settings: KafkaSettings) -> None:
    files = [settings.text(f"ssl.{what}.location") for what in ("certificate", "key")]
    # Without any password OpenSSL would ask for one on the terminal.
    password = settings.text("ssl.key.password") or ""
    with tempfile.TemporaryDirectory(prefix="sparkonce-") as folder:  # readable by our user only
        for number, what in enumerate(("certificate", "key")):
            text = _pem(f"ssl.{what}.pem", settings)
            if text is not None:  # Python reads them only from files
                path = Path(folder) / what
                path.write_text(text, "ascii")
                files[number] = str(path)
        certificate, key = files
        for name, file in ((settings.certificate, certificate), (settings.key, key)):
            try:
                with Path(str(file)).open("rb"):
                    pass  # `ssl` does not say which of the two files it could not open
            except OSError as error:
                raise RefusedError(_unreadable(str(name), settings, error)) from None
        try:
            made.load_cert_chain(str(certificate), key, password)
        except OSError as error:  # SSLError is one
            why = getattr(error, "reason", None) or error
            raise RefusedError(
                f"the client certificate cannot be used ({why}). Does "
                f"config[{settings.certificate!r}] hold a certificate and "
                f"config[{settings.key!r}] its key, both as PEM, and does "
                "config['ssl.key.password'] open it?"
            ) from None


def _pem(name: str, settings: KafkaSettings) -> str | None:
    """Inline PEM as ASCII, which is all that Python accepts; comments may hold other characters."""
    text = settings.text(name)
    return None if text is None else text.encode("ascii", "ignore").decode()


def _unreadable(name: str, settings: KafkaSettings, error: OSError) -> str:
    shown = "" if name.endswith(".pem") else f"={settings.text(name)!r}"
    why = error.reason if isinstance(error, ssl.SSLError) else error.strerror
    return f"config[{name!r}]{shown} cannot be read: {why or error}"


class Draining(socket.socket):
    """Delivers the bytes that have arrived before it reports that the peer has closed.

    kafka-python reads until nothing is left, and drops all of it if it meets the end of the stream.
    A broker closes the connection right after it has sent "wrong password".
    """

    _nothing_yet: ClassVar[type[OSError]] = BlockingIOError
    _has_read = False

    def recv(self, *args: Any, **kwargs: Any) -> bytes:
        data = super().recv(*args, **kwargs)
        if not data and self._has_read:
            self._has_read = False
            raise self._nothing_yet
        self._has_read = bool(data)
        return data


class TlsSocket(Draining, ssl.SSLSocket):
    """Drains, and closes itself when its handshake fails or gets no response in time.

    kafka-python only waits until the socket is readable. When a handshake is late, the socket is
    shut down, which makes it readable.
    """

    _nothing_yet = ssl.SSLWantReadError
    _timer: threading.Timer | None = None
    _is_late = False

    def do_handshake(self, *args: Any, **kwargs: Any) -> None:
        try:
            if self._is_late:
                raise TimeoutError(f"no response to TLS within {HANDSHAKE_S:g} s")
            super().do_handshake(*args, **kwargs)
        except _WANTS:
            if self._timer is None:
                self._timer = threading.Timer(HANDSHAKE_S, self._shut_down)
                self._timer.daemon = True
                self._timer.start()
            raise
        except OSError:
            self.close()
            raise
        if self._timer is not None:
            self._timer.cancel()

    def _shut_down(self) -> None:
        self._is_late = True
        with suppress(OSError):  # it is closed already
            socket.socket.shutdown(self, socket.SHUT_RDWR)

    def __del__(self) -> None:
        self.close()  # kafka-python only drops the socket of a client closed during a handshake
