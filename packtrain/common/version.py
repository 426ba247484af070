"""The version, which the command line and files that are written tell."""

__version__ = "0.1.0"
