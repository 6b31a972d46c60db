"""One set of security settings, as librdkafka and kafka-python get it, without a broker."""

from __future__ import annotations

import datetime as dt
import functools
import logging
import pickle
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from kafka import errors
from kafka.protocol.parser import KafkaProtocol
from kafka.protocol.sasl import SaslAuthenticateRequest
from pyspark import cloudpickle

from sparkonce.errors import ConfigurationError
from sparkonce.sinks import KafkaSink
from sparkonce.sinks.kafka.connecting import client, connection
from sparkonce.sinks.kafka.connecting.access import refusal
from sparkonce.sinks.kafka.connecting.oauth import TokenCallback, TokenProvider, fetch
from sparkonce.sinks.kafka.connecting.refused import RefusedError, missing_right
from sparkonce.sinks.kafka.connecting.settings import KafkaSettings
from sparkonce.sinks.kafka.connecting.tls import Draining, context
from tests.support.kafka_settings import SASL

OAUTH = {"security.protocol": "SASL_SSL", "sasl.mechanisms": "OAUTHBEARER"}
NEXT_YEAR = dt.datetime.now(dt.UTC).timestamp() + 365 * 24 * 3600


def token(argument: str | None) -> tuple[str, float]:
    return f"token of {argument}", NEXT_YEAR


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize("mechanism", [None, "GSSAPI"])
def test_sasl_mechanism_that_the_driver_cannot_speak(mechanism: str | None) -> None:
    """Refused, naming the supported ones; librdkafka's default is refused as well."""
    config = {"security.protocol": "SASL_PLAINTEXT"}
    if mechanism is not None:
        config["sasl.mechanisms"] = mechanism
    with pytest.raises(ConfigurationError, match="SCRAM-SHA-256"):
        KafkaSettings("localhost:9092", config)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**SASL, "sasl.password": ""}, ["sasl.password", "SCRAM-SHA-512 needs it"]),
        ({k: v for k, v in SASL.items() if k != "sasl.username"}, ["sasl.username"]),
        (OAUTH, ["OAUTHBEARER", "oauth_cb"]),
        ({**OAUTH, "oauth_cb": "a.token"}, ["oauth_cb", "function"]),
        ({**OAUTH, "sasl.oauthbearer.method": "oidc"}, ["sasl.oauthbearer.method", "oauth_cb"]),
        ({**OAUTH, "sasl.oauthbearer.token.endpoint.url": "https://x"}, ["endpoint", "oauth_cb"]),
        ({**SASL, "oauth_cb": token}, ["SCRAM-SHA-512", "oauth_cb"]),
        ({"security.protocol": "SSL", "oauth_cb": token}, ["oauth_cb", "SASL_SSL"]),
        ({"ssl.certificate.location": "/c"}, ["ssl.certificate.location", "ssl.key.location"]),
        ({"ssl.key.pem": "k3y"}, ["ssl.certificate.location", "ssl.key.location"]),
        ({"ssl.keystore.location": "/k"}, ["ssl.keystore.location", "ssl.key.location"]),
        (
            {"enable.ssl.certificate.verification": False},
            ["enable.ssl.certificate.verification", "ssl.ca.location"],
        ),
    ],
)
def test_security_settings_that_do_not_fit(config: dict[str, object], words: list[str]) -> None:
    """Refused in the constructor, naming the setting and the next step, and no secret."""
    with pytest.raises(ConfigurationError) as refused:
        KafkaSink("orders", bootstrap_servers="a:1", config=config)
    assert all(word in str(refused.value) for word in words)
    assert not any(secret in str(refused.value) for secret in ("hunter2", "letmein", "k3y"))


def test_callback_that_cannot_travel() -> None:
    """A token function that does not pickle is refused before any task needs it."""
    lock = threading.Lock()

    def locked(argument: str | None) -> tuple[str, float]:
        with lock:
            return token(argument)

    with pytest.raises(ConfigurationError, match=r"oauth_cb.*cannot travel.*lock"):
        KafkaSettings("a:1", {**OAUTH, "oauth_cb": locked})


def test_callback_travels_as_spark_sends_it() -> None:
    """It travels with the sink, even a lambda or a partial, and both clients can call it there."""
    for callback in (token, functools.partial(lambda _, a: token(a), 1), lambda a: (*token(a),)):
        sink = KafkaSink(
            "orders",
            bootstrap_servers="a:1",
            config={**OAUTH, "oauth_cb": callback, "sasl.oauthbearer.config": "scope=s"},
        )
        there = pickle.loads(cloudpickle.dumps(sink))._settings  # noqa: S301 - our own bytes
        called: Any = there.for_producer("id", 1, None)["oauth_cb"]
        told = called("scope=s")
        assert (told.text, told.expires_at) == ("token of scope=s", NEXT_YEAR)
        assert there.for_admin()["sasl_oauth_token_provider"].token() == "token of scope=s"


# -- what each client gets -------------------------------------------------------------------------


def test_both_clients_get_the_same_security() -> None:
    """librdkafka's names are mapped to kafka-python's, which never shows the passwords."""
    settings = KafkaSettings("a:1,b:2", SASL)
    admin = settings.for_admin()
    assert admin == {
        "bootstrap_servers": ["a:1", "b:2"],
        "security_protocol": "SASL_SSL",
        "sasl_mechanism": "SCRAM-SHA-512",
        "sasl_plain_username": "writer",
        "sasl_plain_password": "hunter2",
    }
    assert "hunter2" not in repr(admin)
    producer = settings.for_producer("id", 900_000, None)
    assert producer["sasl.password"] == "hunter2"
    assert producer["sasl.mechanisms"] == "SCRAM-SHA-512"
    assert producer["ssl.key.password"] == "letmein"


def test_no_security_unless_asked_for() -> None:
    assert KafkaSettings("a:1").for_admin() == {
        "bootstrap_servers": ["a:1"],
        "security_protocol": "PLAINTEXT",
    }


# -- tokens ----------------------------------------------------------------------------------------


def test_token_is_kept_for_most_of_its_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token serves many connections; at four fifths of its life the next one is fetched."""
    now, calls = [1000.0], []

    def counted(argument: str | None) -> tuple[str, float, str, dict[str, str]]:
        calls.append(argument)
        return f"token {len(calls)}", now[0] + 100, "writer", {"tenant": f"{len(calls)}"}

    monkeypatch.setattr(time, "time", lambda: now[0])
    provider = TokenProvider(counted, "a=b")
    seen = []
    for passed in (0, 79, 2):
        now[0] += passed
        seen.append((provider.token(), provider.extensions()))
    assert seen == [
        ("token 1", {"tenant": "1"}),
        ("token 1", {"tenant": "1"}),
        ("token 2", {"tenant": "2"}),
    ]
    assert calls == ["a=b", "a=b"]


def test_token_is_renewed_though_the_clock_was_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Brokers refuse an expired token, whatever the clock of this machine says."""
    clock, steady, calls = [100_000.0], [50.0], []

    def counted(_: str | None) -> tuple[str, float]:
        calls.append(clock[0])
        return f"token {len(calls)}", clock[0] + 100

    monkeypatch.setattr(time, "time", lambda: clock[0])
    monkeypatch.setattr(time, "monotonic", lambda: steady[0])
    provider = TokenProvider(counted, None)
    assert provider.token() == "token 1"
    clock[0] -= 86_400
    steady[0] += 79
    assert provider.token() == "token 1"
    steady[0] += 2
    assert provider.token() == "token 2"


def leaking(_: str | None) -> tuple[str, float]:
    raise ValueError("client_secret=hunter2")


@pytest.mark.parametrize(
    ("callback", "words"),
    [
        (leaking, ["ValueError", "test_settings.py, line", "manually"]),
        (lambda _: None, ["NoneType", "(token, expiry"]),
        (lambda _: "hunter2", ["str", "(token, expiry"]),
        (lambda _: (b"hunter2", NEXT_YEAR), ["tuple", "(token, expiry"]),
        (lambda _: ("hunter2", "tomorrow"), ["tuple", "(token, expiry"]),
        (lambda _: ("hunter2é", NEXT_YEAR), ["tuple", "(token, expiry"]),
        (lambda _: ("hunter2", NEXT_YEAR, "", {"tenant": "\ud800"}), ["tuple", "(token, expiry"]),
        (lambda _: ("hunter2", float("nan")), ["expired", "Unix seconds"]),
        (lambda _: ("hunter2", 3600), ["expired", "Unix seconds"]),
        (lambda _: ("hunter2", NEXT_YEAR * 1000), ["not milliseconds"]),  # as Amazon MSK's signer
    ],
)
def test_callback_that_gives_no_token(callback: Any, words: list[str]) -> None:
    """The error reports what it did, never its message; librdkafka's callback keeps the reason."""
    with pytest.raises(RefusedError) as refused:
        fetch(callback, None)
    assert all(word in str(refused.value) for word in words)
    assert "hunter2" not in str(refused.value)
    assert refused.value.__context__ is None or refused.value.__suppress_context__
    kept = TokenCallback(callback)
    with pytest.raises(RefusedError):
        kept(None)
    assert kept.failure == str(refused.value)


def test_token_is_not_shown() -> None:
    assert "token of" not in repr(fetch(token, None))


# -- TLS -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def files(authority: trustme.CA, tmp_path: Path) -> dict[str, str]:
    """Certificates in files, by their settings."""
    issued = authority.issue_cert("127.0.0.1", "client@example.org")
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    issued.cert_chain_pems[0].write_to_path(str(tmp_path / "client.pem"))
    issued.private_key_pem.write_to_path(str(tmp_path / "client.key"))
    return {
        "ssl.ca.location": str(tmp_path / "ca.pem"),
        "ssl.certificate.location": str(tmp_path / "client.pem"),
        "ssl.key.location": str(tmp_path / "client.key"),
    }


def tls(config: Mapping[str, object]) -> KafkaSettings:
    return KafkaSettings("a:1", {"security.protocol": "SSL", **config})


def inline(files: Mapping[str, str]) -> dict[str, str]:
    return {n.replace("location", "pem"): Path(f).read_text() for n, f in files.items()}


def shakes_hands(
    ours: ssl.SSLContext, authority: trustme.CA, certificate: trustme.LeafCert | None = None
) -> str:
    """The subject of the client certificate that a server received."""
    theirs = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    theirs.verify_mode = ssl.CERT_REQUIRED
    authority.configure_trust(theirs)
    (certificate or authority.issue_cert("127.0.0.1")).configure_cert(theirs)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = theirs.wrap_bio(to_server, to_client, server_side=True)
    mine = ours.wrap_bio(to_client, to_server, server_hostname="127.0.0.1")
    for side in (mine, server, mine, server):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
    names: Any = (server.getpeercert() or {}).get("subjectAltName", ())
    return dict(names).get("email", "nobody")


def test_client_certificate_from_files_and_inline(
    authority: trustme.CA, files: dict[str, str], tmp_path: Path
) -> None:
    """Both ways lead to the same handshake, and inline keys leave no file behind."""
    assert shakes_hands(context(tls(files)), authority) == "client@example.org"
    before = set(Path(tmp_path).iterdir())
    assert shakes_hands(context(tls(inline(files))), authority) == "client@example.org"
    assert set(Path(tmp_path).iterdir()) == before


def test_comments_of_inline_certificates_have_any_letters(
    authority: trustme.CA, files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every encoding of the locale, although Python's `ssl` accepts only ASCII."""
    write = Path.write_text
    monkeypatch.setattr(
        Path, "write_text", lambda path, text, code="ascii": write(path, text, code)
    )
    commented = {name: f"# Zürich, 東京\n{text}" for name, text in inline(files).items()}
    assert shakes_hands(context(tls(commented)), authority) == "client@example.org"


def test_broker_whose_certificate_is_revoked(
    authority: trustme.CA, files: dict[str, str], tmp_path: Path
) -> None:
    """`ssl.crl.location` lists it: refused, naming the setting. Other brokers connect."""
    revoked = authority.issue_cert("127.0.0.1")
    number = x509.load_pem_x509_certificate(revoked.cert_chain_pems[0].bytes()).serial_number
    issuer = x509.load_pem_x509_certificate(authority.cert_pem.bytes()).subject
    now = dt.datetime.now(dt.UTC)
    entry = x509.RevokedCertificateBuilder().serial_number(number).revocation_date(now).build()
    unsigned = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(issuer)
        .last_update(now - dt.timedelta(days=1))
        .next_update(now + dt.timedelta(days=1))
        .add_revoked_certificate(entry)
    )
    key: Any = load_pem_private_key(authority.private_key_pem.bytes(), None)
    listed = tmp_path / "revoked.pem"
    listed.write_bytes(unsigned.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM))
    settings = tls({**files, "ssl.crl.location": str(listed)})
    assert shakes_hands(context(settings), authority) == "client@example.org"
    with pytest.raises(ssl.SSLCertVerificationError) as error:
        shakes_hands(context(settings), authority, revoked)
    assert "ssl.crl.location" in str(refusal(error.value, settings))


def test_check_of_the_hosts_name(files: dict[str, str]) -> None:
    """On by default, as with librdkafka; the chain is checked in either case."""
    for value, expected in ((None, True), ("https", True), ("none", False)):
        name = "ssl.endpoint.identification.algorithm"
        made = context(tls({**files, **({} if value is None else {name: value})}))
        assert (made.check_hostname, made.verify_mode) == (expected, ssl.CERT_REQUIRED)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ssl.ca.location": "/none.pem"}, ["ssl.ca.location", "/none.pem", "No such file"]),
        ({"ssl.crl.location": "/none.crl"}, ["ssl.crl.location", "/none.crl"]),
        ({"ssl.certificate.location": "/none"}, ["ssl.certificate.location'", "/none"]),
        ({"ssl.key.location": "/none"}, ["config['ssl.key.location']='/none'", "No such file"]),
        ({"ssl.key.location": "ssl.ca.location"}, ["ssl.key.location", "PEM"]),
        ({"ssl.ca.pem": "hunter2"}, ["ssl.ca.pem", "certificate"]),
        ({"ssl.key.pem": "hunter2"}, ["ssl.key.pem", "PEM"]),
    ],
)
def test_certificate_that_cannot_be_used(
    files: dict[str, str], change: dict[str, str], words: list[str]
) -> None:
    """The message names the setting and the file, and shows no inline text."""
    with pytest.raises(RefusedError) as refused:
        context(tls({**files, **{n: files.get(v, v) for n, v in change.items()}}))
    assert all(word in str(refused.value) for word in words)
    assert "hunter2" not in str(refused.value)


# -- texts of refusals -----------------------------------------------------------------------------


def test_refusal_is_found_in_what_kafka_python_wraps() -> None:
    """As an argument and as the context; a lost connection is no refusal, so it is retried."""
    alert = ssl.SSLError(1, "alert")
    alert.reason = "TLSV13_ALERT_CERTIFICATE_REQUIRED"
    wrapped = errors.KafkaConnectionError(alert)
    assert "client certificate" in str(refusal(wrapped, tls({})))
    handled = errors.KafkaConnectionError("Handshake failed")
    handled.__context__ = alert
    assert "client certificate" in str(refusal(handled, tls({})))
    assert refusal(errors.KafkaConnectionError("socket disconnected"), tls({})) is None
    assert refusal(OSError("no route"), tls({})) is None


def test_refusal_shows_no_secret() -> None:
    """Even if a broker repeats the password."""
    said = errors.SaslAuthenticationFailedError("no user writer with hunter2")
    assert "hunter2" not in str(refusal(said, KafkaSettings("a:1", SASL)))


def test_every_missing_right_has_its_name() -> None:
    assert "sparkonce." in str(missing_right(errors.GroupAuthorizationFailedError()))
    assert "Write on trans" in str(missing_right(errors.TransactionalIdAuthorizationFailedError()))
    assert "ClusterAction" in str(missing_right(errors.ClusterAuthorizationFailedError()))
    assert missing_right(errors.UnknownError()) is None


# -- kafka-python's habits -------------------------------------------------------------------------


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, Draining]]:
    theirs, ours = socket.socketpair()
    draining = Draining(ours.family, ours.type, ours.proto, fileno=ours.detach())
    draining.setblocking(False)
    with closing(theirs), closing(draining):
        yield theirs, draining


def test_last_words_are_read_before_the_end(pair: tuple[socket.socket, Draining]) -> None:
    """A broker sends "wrong password" and closes: its text arrives before the end of the stream."""
    theirs, ours = pair
    theirs.sendall(b"wrong password")
    theirs.close()
    assert ours.recv(4096) == b"wrong password"
    with pytest.raises(BlockingIOError):
        ours.recv(4096)
    assert ours.recv(4096) == b""


@pytest.mark.parametrize("others", [[], ["127.0.0.1:1"]], ids=["alone", "beside one that refuses"])
def test_broker_that_takes_a_connection_and_says_nothing(
    others: list[str], files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A question fails with that reason; kafka-python itself would wait for TLS forever."""
    monkeypatch.setattr("sparkonce.sinks.kafka.connecting.tls.HANDSHAKE_S", 0.1)
    monkeypatch.setattr(client, "REQUEST_TIMEOUT_MS", 500)
    raised: list[BaseException] = []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        settings = KafkaSettings(
            ",".join([address, *others]), {"security.protocol": "SSL", **files}
        )
        opened = connection.Connection(settings)

        def ask() -> None:
            with pytest.raises(errors.KafkaTimeoutError) as late:
                opened.ask(connection.refresh)
            raised.append(late.value)

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(30)
        assert raised, "it hangs"
        assert others or "no response to TLS" in str(raised[0])
        opened.close()


def test_passwords_stay_out_of_the_debug_log(caplog: pytest.LogCaptureFixture) -> None:
    """kafka-python's debug log shows requests and their bytes, except those of SASL."""
    caplog.set_level(logging.DEBUG, "kafka")
    with pytest.raises(errors.KafkaError):
        client.connect(KafkaSettings("127.0.0.1:1"), 10)  # no broker, since only the filters matter
    caplog.clear()
    protocol = KafkaProtocol(client_id="c", ident="i")
    request = SaslAuthenticateRequest(b"\0writer\0hunter2", version=1)
    protocol.send_request(request, correlation_id=1)
    protocol.send_bytes()
    logging.getLogger("kafka.net.connection").debug("%s Request %d: %s", "c", 1, request)
    logging.getLogger("kafka.net.connection").debug("%s Request %d: %s", "c", 2, "Metadata")
    assert "Metadata" in caplog.text
    assert "hunter2" not in caplog.text
