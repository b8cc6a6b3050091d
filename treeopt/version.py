"""The version of the package, of the files it writes, and of `pyproject.toml`."""

VERSION = "0.2.0"
