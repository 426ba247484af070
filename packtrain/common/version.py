"""Version of packtrain, which the command line prints and written files record."""

__version__ = "0.2.0"
