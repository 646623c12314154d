"""The tuner: what to measure, in which order, and when to stop. The only user of Optuna.

Importing this package loads nothing; `session.tune` is the work, `api.tune` its public face.
"""
