"""The refusal of a broker, and the rights that the sink needs."""

from __future__ import annotations

from typing import Final

from kafka import errors

PREFIX: Final = "sparkonce."
"""Every transactional id and every group of the sink starts with this."""

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


class RefusedError(errors.KafkaError):  # type: ignore[misc] # kafka-python has no types for it
    """Broker and client do not trust each other, or cannot talk to each other.

    Attributes:
        final: whether asking again cannot help.
    """

    final = True

    def __str__(self) -> str:
        return " ".join(map(str, self.args))


def in_words(error: BaseException) -> str:
    """An error's name and arguments, and the missing right, if it reports one."""
    name = getattr(error, "message", None) or type(error).__name__
    args = [str(arg) for arg in error.args]
    if isinstance(error, errors.CoordinatorNotAvailableError):
        args.append(
            "the broker that coordinates the transaction is not up, or fewer replicas are in sync "
            "than min.insync.replicas of __transaction_state"
        )
    right = missing_right(error)
    text = f"{name}: {'; '.join(args)}" if args else name
    return text if right is None else f"{text} (allow {right})"


def missing_right(error: BaseException) -> str | None:
    """The missing right that an error reports, if it reports one."""
    return next((right for kind, right in _RIGHTS if isinstance(error, kind)), None)
