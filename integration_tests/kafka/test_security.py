"""The Kafka sink on a broker with TLS, SASL and an authorizer that denies what is not allowed.

PLAINTEXT   for the brokers, and for the test as the super user
MTLS        TLS with a client certificate, whose CN is the user
OTHERNAME   TLS with a certificate for another host
SASL        TLS with PLAIN, SCRAM and OAUTHBEARER
"""

from __future__ import annotations

import base64
import functools
import itertools
import json
import logging
import os
import pickle
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import trustme
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    NewTopic,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from cryptography.hazmat.primitives import serialization as pem
from kafka import errors
from pyspark import cloudpickle

from integration_tests.support.kafka import DEADLINE_S, ROWS, VALUE, World, eventually, prepare
from sparkonce.errors import (
    CommitUnresolvedError,
    ConfigurationError,
    PrepareRejectedError,
    SinkError,
    SinkUnavailableError,
)
from sparkonce.model import BranchId, Committable, Owner
from sparkonce.sinks import KafkaSink
from sparkonce.sinks.kafka.connecting import oauth
from sparkonce.sinks.kafka.finishing.partitions import home_partition
from sparkonce.testing.services import KafkaServer, start_services, unavailable
from sparkonce.testing.services.server import LocalRuntime

Config = dict[str, Any]

DOCS = Path(__file__).parents[2] / "docs" / "howto" / "kafka-security.md"
PASSWORDS = {name: f"pa55-for-{name}" for name in ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")}
"""Each mechanism has its own, so that none works for another."""

KEY_PASSWORD = "pa55-of-the-key"
ODD_NAME = "team=a,b"
"""SCRAM escapes such a name."""

LISTENERS = {"MTLS": "SSL", "OTHERNAME": "SSL", "SASL": "SASL_SSL"}
KAFKA_MODULE = "org.apache.kafka.common.security"
MECHANISMS = {
    "plain": f"plain.PlainLoginModule required user_writer='{PASSWORDS['PLAIN']}'",
    "scram-sha-256": "scram.ScramLoginModule required",
    "scram-sha-512": "scram.ScramLoginModule required",
    "oauthbearer": "oauthbearer.OAuthBearerLoginModule required unsecuredLoginStringClaim_sub=x",
}
MAX_TIMEOUT_MS = 1_000_000
"""Longer than Kafka's default, which shows whether a client may read it."""

SESSION_S = 4
"""How long the broker keeps a connection without a new token."""


def token_for(user: str, argument: str | None, life_s: float = 600) -> tuple[str, float]:
    """A token that the test broker accepts, although it is unsigned."""

    def part(claims: Mapping[str, object]) -> str:
        return base64.urlsafe_b64encode(json.dumps(claims).encode()).rstrip(b"=").decode()

    now = time.time()
    claims = {"sub": user, "iat": now, "exp": now + life_s, "scope": str(argument)}
    return f"{part({'alg': 'none'})}.{part(claims)}.", now + life_s


class Keys:
    """Certificates of two authorities; the brokers trust only the first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ours, self.theirs = trustme.CA(), trustme.CA()
        self.ca = self._write("ca.pem", self.ours.cert_pem.bytes())
        self.other_ca = self._write("other.pem", self.theirs.cert_pem.bytes())

    def key_store(self, host: str) -> str:
        certificate, key = self.issue(host)
        return self._write(f"{host}.pem", key + certificate)

    def issue(
        self, *hosts: str, user: str | None = None, authority: trustme.CA | None = None
    ) -> tuple[bytes, bytes]:
        """Certificate and key, as PEM."""
        issued = (authority or self.ours).issue_cert(*hosts, common_name=user)
        certificate = b"".join(blob.bytes() for blob in issued.cert_chain_pems)
        return certificate, _rewritten(issued.private_key_pem.bytes(), pem.NoEncryption())

    def client(self, user: str, *, authority: trustme.CA | None = None) -> Config:
        """The settings of a client certificate, in files; its key has a password."""
        certificate, key = self.issue("a@example.org", user=user, authority=authority)
        locked = _rewritten(key, pem.BestAvailableEncryption(KEY_PASSWORD.encode()))
        return {
            "security.protocol": "SSL",
            "ssl.ca.location": self.ca,
            "ssl.certificate.location": self._write(f"{user}.crt", certificate),
            "ssl.key.location": self._write(f"{user}.key", locked),
            "ssl.key.password": KEY_PASSWORD,
        }

    def inline(self, user: str) -> Config:
        """The same, as text."""
        certificate, key = self.issue("a@example.org", user=user)
        return {
            "security.protocol": "SSL",
            "ssl.ca.pem": Path(self.ca).read_text(),
            "ssl.certificate.pem": certificate.decode(),
            "ssl.key.pem": key.decode(),
        }

    def _write(self, name: str, content: bytes) -> str:
        path = self.folder / name
        path.write_bytes(content)
        return str(path)


def _rewritten(key: bytes, encryption: pem.KeySerializationEncryption) -> bytes:
    """As PKCS 8, which is what Java reads."""
    loaded = pem.load_pem_private_key(key, None)
    return loaded.private_bytes(pem.Encoding.PEM, pem.PrivateFormat.PKCS8, encryption)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys(tmp_path_factory.mktemp("keys"))


def broker_config(keys: Keys) -> dict[str, str]:
    sasl = "listener.name.sasl"
    return {
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS",  # clients on PLAINTEXT
        "allow.everyone.if.no.acl.found": "false",
        "transaction.max.timeout.ms": str(MAX_TIMEOUT_MS),
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": keys.key_store("127.0.0.1"),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": keys.ca,
        "listener.name.mtls.ssl.client.auth": "required",
        "listener.name.mtls.ssl.principal.mapping.rules": "RULE:^CN=([^,]*),.*$/$1/,DEFAULT",
        "listener.name.othername.ssl.keystore.type": "PEM",
        "listener.name.othername.ssl.keystore.location": keys.key_store("localhost"),
        f"{sasl}.sasl.enabled.mechanisms": ",".join(MECHANISMS).upper(),
        **{
            f"{sasl}.{name}.sasl.jaas.config": f"{KAFKA_MODULE}.{module};"
            for name, module in MECHANISMS.items()
        },
        f"{sasl}.oauthbearer.connections.max.reauth.ms": str(SESSION_S * 1000),
    }


@pytest.fixture(scope="module")
def kafka(keys: Keys) -> Iterator[KafkaServer]:
    """Replaces the other tests' broker. Its certificates are files, so it is a local process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARKONCE_SERVICES", "local")
        if "kafka" in unavailable():
            pytest.skip(f"kafka: {unavailable()['kafka']}")
        services = start_services(
            ["kafka"], kafka_config=broker_config(keys), kafka_listeners=LISTENERS
        )
    with services:
        admin = AdminClient({"bootstrap.servers": services.kafka.bootstrap_servers})
        for mechanism in (ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512):
            secret = PASSWORDS[mechanism.name.replace("_", "-")].encode()
            info = ScramCredentialInfo(mechanism, 4096)
            for name in ("writer", ODD_NAME):
                user = UserScramCredentialUpsertion(name, info, secret)
                admin.alter_user_scram_credentials([user])[name].result(timeout=30)
        yield services.kafka


# -- rights ----------------------------------------------------------------------------------------

KINDS = {
    "--topic": ResourceType.TOPIC,
    "--group": ResourceType.GROUP,
    "--transactional-id": ResourceType.TRANSACTIONAL_ID,
}


@dataclass(frozen=True)
class Right:
    kind: ResourceType
    name: str
    pattern: ResourcePatternType
    operation: AclOperation

    @property
    def words(self) -> str:
        """A pattern for errors about it."""
        names = {ResourceType.TOPIC: "the topic", ResourceType.GROUP: "groups"}
        return f"{self.operation.name.title()}.* on {names.get(self.kind, 'transactional ids')}"

    def binding(self, user: str, topic: str) -> AclBinding:
        name = topic if self.name == "orders" else self.name
        who = (f"User:{user}", "*", self.operation, AclPermissionType.ALLOW)
        return AclBinding(self.kind, name, self.pattern, *who)


def documented_rights() -> list[Right]:
    """The rights that the commands in docs/howto/kafka-security.md allow."""
    found = []
    for line in re.findall(r"^kafka-acls\.sh --add .*$", DOCS.read_text(), re.MULTILINE):
        words = shlex.split(line)
        (option,) = KINDS.keys() & set(words)
        prefixed = "prefixed" in words
        found += [
            Right(
                KINDS[option],
                words[words.index(option) + 1],
                ResourcePatternType.PREFIXED if prefixed else ResourcePatternType.LITERAL,
                AclOperation[operation.upper()],
            )
            for flag, operation in itertools.pairwise(words)
            if flag == "--operation"
        ]
    return found


RIGHTS = documented_rights()
CLUSTER = Right(
    ResourceType.BROKER, "kafka-cluster", ResourcePatternType.LITERAL, AclOperation.CLUSTER_ACTION
)
OFFSETS, STATE = (
    Right(ResourceType.TOPIC, name, ResourcePatternType.LITERAL, AclOperation.DESCRIBE)
    for name in ("__consumer_offsets", "__transaction_state")
)


class Rights:
    """Gives rights to a user and takes them away; returns when the broker has applied it."""

    def __init__(self, server: KafkaServer, topic: str) -> None:
        self._admin = AdminClient({"bootstrap.servers": server.bootstrap_servers})
        self._topic = topic

    def give(self, user: str, rights: Sequence[Right]) -> None:
        bindings = [right.binding(user, self._topic) for right in rights]
        for future in self._admin.create_acls(bindings).values():
            future.result(timeout=30)
        eventually(lambda: set(bindings) <= self._held(user), "rights given")

    def take(self, user: str, right: Right) -> None:
        binding = right.binding(user, self._topic)
        exactly = AclBindingFilter(*binding._to_tuple())
        for future in self._admin.delete_acls([exactly]).values():
            future.result(timeout=30)
        eventually(lambda: binding not in self._held(user), "right taken")

    def _held(self, user: str) -> set[AclBinding]:
        of_user = AclBindingFilter(
            ResourceType.ANY,
            None,
            ResourcePatternType.ANY,
            f"User:{user}",
            None,
            AclOperation.ANY,
            AclPermissionType.ANY,
        )
        return set(self._admin.describe_acls(of_user).result(timeout=30))


@pytest.fixture
def topic(kafka: KafkaServer, fresh_name: Callable[[], str]) -> str:
    name = fresh_name()
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    admin.create_topics([NewTopic(name, 2, 1)])[name].result(timeout=30)
    return name


@pytest.fixture
def rights(kafka: KafkaServer, topic: str) -> Rights:
    return Rights(kafka, topic)


@pytest.fixture
def make_sink(kafka: KafkaServer, topic: str) -> Iterator[Callable[..., KafkaSink]]:
    """`make_sink(listener, config)`, closed at the end of the test."""
    made: list[KafkaSink] = []

    def make(listener: str, config: Config, **settings: Any) -> KafkaSink:
        address = kafka.listeners.get(listener, kafka.bootstrap_servers)
        made.append(KafkaSink(topic, bootstrap_servers=address, config=config, **settings))
        return made[-1]

    yield make
    for sink in made:
        sink.close()


def whole_life(sink: KafkaSink, owner: Owner, world: World) -> None:
    """Call every verb, on an executor's copy of the sink and on the driver's, and check each.

    At the end the rows 1, 2 and 3 are committed three times.
    """
    sink.validate(VALUE)
    there = pickle.loads(cloudpickle.dumps(sink))  # noqa: S301 - our own bytes
    names = [BranchId(owner, 7, 1, "kafka", 0, task) for task in range(6)]
    held = [prepare(there, name, ROWS) for name in names[:5]]
    there.discard(there.beginTransaction(names[5]))
    assert world.values() == []
    found = {c.branch_id.name: c for c in sink.find_branches(owner)}
    assert set(found) == {name.name for name in names[:5]}
    sink.abort(names[3])
    sink.abort(found[names[4].name])
    sink.commit(held[0])
    world.sees("1", "2", "3")
    assert sink.commit_many(held[1:3]) == [None, None]
    world.sees(*"111222333")
    sink.commit(held[0])
    assert list(sink.find_branches(owner)) == []
    assert [world.state(name) for name in names[3:5]] == ["CompleteAbort", "CompleteAbort"]
    there.close()


# -- ways in ---------------------------------------------------------------------------------------


def sasl(keys: Keys, mechanism: str, **more: Any) -> Config:
    return {
        "security.protocol": "SASL_SSL",
        "ssl.ca.location": keys.ca,
        "sasl.mechanisms": mechanism,
        **more,
    }


def password(keys: Keys, mechanism: str, secret: str | None = None) -> Config:
    secret = secret or PASSWORDS[mechanism]
    return {**sasl(keys, mechanism), "sasl.username": "writer", "sasl.password": secret}


WAYS_IN: Mapping[str, tuple[str, Callable[[Keys], Config]]] = {
    "PLAIN": ("SASL", lambda keys: password(keys, "PLAIN")),
    "SCRAM-SHA-256": ("SASL", lambda keys: password(keys, "SCRAM-SHA-256")),
    "SCRAM-SHA-512": ("SASL", lambda keys: password(keys, "SCRAM-SHA-512")),
    "OAUTHBEARER": (
        "SASL",
        lambda keys: sasl(keys, "OAUTHBEARER", oauth_cb=functools.partial(token_for, "writer")),
    ),
    "mTLS": ("MTLS", lambda keys: keys.client("writer")),
    "mTLS inline": ("MTLS", lambda keys: keys.inline("writer")),
}


@pytest.mark.parametrize("way", WAYS_IN)
def test_whole_life_by_every_way_in(
    way: str,
    keys: Keys,
    make_sink: Callable[..., KafkaSink],
    rights: Rights,
    owner: Owner,
    world: World,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One set of settings lets both clients in; rows are visible once, and no secret is shown."""
    caplog.set_level(logging.DEBUG)
    listener, config = WAYS_IN[way]
    rights.give("writer", RIGHTS)
    sink = make_sink(listener, config(keys))
    whole_life(sink, owner, world)
    shown = f"{caplog.text} {sink!r} {vars(sink)!r}"
    assert "Request" in caplog.text  # kafka-python has logged
    for secret in ("pa55", "PRIVATE KEY", token_for("writer", None)[0][:50]):
        assert secret not in shown


def test_name_that_scram_must_escape(
    keys: Keys, make_sink: Callable[..., KafkaSink], rights: Rights
) -> None:
    """Both clients escape it."""
    rights.give(ODD_NAME, RIGHTS)
    config = {**password(keys, "SCRAM-SHA-256"), "sasl.username": ODD_NAME}
    make_sink("SASL", config).validate(VALUE)


def test_executor_in_another_process_calls_the_token_function(
    keys: Keys,
    make_sink: Callable[..., KafkaSink],
    rights: Rights,
    owner: Owner,
    world: World,
) -> None:
    """It travels with the sink, by value if the other process does not have its module."""
    rights.give("writer", RIGHTS)
    source = Path(__file__).read_text()
    code = source[source.index("def token_for") : source.index("class Keys")]
    script: dict[str, Any] = {"__name__": "__main__", **vars(oauth), "base64": base64, "json": json}
    exec(f"from __future__ import annotations\n{code}", script)  # noqa: S102 - a driver's script
    callback = functools.partial(script["token_for"], "writer")
    sink = make_sink("SASL", sasl(keys, "OAUTHBEARER", oauth_cb=callback))
    sink.validate(VALUE)
    branch = BranchId(owner, 7, 1, "kafka", 0, 0)
    task = (
        "import sys, pickle, json; sink, branch, rows = pickle.loads(sys.stdin.buffer.read());"
        "handle = sink.beginTransaction(branch); sink.write(handle, rows);"
        "print(json.dumps(sink.preCommit(handle).to_json()))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", task],
        input=cloudpickle.dumps((sink, branch, ROWS)),
        stdout=subprocess.PIPE,
        check=True,
        timeout=60,
    )
    sink.commit(Committable.from_json(json.loads(answer.stdout)))
    world.sees("1", "2", "3")


def test_tokens_shorter_than_a_task_and_a_driver(
    keys: Keys,
    make_sink: Callable[..., KafkaSink],
    rights: Rights,
    owner: Owner,
    world: World,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Both clients renew their tokens in time, on open connections."""
    rights.give("writer", RIGHTS)
    driver: list[float] = []
    task: list[float] = []

    def short(argument: str | None) -> tuple[str, float]:
        on_driver = threading.current_thread().name.startswith("kafka-io")
        (driver if on_driver else task).append(time.time())
        return token_for("writer", argument, life_s=SESSION_S)

    sink = make_sink("SASL", sasl(keys, "OAUTHBEARER", oauth_cb=short))
    sink.validate(VALUE)
    caplog.set_level(logging.DEBUG, "kafka.net.connection")
    handle = sink.beginTransaction(BranchId(owner, 7, 1, "kafka", 0, 0))
    row, rows = ROWS.slice(0, 1), 0
    task_begins, driver_begins = len(task), len(driver)

    def renewed() -> bool:
        nonlocal rows
        sink.write(handle, row)
        rows += 1
        assert sink._finisher.cluster_id()
        return len(task) >= task_begins + 2 and len(driver) >= driver_begins + 2

    eventually(renewed, "two more tokens for each client")
    committable = sink.preCommit(handle)
    sink.commit(committable)
    world.sees(*["1"] * rows)
    assert "Beginning SASL re-authentication" in caplog.text
    assert "Connection lost" not in caplog.text


# -- refused ---------------------------------------------------------------------------------------


def refused(sink: KafkaSink, *words: str) -> None:
    """Check that `validate` refuses it before its patience ends, with these words and no secret."""
    with pytest.raises(ConfigurationError) as error:
        sink.validate(VALUE)
    assert "no response" not in str(error.value)  # the error at the end of its patience
    assert all(re.search(word, str(error.value)) for word in words), error.value
    for secret in ("pa55", "wrong-", "PRIVATE KEY"):
        assert secret not in str(error.value)


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_wrong_password(mechanism: str, keys: Keys, make_sink: Callable[..., KafkaSink]) -> None:
    """Refused quickly, naming user, mechanism and setting."""
    sink = make_sink("SASL", password(keys, mechanism, "wrong-password"))
    refused(sink, "'writer'", mechanism, r"config\['sasl\.password'\]")
    assert not [t for t in threading.enumerate() if t.name.startswith("kafka-io-sparkonce")]


def test_password_that_stops_working_before_the_commit(
    kafka: KafkaServer,
    keys: Keys,
    make_sink: Callable[..., KafkaSink],
    rights: Rights,
    owner: Owner,
    world: World,
) -> None:
    """The commit is unresolved, never lost, and names the user; the old password makes it land."""
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    info = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096)
    secret = PASSWORDS["SCRAM-SHA-512"].encode()
    given = UserScramCredentialUpsertion("rotated", info, secret)
    other = UserScramCredentialUpsertion("rotated", info, b"the next one")

    def change(to: UserScramCredentialUpsertion) -> None:
        admin.alter_user_scram_credentials([to])["rotated"].result(timeout=30)

    def is_let_in() -> bool:
        sink.close()  # the driver that commits is a new one
        try:
            sink._finisher.cluster_id()
        except errors.KafkaError:
            return False
        return True

    rights.give("rotated", RIGHTS)
    config = {**password(keys, "SCRAM-SHA-512"), "sasl.username": "rotated"}
    sink = make_sink("SASL", config)
    change(given)
    eventually(is_let_in, "the broker knows the password")
    committable = prepare(sink, BranchId(owner, 7, 1, "kafka", 0, 0), ROWS)
    change(other)
    eventually(lambda: not is_let_in(), "the broker knows another password")
    with pytest.raises(CommitUnresolvedError, match="refuse config.*'rotated'"):
        sink.commit(committable)
    change(given)
    eventually(is_let_in, "the broker knows the password")
    sink.commit(committable)
    world.sees("1", "2", "3")


def test_broker_that_freezes_before_the_commit(
    kafka: KafkaServer,
    keys: Keys,
    make_sink: Callable[..., KafkaSink],
    rights: Rights,
    owner: Owner,
    world: World,
) -> None:
    """It accepts connections and does not respond: unresolved, in time. Later the commit lands."""
    rights.give("writer", RIGHTS)
    sink = make_sink("MTLS", keys.client("writer"))
    committable = prepare(sink, BranchId(owner, 7, 1, "kafka", 0, 0), ROWS)
    sink._finisher.cluster_id()  # connected, but not yet to the coordinator
    sink._patience_s = 1.0
    outcomes: list[Any] = []

    def commit_twice() -> None:  # the second time with a new client
        outcomes.extend(outcome for _ in range(2) for outcome in sink.commit_many([committable]))

    committing = threading.Thread(target=commit_twice, daemon=True)
    assert isinstance(kafka.runtime, LocalRuntime)
    assert kafka.runtime.pid is not None
    os.kill(kafka.runtime.pid, signal.SIGSTOP)
    try:
        committing.start()
        committing.join(DEADLINE_S)
        assert [type(outcome) for outcome in outcomes] == [CommitUnresolvedError] * 2
        assert "no response to TLS" in str(outcomes[1])
    finally:
        os.kill(kafka.runtime.pid, signal.SIGCONT)
    sink._patience_s = DEADLINE_S
    sink.commit(committable)
    world.sees("1", "2", "3")


def test_one_of_several_addresses_is_refused(
    kafka: KafkaServer, keys: Keys, topic: str, rights: Rights
) -> None:
    """The sink tries the others, too, whichever it tries first."""
    rights.give("writer", RIGHTS)
    addresses = f"{kafka.listeners['OTHERNAME']},{kafka.listeners['MTLS']}"
    for _ in range(4):
        sink = KafkaSink(topic, bootstrap_servers=addresses, config=keys.client("writer"))
        sink.validate(VALUE)
        sink.close()


def rejected_token(_: str | None) -> tuple[str, float]:
    return "wrong-token", time.time() + 60


def failing(_: str | None) -> tuple[str, float]:
    raise ValueError("wrong-secret")


@pytest.mark.parametrize(
    ("callback", "words"),
    [
        (rejected_token, ["the brokers refuse the token", "audience"]),
        (failing, ["raised ValueError", "test_security.py, line"]),
    ],
)
def test_no_good_token(
    callback: Any, words: list[str], keys: Keys, make_sink: Callable[..., KafkaSink]
) -> None:
    """Refused quickly, whether the brokers refuse the token or there is none."""
    refused(make_sink("SASL", sasl(keys, "OAUTHBEARER", oauth_cb=callback)), "oauth_cb", *words)


def test_broker_of_an_unknown_authority(keys: Keys, make_sink: Callable[..., KafkaSink]) -> None:
    """The wrong CA: refused quickly, naming the setting."""
    for wrong in ({"ssl.ca.location": keys.other_ca}, {}):
        config = {"security.protocol": "SSL", **wrong}
        refused(make_sink("OTHERNAME", config), "not trusted", r"config\['ssl\.ca\.location'\]")


def test_broker_with_the_certificate_of_another_host(
    keys: Keys, make_sink: Callable[..., KafkaSink]
) -> None:
    """Refused quickly, naming the host; without the check of the name both clients connect."""
    config = {"security.protocol": "SSL", "ssl.ca.location": keys.ca}
    refused(make_sink("OTHERNAME", config), "another host", r"127\.0\.0\.1")
    unchecked = {**config, "ssl.endpoint.identification.algorithm": "none"}
    make_sink("OTHERNAME", unchecked).validate(VALUE)  # as the super user ANONYMOUS


def test_advertised_address_is_of_another_host(kafka: KafkaServer, keys: Keys, topic: str) -> None:
    """The first address accepts both clients, but advertises another, which is refused."""
    address = kafka.listeners["OTHERNAME"].replace("127.0.0.1", "localhost")
    config = {"security.protocol": "SSL", "ssl.ca.location": keys.ca}
    sink = KafkaSink(topic, bootstrap_servers=address, config=config)
    sink._patience_s = 1
    refused(sink, "another host", r"127\.0\.0\.1", r"advertised\.listeners")
    sink.close()


def test_client_certificate_missing_or_distrusted(
    keys: Keys, make_sink: Callable[..., KafkaSink]
) -> None:
    """Refused quickly, naming what is missing; the broker reports only "bad certificate"."""
    config = {"security.protocol": "SSL", "ssl.ca.location": keys.ca}
    refused(make_sink("MTLS", config), "requires a client certificate", "ssl.certificate.location")
    config = keys.client("stranger", authority=keys.theirs)
    refused(make_sink("MTLS", config), "refuses the client certificate")
    config = {**keys.client("writer"), "ssl.key.password": "wrong-password"}
    refused(make_sink("MTLS", config), "client certificate cannot be used", "ssl.key.password")


def test_listener_of_another_kind(keys: Keys, make_sink: Callable[..., KafkaSink]) -> None:
    """The error names TLS or SASL if only one side uses it."""
    refused(make_sink("MTLS", {}), "PLAINTEXT", "Is it a TLS listener")
    config = {**keys.client("writer"), **password(keys, "PLAIN")}
    refused(make_sink("MTLS", config), "does not use SASL")
    sink = make_sink("PLAINTEXT", {"security.protocol": "SSL", "ssl.ca.location": keys.ca})
    sink._patience_s = 0.3
    # A proxy whose broker is down hangs up in the same way, so the settings may be right.
    with pytest.raises(SinkUnavailableError, match=r"the last attempt: .*Handshake failed"):
        sink.validate(VALUE)


def test_librdkafka_cannot_connect_and_kafka_python_can(
    keys: Keys, make_sink: Callable[..., KafkaSink]
) -> None:
    """`validate` finds it, too, since executors would fail one after the other."""
    sink = make_sink("PLAINTEXT", {"broker.address.family": "v6"})
    sink._patience_s = 1
    with pytest.raises(ConfigurationError, match=r"librdkafka, which writes, cannot: \S+"):
        sink.validate(VALUE)


def test_executor_that_is_not_let_in(
    keys: Keys,
    make_sink: Callable[..., KafkaSink],
    owner: Owner,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The task's error has the reason, which librdkafka reports only in a separate event."""
    monkeypatch.setattr("sparkonce.sinks.kafka.writing.producer.CONNECT_TIMEOUT_S", 0.5)
    branch = BranchId(owner, 7, 1, "kafka", 0, 0)
    sink = make_sink("SASL", password(keys, "PLAIN", "wrong-password"))
    with pytest.raises(PrepareRejectedError, match="SASL authentication error") as error:
        sink.beginTransaction(branch)
    assert "wrong-" not in str(error.value)
    sink = make_sink("SASL", {**password(keys, "PLAIN"), "ssl.ca.location": keys.other_ca})
    with pytest.raises(PrepareRejectedError, match="certificate verify failed"):
        sink.beginTransaction(branch)


def test_executor_without_a_token(
    keys: Keys, make_sink: Callable[..., KafkaSink], owner: Owner
) -> None:
    """The task fails at once, and its error reports what the function did."""
    sink = make_sink("SASL", sasl(keys, "OAUTHBEARER", oauth_cb=failing))
    with pytest.raises(PrepareRejectedError, match=r"oauth_cb.*raised ValueError") as error:
        sink.beginTransaction(BranchId(owner, 7, 1, "kafka", 0, 0))
    assert "wrong-" not in str(error.value)


# -- what it may do --------------------------------------------------------------------------------


@pytest.fixture
def user(fresh_name: Callable[[], str]) -> str:
    """A user without any rights."""
    return fresh_name()


def test_documented_rights_are_enough(
    user: str,
    keys: Keys,
    make_sink: Callable[..., KafkaSink],
    rights: Rights,
    owner: Owner,
    world: World,
) -> None:
    """With these four and no others, every verb works."""
    assert len(RIGHTS) == 4
    rights.give(user, RIGHTS)
    sink = make_sink("MTLS", keys.client(user))
    whole_life(sink, owner, world)
    assert sink._seen is not None
    assert (sink._seen.timeout_ms, sink._seen.max_message_bytes) == (900_000, None)


def test_settings_that_it_may_read(
    user: str, keys: Keys, make_sink: Callable[..., KafkaSink], rights: Rights
) -> None:
    """With DescribeConfigs the sink uses the limits of the broker and the topic."""
    read = [
        Right(right.kind, right.name, right.pattern, AclOperation.DESCRIBE_CONFIGS)
        for right in (CLUSTER, RIGHTS[0])
    ]
    rights.give(user, [*RIGHTS, *read])
    sink = make_sink("MTLS", keys.client(user))
    sink.validate(VALUE)
    assert sink._seen is not None
    assert (sink._seen.timeout_ms, sink._seen.max_message_bytes) == (MAX_TIMEOUT_MS, 1048588)


@pytest.mark.parametrize("missing", RIGHTS, ids=lambda right: right.words)
def test_right_that_is_missing(
    missing: Right, user: str, keys: Keys, make_sink: Callable[..., KafkaSink], rights: Rights
) -> None:
    """`validate` names it, before any data moves; once it is given, validation succeeds."""
    rights.give(user, [right for right in RIGHTS if right != missing])
    sink = make_sink("MTLS", keys.client(user))
    refused(sink, missing.words, "docs/howto/kafka-security.md")
    rights.give(user, [missing])
    sink.validate(VALUE)


def test_no_right_at_all(user: str, keys: Keys, make_sink: Callable[..., KafkaSink]) -> None:
    """The topic is hidden, but the error does not call it nonexistent."""
    refused(make_sink("MTLS", keys.client(user)), "Read and Write on the topic")


@pytest.mark.parametrize("taken", RIGHTS, ids=lambda right: right.words)
def test_right_that_is_taken_away(
    taken: Right,
    user: str,
    keys: Keys,
    make_sink: Callable[..., KafkaSink],
    rights: Rights,
    owner: Owner,
    world: World,
) -> None:
    """Tasks are rejected and name it. A prepared branch is never called lost, and commits later."""
    rights.give(user, RIGHTS)
    sink = make_sink("MTLS", keys.client(user))
    sink.validate(VALUE)
    committed, aborted, late = (BranchId(owner, 7, 1, "kafka", 0, task) for task in range(3))
    rows = ROWS.append_column("partition", pa.array([0] * len(ROWS), pa.int32()))
    first, second = prepare(sink, committed, rows), prepare(sink, aborted, rows)
    rights.take(user, taken)
    with pytest.raises(PrepareRejectedError, match=taken.words):
        prepare(sink, late)
    for verb, kind in ((sink.commit, CommitUnresolvedError), (sink.abort, SinkError)):
        if taken.kind == ResourceType.TRANSACTIONAL_ID:
            with pytest.raises(kind, match=taken.words):
                verb(first if verb == sink.commit else second)
    hides_rows = (taken.kind, taken.operation) == (ResourceType.TOPIC, AclOperation.READ)
    if taken.kind == ResourceType.GROUP or hides_rows:
        with pytest.raises(CommitUnresolvedError, match=taken.words):
            sink.commit(first)
    rights.give(user, [taken])
    sink.commit(first)
    sink.abort(second)
    for orphan in sink.find_branches(owner):
        sink.abort(orphan)
    world.sees("1", "2", "3")
    assert list(sink.find_branches(owner)) == []


def test_rights_of_the_repair(
    user: str,
    keys: Keys,
    make_sink: Callable[..., KafkaSink],
    rights: Rights,
    owner: Owner,
    world: World,
) -> None:
    """Writing markers that a broker omitted needs more rights; nothing else does."""
    rights.give(user, RIGHTS)
    sink = make_sink("MTLS", keys.client(user))
    branch = BranchId(owner, 7, 1, "kafka", 0, 0)
    committable = prepare(sink, branch, ROWS.slice(0, 1))
    partitions: Any = committable.payload["partitions"]
    producer_id: Any = committable.payload["producer_id"]
    finisher = sink._finisher

    def coordinator(admin: Any) -> Any:
        return home_partition(admin, STATE.name, branch.name)

    assert finisher.offsets_partition(branch.name) == {"__consumer_offsets": []}
    with pytest.raises(errors.ClusterAuthorizationFailedError):
        finisher.write_markers(branch.name, partitions, producer_id, 1, commit=True)
    assert world.values() == []
    assert finisher._connection.ask(coordinator) is None
    rights.give(user, [CLUSTER, OFFSETS, STATE])
    assert finisher._connection.ask(coordinator) is not None
    everywhere = {**partitions, **finisher.offsets_partition(branch.name)}
    assert len(everywhere["__consumer_offsets"]) == 1
    finisher.write_markers(branch.name, everywhere, producer_id, 1, commit=True)
    world.sees("1")
    sink.commit(committable)
