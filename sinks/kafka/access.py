"""Why a broker does not let us in, or do something, in words that name the next step.

connecting   a certificate, a password, a token   ──► RefusedError
asking       a right that is missing              ──► missing_right
"""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Final

from kafka import errors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sparkonce.sinks.kafka.settings import KafkaSettings

PREFIX: Final = "sparkonce."
"""What every transactional id and every group of the sink starts with."""

TRANSACTIONS_RIGHT: Final = f"Write on transactional ids that start with '{PREFIX}'"
GROUPS_RIGHT: Final = f"Read on groups that start with '{PREFIX}'"
TOPIC_RIGHTS: Final = "Read and Write on the topic"

_RIGHTS: Final = (
    (errors.TransactionalIdAuthorizationFailedError, TRANSACTIONS_RIGHT),
    (errors.GroupAuthorizationFailedError, GROUPS_RIGHT),
    (errors.TopicAuthorizationFailedError, TOPIC_RIGHTS),
    (
        errors.ClusterAuthorizationFailedError,
        "ClusterAction on the cluster, to write the markers that a broker has left out",
    ),
)

_OTHER_NAME: Final = frozenset({62, 63, 64})
_EXPIRED: Final = 10
_REVOKED: Final = 23
"""OpenSSL's X509_V_ERR_…, which `ssl` does not name."""


_NO_TLS: Final = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"})


class RefusedError(errors.KafkaError):  # type: ignore[misc] # kafka-python has no types for it
    """Broker and client do not trust each other, or cannot talk.

    Attributes:
        final: whether asking again cannot help.
    """

    final = True

    def __str__(self) -> str:
        return " ".join(map(str, self.args))


def missing_right(error: BaseException) -> str | None:
    """The right whose lack an error tells of."""
    return next((right for kind, right in _RIGHTS if isinstance(error, kind)), None)


def refusal(error: BaseException, settings: KafkaSettings) -> RefusedError | None:
    """Why a connection was refused for good; None where another attempt may succeed."""
    for cause in _causes(error):
        said = _explained(cause, settings)
        if said is not None:
            return RefusedError(settings.without_secrets(said))
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what kafka-python wrapped in it: as an argument, or while handling it."""
    yield error
    for inner in (*error.args, error.__context__):
        if isinstance(inner, BaseException):
            yield inner


def _explained(error: BaseException, settings: KafkaSettings) -> str | None:
    if isinstance(error, RefusedError):
        return str(error)
    if isinstance(error, errors.SaslAuthenticationFailedError):
        return _unauthenticated(error, settings)
    if isinstance(error, ssl.SSLError):
        return _tls(error, settings)
    said = next((said for kind, said in _LISTENERS if isinstance(error, kind)), None)
    return said and said.format(
        protocol=f"config['security.protocol']={settings.protocol!r}", mechanism=settings.mechanism
    )


_LISTENERS: Final = (
    (
        errors.UnsupportedSaslMechanismError,
        "the listener does not know config['sasl.mechanisms']={mechanism!r}; ask which it does",
    ),
    (
        errors.IllegalSaslStateError,
        "the listener wants no SASL, and {protocol}; use SSL or PLAINTEXT",
    ),
    (
        errors.InvalidReceiveError,
        "the answer is not Kafka's, and {protocol}. Is it a TLS listener? Then use SSL or SASL_SSL",
    ),
)


def _unauthenticated(error: errors.KafkaError, settings: KafkaSettings) -> str:
    said = " ".join(map(str, error.args)).removeprefix("SaslAuthenticationFailedError: ")
    if settings.mechanism == "OAUTHBEARER":
        return (
            f"the brokers refuse the token of config['oauth_cb']: {said}. Check its issuer, "
            "audience, scope and lifetime"
        )
    return (
        f"the brokers refuse config['sasl.username']={settings.text('sasl.username')!r} with "
        f"{settings.mechanism}: {said}. Check the name, config['sasl.password'] and "
        "config['sasl.mechanisms']"
    )


def _tls(error: ssl.SSLError, settings: KafkaSettings) -> str | None:
    if isinstance(error, ssl.SSLCertVerificationError):
        return _untrusted(error)
    if "ALERT" in str(error.reason):
        return _distrusted(error, settings)
    if error.reason in _NO_TLS:
        return (
            "the listener does not speak TLS, and "
            f"config['security.protocol']={settings.protocol!r}; use PLAINTEXT or SASL_PLAINTEXT"
        )
    return None


def _untrusted(error: ssl.SSLCertVerificationError) -> str:
    if error.verify_code in _OTHER_NAME:
        return (
            f"the broker's certificate is of another host: {error.verify_message} Use the host's "
            "name in its certificate in bootstrap_servers= and the brokers' advertised.listeners"
        )
    if error.verify_code == _EXPIRED:
        return "the broker's certificate has expired; renew it, or set this machine's clock"
    if error.verify_code == _REVOKED:
        return "the broker's certificate is revoked, by config['ssl.crl.location']"
    return (
        f"the broker's certificate is not trusted: {error.verify_message}. Point "
        "config['ssl.ca.location'] at the certificate of the authority that signed it"
    )


def _distrusted(error: ssl.SSLError, settings: KafkaSettings) -> str:
    if settings.certificate is None:
        return (
            f"the broker ends the connection ({error.reason}): it wants a client certificate. Set "
            "config['ssl.certificate.location'] and config['ssl.key.location']"
        )
    return (
        f"the broker refuses the client certificate of config[{settings.certificate!r}] "
        f"({error.reason}); use one that an authority of its truststore has signed"
    )
