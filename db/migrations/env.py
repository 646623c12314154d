"""Alembic's entry: runs the revisions on the connection that autofa/store/migrate.py hands over.

The caller owns the transaction, and with it the lock that keeps other processes out.
"""

from alembic import context

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=context.config.attributes.get("target_metadata"),
    version_table="autofa_alembic_version",
    transactional_ddl=True,
)
context.run_migrations()
