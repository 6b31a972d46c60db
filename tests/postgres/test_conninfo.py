"""Connection strings of Postgres: what is read, and that no password shows."""

from __future__ import annotations

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from sparkonce.clients.postgres import read_conninfo
from sparkonce.errors import ConfigurationError, LogUnavailableError
from sparkonce.sinks import PostgresSink
from sparkonce.txn_log import open_log

SECRET = "S3cr"
UNESCAPED = (
    f"postgresql://app:{SECRET}/etPW@h:1/shop",
    f"postgresql://app:{SECRET}@etPW@h/shop",
    f"postgresql://app:{SECRET}/et@P/W@h/shop?sslmode=require",
    f"postgresql://app:{SECRET}/shop",
)


@pytest.mark.parametrize("conninfo", UNESCAPED)
def test_password_that_is_not_escaped_is_refused_and_not_shown(conninfo: str) -> None:
    """libpq reads most of these, and finds the rest of the password in host or database."""
    for refused in (
        lambda: PostgresSink(conninfo, table="orders"),
        lambda: open_log(conninfo),
    ):
        with pytest.raises(ConfigurationError, match="not percent-encoded") as caught:
            refused()
        assert SECRET not in str(caught.value)
        assert "etPW" not in str(caught.value)


@pytest.mark.parametrize(
    "address",
    [
        f"host=db user=app password={SECRET} dbname=shop",
        f"postgresql+psycopg://db/shop?user=app&password={SECRET}",
        f"mysql://app:{SECRET}@db/shop",
        f"//app:{SECRET}@db/shop",
    ],
)
def test_address_of_no_known_log_is_not_repeated(address: str) -> None:
    """Nobody knows where its password stands."""
    with pytest.raises(ConfigurationError, match="expected sqlite:///relative") as caught:
        open_log(address)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("conninfo", "known"),
    [
        ("postgresql://app:a%2Fb%40c@h:1/shop", {"password": "a/b@c", "host": "h", "port": "1"}),
        ("postgresql://a,b:1/shop?user=me@tenant", {"host": "a,b", "user": "me@tenant"}),
        ("postgresql://app:a[b?c#d@h/shop", {"password": "a[b?c#d", "host": "h"}),
        ("postgresql://[::1]:5432,h:5433/", {"host": "::1,h", "port": "5432,5433"}),
        ("host=/run/pg dbname=a@b user=x", {"host": "/run/pg", "dbname": "a@b"}),
        ("postgresql://db-a,db-b/shop?target_session_attrs=primary", {"host": "db-a,db-b"}),
        ("postgresql://db-a:1,db-b/shop", {"port": "1,"}),
        ("", {}),
    ],
)
def test_what_libpq_reads_is_read(conninfo: str, known: dict[str, str]) -> None:
    """Escaped passwords, several servers, sockets, users with an @."""
    assert known.items() <= read_conninfo(conninfo, "it is nothing").items()


def test_several_servers_without_a_port_are_shown() -> None:
    """libpq tells their ports as a comma."""
    sink = PostgresSink("postgresql://db-a,db-b/shop", table="orders")
    assert sink.where == "postgres table shop.orders at db-a,db-b:5432"


@pytest.mark.parametrize("by_environment", [False, True])
@pytest.mark.parametrize("named", [{}, {"host": "db"}, {"dbname": "shop"}])
def test_service_that_alone_knows_the_place(
    monkeypatch: pytest.MonkeyPatch, named: dict[str, str], by_environment: bool
) -> None:
    """Its file differs from machine to machine; two services would pass for one target."""
    if by_environment:
        monkeypatch.setenv("PGSERVICE", "orders")
    given = {**named, **({} if by_environment else {"service": "orders"})}
    query = "&".join(f"{key}={value}" for key, value in given.items())
    for refused in (
        lambda: PostgresSink(make_conninfo("", **given), table="orders"),
        lambda: open_log(f"postgresql://?{query}"),
    ):
        with pytest.raises(ConfigurationError, match="service 'orders'.*name host= and dbname="):
            refused()


def test_service_beside_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGSERVICE", "orders")
    for named in ("host=db dbname=shop", "hostaddr=::1 dbname=shop service=other"):
        sink = PostgresSink(named, table="orders")
        assert sink.target == "postgres table shop.orders"


def test_plus_of_a_parameter_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """To libpq, and so to the log, which takes its own parameters out."""
    given = []

    def connect(conninfo: str, **_: object) -> None:
        given.append(conninfo_to_dict(conninfo))
        raise psycopg.OperationalError("away")

    monkeypatch.setattr(psycopg, "connect", connect)
    with pytest.raises(LogUnavailableError):
        open_log("postgresql://h/ops?user=log&password=Zm9v+YmFy%2B&schema=log")
    assert given[0] == {"host": "h", "dbname": "ops", "user": "log", "password": "Zm9v+YmFy+"}


@pytest.mark.parametrize(
    "conninfo",
    [
        f"postgresql://app:{SECRET}@h/shop?hots=x",
        f"postgresql://app:{SECRET}@h/shop?sslmode=require&hots=x",
        f"hots=db user=app password={SECRET}",
        f"host=db hots={SECRET}",
    ],
)
def test_parameter_that_nobody_knows_is_named(conninfo: str) -> None:
    """Its key, not its value; the password has nothing to do with it."""
    with pytest.raises(ConfigurationError, match="no parameter 'hots'") as caught:
        read_conninfo(conninfo, "it is nothing")
    assert "percent-encoded" not in str(caught.value)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "conninfo",
    [
        f"postgresql://app:pa/s?{SECRET}=rd@h/db",
        f"postgresql://app:pw@x/s?{SECRET}=rd@h/db",
        f"postgresql://h/db?password=a&{SECRET}=b",
        f"postgresql://h/db?password=a&{SECRET.replace('r', '%72')}=b",
        f"host=db password=my {SECRET}=x",
        f"host=db pasword=my {SECRET}=x",
    ],
)
def test_key_that_may_be_of_the_password_is_not_named(conninfo: str) -> None:
    """Behind a password that is not escaped, what looks like a key may be the rest of it."""
    with pytest.raises(ConfigurationError) as caught:
        read_conninfo(conninfo, "it is nothing")
    assert SECRET not in str(caught.value)


def test_log_whose_password_has_a_question_mark_shows_nothing_of_it() -> None:
    """What stands behind it looks like a parameter, such as schema=."""
    for rest in (f"{SECRET}=Z", f"schema={SECRET}!"):
        with pytest.raises(ConfigurationError, match="%3F") as caught:
            open_log(f"postgresql://app:a?{rest}@db/shop")
        assert SECRET not in str(caught.value)
