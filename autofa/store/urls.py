"""URLs of servers: which are supported, what they are called in messages, what is said of faults.

No message holds a user or a password.
"""

from __future__ import annotations

from collections.abc import Iterable

from autofa.errors import StoreError, StoreUnreachableError, explain_bad

SUPPORTED = "a path, sqlite:///FILE, postgresql://USER@HOST/NAME"
SCHEMES = ("postgresql", "postgresql+psycopg", "postgres")
# Seconds that an unreachable server may cost.
CONNECT_TIMEOUT = 5
# What is supported, and what to do, where psycopg cannot be imported.
NO_DRIVER = ("psycopg", "`pip install 'autofa[postgres]'`, or name a file")


def server_name(location: str) -> str:
    """A server's database for messages: `postgresql://host/name`.

    Raises:
        StoreError: it is no URL of a kind of server that is supported.
    """
    scheme = location.partition("://")[0]
    if scheme not in SCHEMES:
        raise StoreError(explain_bad("database scheme", scheme, SUPPORTED, "write one of these"))
    scheme = "postgresql" if scheme == "postgres" else scheme
    # The last @ ends the password, whatever it holds that should have been escaped.
    place = location.partition("://")[2].rpartition("@")[2].partition("?")[0]
    host, _, name = place.partition("/")
    port = host.rpartition("]")[2].partition(":")[2]
    if port and not (port.isascii() and port.isdigit()):
        raise malformed(scheme)
    return f"{scheme}://{host}/{name}"


def driver_url(location: str) -> str:
    """A server's URL as SQLAlchemy takes it: without a driver's name it would take psycopg2."""
    return f"postgresql+psycopg://{location.partition('://')[2]}"


def malformed(scheme: str) -> StoreError:
    do = "check the URL; special characters of a password must be %-escaped"
    return StoreError(explain_bad("database", f"a {scheme} URL", SUPPORTED, do))


def no_answer(
    where: str, error: BaseException, secrets: Iterable[str], *, away: bool = False
) -> StoreError:
    """What a driver's error is called. `away`: it is of the connection, not of what was asked."""
    text = " ".join(str(error).split())
    for secret in secrets:
        text = text.replace(secret, "***") if secret else text
    do = "check that the server runs and lets this user in"
    kind = StoreUnreachableError if away else StoreError
    return kind(explain_bad(f"database {where}", text[:300], "an answer", do))
