"""The exception tree. Every message says what was got, what is supported and what to do.

AutofaError
|-- UsageError (ValueError)             a bad argument, known before any work     exit code 2
|   |-- DTypeError (TypeError)          a type or dtype that is not accepted
|   |-- DeviceError                     a device that is not there
|   |-- SdpaUsageError (RuntimeError)   a bad argument of patched SDPA, which torch's raises as that
|   `-- SdpaDTypeError (DTypeError, RuntimeError)   the same of a type or dtype
|-- ToolchainError (RuntimeError)       no usable compiler                         exit code 1
|-- CompileError (RuntimeError)         one variant did not compile
|-- LaunchError (RuntimeError)          a kernel could not be loaded or launched
|-- NotApplicableError (RuntimeError)   a forced kernel cannot serve this call
`-- StoreError (RuntimeError)           the database cannot be used                exit code 1
    |-- StoreUnwritableError
    |-- StoreCorruptError
    |-- StoreLockedError
    |-- StoreUnreachableError
    `-- StoreTooNewError
"""

from __future__ import annotations


class AutofaError(Exception):
    """Base of every error raised on purpose by autofa."""

    exit_code = 1


class UsageError(AutofaError, ValueError):
    """A bad argument: whatever can be known before any work is done."""

    exit_code = 2


class DTypeError(UsageError, TypeError):
    """A type or dtype that is not accepted."""


class DeviceError(UsageError):
    """A device that is not there, or cannot be used."""


class SdpaUsageError(UsageError, RuntimeError):
    """A bad argument of SDPA while that is patched: torch's own raises a RuntimeError."""


class SdpaDTypeError(DTypeError, RuntimeError):
    """A type or dtype that SDPA does not accept, while that is patched."""


class ToolchainError(AutofaError, RuntimeError):
    """No usable compiler for what was asked."""


class CompileError(AutofaError, RuntimeError):
    """One variant did not compile."""


class LaunchError(AutofaError, RuntimeError):
    """A kernel library could not be loaded, or its launch failed."""


class NotApplicableError(AutofaError, RuntimeError):
    """A kernel that was forced cannot serve this call."""


class StoreError(AutofaError, RuntimeError):
    """The database cannot be used."""


class StoreUnwritableError(StoreError):
    """The database cannot be written where it was asked to be."""


class StoreCorruptError(StoreError):
    """The file is not a database, or a damaged one."""


class StoreLockedError(StoreError):
    """Another process holds the database's lock, and did for as long as was waited for it."""


class StoreUnreachableError(StoreError):
    """The database's server does not answer, or went away; it may come back."""


class StoreTooNewError(StoreError):
    """The database was written by a newer version of autofa."""


# Ends the warnings of `attention`, which has room for one line only.
DOCTOR = "`autofa doctor` says what to do"


def explain_bad(what: str, got: object, supported: str, do: str) -> str:
    """One message in the form every error of autofa has.

    >>> explain_bad("dtype", "f8", "f32, f16, bf16", "choose one of these")
    "dtype: got 'f8'; supported: f32, f16, bf16; choose one of these"
    """
    return f"{what}: got {got!r}; supported: {supported}; {do}"
