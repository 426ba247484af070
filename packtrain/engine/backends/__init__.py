"""Where values live and what runs on them: `numpy` is the specification, `cpu` the product."""

from importlib import import_module

from packtrain.common.errors import InputError, in_keywords
from packtrain.engine.backends.host import BACKENDS, HOST, Aside, Backend, Host, Made, aligned
from packtrain.engine.backends.target import CPU, Target

__all__ = [
    "CPU", "DEVICES", "HOST", "Aside", "Backend", "Host", "Made", "Target", "aligned", "backend", "cpu", "numpy",
    "target",
]  # fmt: skip

cpu, numpy = BACKENDS["cpu"], BACKENDS["numpy"]
# each with its module here, loaded when the name is asked for, in whose BACKENDS it is
DEVICES = {"cpu": "host", "numpy": "host"}
DEVICES |= dict.fromkeys(("torch:cpu", "cuda", "mps"), "torch_backend")


@in_keywords
def backend(device: str) -> Backend:
    """The backend of a name of DEVICES, or of NAME:N, its Nth memory. Raises InputError."""
    name, _, number = device.rpartition(":")
    kind = name if name in DEVICES and number.isdecimal() else device
    if kind not in DEVICES:
        raise InputError(f"--device {device}: it must be one of {', '.join(DEVICES)}, or NAME:N")
    module = import_module(f"packtrain.engine.backends.{DEVICES[kind]}")
    try:
        selected: Backend = module.BACKENDS[device]
    except KeyError:
        raise InputError(f"--device {device}: {kind} has one memory only") from None
    return selected


def target(device: str) -> Target:
    """All on one backend."""
    return Target.of(backend(device))
