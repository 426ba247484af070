"""Check that the package's extra `server` is installed."""

from importlib.util import find_spec

from packtrain.common.errors import InputError

SERVER_PACKAGES = "starlette", "uvicorn"


def check_server(feature: str) -> None:
    """Raise InputError, which names `feature`, unless the extra `server` is installed."""
    missing = [name for name in SERVER_PACKAGES if find_spec(name) is None]
    if missing:
        raise InputError(
            f"{feature} needs {' and '.join(missing)}: pip install {' '.join(missing)} (or packtrain with its extra"
            " server)"
        )
