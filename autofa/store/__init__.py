"""The database of measurements: rows, ranking, seeds, a light reader and the repository.

Importing this package loads nothing; `repository`, `migrate` and `models` load SQLAlchemy.
"""
