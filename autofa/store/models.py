"""The tables, as SQLAlchemy sees them. db/migrations makes them; a test holds the two equal.

Measurements are only ever added: the best kernel is a query, and a failure is a row like any other.
"""

from __future__ import annotations

from sqlalchemy import Double, ForeignKey, Index, MetaData, String, Text
from sqlalchemy import UniqueConstraint as Unique
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from autofa.store.rows import MAX_NAME

Name = String(MAX_NAME)
Hash = String(64)


class Base(DeclarativeBase):
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s",
            "pk": "pk_%(table_name)s",
        }
    )


class Device(Base):
    """One exact device."""

    __tablename__ = "autofa_device"
    __table_args__ = (Unique("kind", "name", "arch", "units", "memory_gib"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(String(8))
    name: Mapped[str] = mapped_column(Name)
    arch: Mapped[str] = mapped_column(Name)
    units: Mapped[int]
    memory_gib: Mapped[int]


class Provenance(Base):
    """What measurements were made with: a JSON object, and its SHA-256, by which it is found."""

    __tablename__ = "autofa_provenance"

    id: Mapped[int] = mapped_column(primary_key=True)
    digest: Mapped[str] = mapped_column(Hash, unique=True)
    document: Mapped[str] = mapped_column(Text)


class Measurement(Base):
    """One row of `autofa.store.rows.Row`, which says what the columns mean.

    `problem` and `bucket` are texts such as `1,8,1024,64 f16 causal`. `content_hash` makes adding
    idempotent.
    """

    __tablename__ = "autofa_measurement"
    __table_args__ = (Index(None, "device_id", "bucket", "slug"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    content_hash: Mapped[str] = mapped_column(Hash, unique=True)
    device_id: Mapped[int] = mapped_column(ForeignKey("autofa_device.id"))
    provenance_id: Mapped[int] = mapped_column(ForeignKey("autofa_provenance.id"))
    created_at: Mapped[str] = mapped_column(String(40))
    bucket: Mapped[str] = mapped_column(Name)
    problem: Mapped[str] = mapped_column(Name)
    slug: Mapped[str] = mapped_column(Name)
    family: Mapped[str] = mapped_column(Name)
    fingerprint: Mapped[str] = mapped_column(Name)
    status: Mapped[str] = mapped_column(String(32))
    run: Mapped[str] = mapped_column(Name)
    time_ms: Mapped[float | None] = mapped_column(Double)
    call_ms: Mapped[float | None] = mapped_column(Double)
    time_spread: Mapped[float | None] = mapped_column(Double)
    call_spread: Mapped[float | None] = mapped_column(Double)
    time_p10: Mapped[float | None] = mapped_column(Double)
    time_p90: Mapped[float | None] = mapped_column(Double)
    call_p10: Mapped[float | None] = mapped_column(Double)
    call_p90: Mapped[float | None] = mapped_column(Double)
    samples: Mapped[int]
    baseline_time_ms: Mapped[float | None] = mapped_column(Double)
    baseline_call_ms: Mapped[float | None] = mapped_column(Double)
    error: Mapped[float | None] = mapped_column(Double)
    message: Mapped[str] = mapped_column(Text)
    seconds: Mapped[float] = mapped_column(Double)
