"""What is known of a device: the user's database, and the measurements that ship with autofa.

No fault of the database reaches a caller of attention: each is one warning, saying what is lost and
how to mend it, and the ladder's lower rungs answer.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cache

from autofa import collector
from autofa.device import DeviceKey
from autofa.dispatch.ladder import Evidence
from autofa.errors import DOCTOR, StoreError
from autofa.problem import Bucket
from autofa.settings import Settings, database, without_secrets
from autofa.store import large, reader, seeds
from autofa.store.rows import Row

log = logging.getLogger("autofa")


def by_bucket(rows: Sequence[Row]) -> dict[Bucket, list[Row]]:
    found: dict[Bucket, list[Row]] = {}
    for row in rows:
        found.setdefault(row.bucket, []).append(row)
    return found


# Seconds after which a server that was asked and does not answer is given up.
READ_LIMIT = 10.0


def is_server(settings: Settings) -> bool:
    """Whether the measurements are in no file here, so that no call may wait for them."""
    try:
        return reader.sqlite_path(database(settings)) is None
    except StoreError:
        return False


def _rows(location: str, device: DeviceKey) -> Mapping[Bucket, Sequence[Row]]:
    if reader.sqlite_path(location) is not None:
        found = large.open_large(location, device)
        return by_bucket(reader.read(location, device)) if found is None else found
    from autofa.store import server_reader

    return by_bucket(server_reader.read(location, device, limit=READ_LIMIT))


def gather(device: DeviceKey, settings: Settings) -> Evidence:
    """Reads the database's rows of `device`, now; its seed when first asked. Never raises."""
    with collector.paused():  # importing platformdirs for the default path allocates too
        path = database(settings)
    where = without_secrets(path)
    lost = ""
    measured: Mapping[Bucket, Sequence[Row]] = {}
    try:
        with collector.paused():
            measured = _rows(path, device)
    except StoreError as error:
        lost = str(error)
        log.warning("stored measurements are not used: %s; %s", error, DOCTOR)
    except Exception as error:
        lost = f"{where}: {error!r}".replace(path, where)
        log.warning("stored measurements are not used: %s; %s", lost, DOCTOR)
    if not measured and not lost:
        log.info("no measurements of %s in %s; `autofa tune` makes them", device, where)
    return shipped(device, measured, lost)


def shipped(
    device: DeviceKey, measured: Mapping[Bucket, Sequence[Row]] | None = None, lost: str = ""
) -> Evidence:
    """Evidence of these measured rows, beside those that ship with autofa.

    Args:
        lost: why there are none, where that is a fault.
    """
    known = measured or {}

    @cache
    def seed() -> dict[Bucket, list[Row]]:
        try:
            with collector.paused():
                return by_bucket(seeds.read_seed(device))
        except Exception as error:
            log.warning("shipped measurements of %s are not used: %r", device, error)
            return {}

    return Evidence(
        lambda bucket: known.get(bucket, ()),
        lambda bucket: seed().get(bucket, ()),
        tuple(known),
        lost,
    )
