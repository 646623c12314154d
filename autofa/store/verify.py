"""A database looked through from end to end; a damaged file is moved aside, never deleted."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from autofa.errors import StoreCorruptError, StoreError, explain_bad
from autofa.store import files
from autofa.store.columns import SCHEMA, VIEW
from autofa.store.reader import present, sqlite_path
from autofa.store.repository import Audit, Repository

_NOTHING = Audit((), ())


@dataclass(frozen=True)
class Verdict:
    """What was found.

    Attributes:
        where: the database, without a password.
        exists: whether there is one, with tables of ours.
        audit: its rows; none where the file was moved aside.
        moved_aside: a damaged file's new name.
        reason: what is damaged there.
    """

    where: str
    exists: bool
    audit: Audit = _NOTHING
    moved_aside: Path | None = None
    reason: str = ""


def verify(location: str, timeout: float = 5.0) -> Verdict:
    """Checks the file page by page, the schema, every row and its content hash.

    Writes nothing to a sound database but the end of what a crashed writer left.

    Args:
        timeout: seconds to wait for a writer's lock.

    Raises:
        StoreTooNewError: a newer version wrote it; it is left as it is.
        StoreError: it cannot be read, or a damaged file cannot be moved.
    """
    path = sqlite_path(location)
    if path is not None:
        if not present(path):
            return Verdict(str(path), False)
        writable = os.access(path, os.W_OK) and os.access(path.absolute().parent, os.W_OK)
        try:
            revision = files.inspect_file(path, timeout, write=writable, thorough=True)
        except StoreCorruptError as error:
            aside = files.move_aside(path, timeout, thorough=True)
            if aside is not None:
                damage = str(error).partition("; supported")[0]
                return Verdict(str(path), False, moved_aside=aside, reason=damage)
            # Another process was faster, and has made a new one.
            revision = files.inspect_file(path, timeout, write=writable, thorough=True)
        if revision is None:
            return Verdict(str(path), False)
        if not files.has_view(path, timeout):
            do = "the next `autofa tune` makes it anew"
            got, supported = f"no view {VIEW}", f"schema {SCHEMA}, whole"
            raise StoreError(explain_bad(f"database {path}", got, supported, do))
    with Repository.open(location, write=False, timeout=timeout) as repository:
        return Verdict(repository.where, True, repository.audit())
