"""The version, stated once: setup.py, the package and its records read it here."""

__version__ = "0.1.0"
