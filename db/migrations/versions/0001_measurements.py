"""Devices, provenance, measurements, and the view that the runtime reads."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

NAME = sa.String(255)


def upgrade() -> None:
    op.create_table(
        "autofa_device",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("kind", sa.String(8), nullable=False),
        sa.Column("name", NAME, nullable=False),
        sa.Column("arch", NAME, nullable=False),
        sa.Column("units", sa.Integer, nullable=False),
        sa.Column("memory_gib", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_autofa_device"),
        sa.UniqueConstraint(
            "kind",
            "name",
            "arch",
            "units",
            "memory_gib",
            name="uq_autofa_device_kind_name_arch_units_memory_gib",
        ),
    )
    op.create_table(
        "autofa_provenance",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("document", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_autofa_provenance"),
        sa.UniqueConstraint("digest", name="uq_autofa_provenance_digest"),
    )
    op.create_table(
        "autofa_measurement",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("content_hash", sa.String(64), nullable=False),
        sa.Column("device_id", sa.Integer, nullable=False),
        sa.Column("provenance_id", sa.Integer, nullable=False),
        sa.Column("created_at", sa.String(40), nullable=False),
        sa.Column("bucket", NAME, nullable=False),
        sa.Column("problem", NAME, nullable=False),
        sa.Column("slug", NAME, nullable=False),
        sa.Column("family", NAME, nullable=False),
        sa.Column("fingerprint", NAME, nullable=False),
        sa.Column("status", sa.String(32), nullable=False),
        sa.Column("run", NAME, nullable=False),
        *(
            sa.Column(name, sa.Double, nullable=True)
            for name in (
                "time_ms",
                "call_ms",
                "time_spread",
                "call_spread",
                "time_p10",
                "time_p90",
                "call_p10",
                "call_p90",
            )
        ),
        sa.Column("samples", sa.Integer, nullable=False),
        sa.Column("baseline_time_ms", sa.Double, nullable=True),
        sa.Column("baseline_call_ms", sa.Double, nullable=True),
        sa.Column("error", sa.Double, nullable=True),
        sa.Column("message", sa.Text, nullable=False),
        sa.Column("seconds", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_autofa_measurement"),
        sa.UniqueConstraint("content_hash", name="uq_autofa_measurement_content_hash"),
        sa.ForeignKeyConstraint(
            ["device_id"], ["autofa_device.id"], name="fk_autofa_measurement_device_id"
        ),
        sa.ForeignKeyConstraint(
            ["provenance_id"], ["autofa_provenance.id"], name="fk_autofa_measurement_provenance_id"
        ),
    )
    op.create_index(
        "ix_autofa_measurement_device_id_bucket_slug",
        "autofa_measurement",
        ["device_id", "bucket", "slug"],
    )
    op.execute(DISPATCH)


# A file whose view was lost gets it back by the DISPATCH of the newest revision that has one.
# A failure stands until the same kernel is ok at the same shape later; while it stands, no row of
# that kernel in that bucket is dispatched.
DISPATCH = """
CREATE VIEW autofa_dispatch AS
SELECT m.id, (SELECT version_num FROM autofa_alembic_version) AS revision,
       d.kind, d.name, d.arch, d.units, d.memory_gib,
       m.problem, m.created_at, p.document AS provenance,
       m.slug, m.family, m.fingerprint, m.status, m.run,
       m.time_ms, m.call_ms, m.time_spread, m.call_spread,
       m.time_p10, m.time_p90, m.call_p10, m.call_p90,
       m.samples, m.baseline_time_ms, m.baseline_call_ms, m.error, m.message, m.seconds
FROM autofa_measurement m
JOIN autofa_device d ON d.id = m.device_id
JOIN autofa_provenance p ON p.id = m.provenance_id
WHERE m.status = 'ok' AND (m.device_id, m.bucket, m.slug, m.fingerprint) NOT IN (
    SELECT f.device_id, f.bucket, f.slug, f.fingerprint
    FROM autofa_measurement f
    WHERE f.status NOT IN ('ok', 'pruned') AND NOT EXISTS (
        SELECT 1 FROM autofa_measurement g
        WHERE g.device_id = f.device_id AND g.bucket = f.bucket AND g.slug = f.slug
          AND g.fingerprint = f.fingerprint AND g.status = 'ok' AND g.created_at > f.created_at
          AND g.problem = f.problem
    )
)
"""
