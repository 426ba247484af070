"""Where values live and what runs on them: `numpy` is the specification, `cpu` the product."""

from importlib import import_module

from packtrain.backends.host import BACKENDS, HOST, Backend, Host, aligned
from packtrain.backends.target import CPU, Target

__all__ = [
    "CPU",
    "DEVICES",
    "HOST",
    "Backend",
    "Host",
    "Target",
    "aligned",
    "cpu",
    "numpy",
    "target",
]

cpu, numpy = BACKENDS["cpu"], BACKENDS["numpy"]
# each with its module here, loaded when the name is asked for, in whose BACKENDS it is
DEVICES = {"cpu": "host", "numpy": "host", "torch:cpu": "torch", "cuda": "torch", "mps": "torch"}


def target(device: str) -> Target:
    """All on the backend of a name of DEVICES."""
    module = import_module(f"packtrain.backends.{DEVICES[device]}")
    return Target.of(module.BACKENDS[device])
