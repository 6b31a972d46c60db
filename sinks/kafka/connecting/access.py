"""Why a broker refuses a connection, in words that name the next step.

a certificate, a password, a token, the wrong kind of listener ──► RefusedError
anything else                                                  ──► None: try again
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from typing import Final

from kafka import errors

from sparkonce.sinks.kafka.connecting.refused import RefusedError
from sparkonce.sinks.kafka.connecting.settings import KafkaSettings

# OpenSSL's X509_V_ERR_… codes, which `ssl` does not name.
_OTHER_NAME: Final = frozenset({62, 63, 64})
_EXPIRED: Final = 10
_REVOKED: Final = 23

_NO_TLS: Final = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"})


def refusal(error: BaseException, settings: KafkaSettings) -> RefusedError | None:
    """Why a connection was refused permanently; None if another attempt may succeed."""
    for cause in _causes(error):
        reason = _explained(cause, settings)
        if reason is not None:
            return RefusedError(settings.without_secrets(reason))
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and the errors that kafka-python wrapped in it, as arguments or as context."""
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
    reason = next((reason for kind, reason in _LISTENERS if isinstance(error, kind)), None)
    return reason and reason.format(
        protocol=f"config['security.protocol']={settings.protocol!r}", mechanism=settings.mechanism
    )


_LISTENERS: Final = (
    (
        errors.UnsupportedSaslMechanismError,
        "the listener does not support config['sasl.mechanisms']={mechanism!r}; set another one",
    ),
    (
        errors.IllegalSaslStateError,
        "the listener does not use SASL, and {protocol}; use SSL or PLAINTEXT",
    ),
    (
        errors.InvalidReceiveError,
        "the reply is not Kafka's, and {protocol}. Is it a TLS listener? Then use SSL or SASL_SSL",
    ),
)


def _unauthenticated(error: errors.KafkaError, settings: KafkaSettings) -> str:
    reason = " ".join(map(str, error.args)).removeprefix("SaslAuthenticationFailedError: ")
    if settings.mechanism == "OAUTHBEARER":
        return (
            f"the brokers refuse the token of config['oauth_cb']: {reason}. Check its issuer, "
            "audience, scope and lifetime"
        )
    return (
        f"the brokers refuse config['sasl.username']={settings.text('sasl.username')!r} with "
        f"{settings.mechanism}: {reason}. Check the name, config['sasl.password'] and "
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
            f"the broker's certificate is for another host: {error.verify_message} Use the host "
            "name of the certificate in bootstrap_servers= and in the brokers' advertised.listeners"
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
            f"the broker closes the connection ({error.reason}): it requires a client certificate. "
            "Set config['ssl.certificate.location'] and config['ssl.key.location']"
        )
    return (
        f"the broker refuses the client certificate of config[{settings.certificate!r}] "
        f"({error.reason}); use a certificate signed by an authority in the broker's truststore"
    )
