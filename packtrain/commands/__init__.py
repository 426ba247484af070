"""The commands, one module each: a dataclass of settings, and `run(settings)` which gives the exit code."""
