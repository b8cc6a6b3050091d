"""The version, said once: the package, its files and `pyproject.toml` read it here."""

VERSION = "0.1.0"
