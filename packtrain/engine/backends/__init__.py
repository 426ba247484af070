"""Backends by device name: `numpy` runs the specification, `cpu` the compiled kernels."""

from importlib import import_module

from packtrain.common.errors import InputError, name_keywords
from packtrain.engine.backends import host
from packtrain.engine.backends.host import HOST, Backend, Host, OpCall, SeparateHost, aligned
from packtrain.engine.backends.target import CPU, Target

__all__ = [
    "CPU", "DEVICES", "HOST", "Backend", "Host", "OpCall", "SeparateHost", "Target", "aligned", "backend", "cpu",
    "numpy", "target",
]  # fmt: skip

cpu, numpy = host.BACKENDS["cpu"], host.BACKENDS["numpy"]
# device -> module of this package that is loaded on first use and holds the backend in its BACKENDS
DEVICES = {"cpu": "host", "numpy": "host"}
DEVICES |= dict.fromkeys(("torch:cpu", "cuda", "mps"), "torch_backend")


@name_keywords
def backend(device: str) -> Backend:
    """Return the backend of a device, such as `cpu` or `cuda:1`, the second GPU. Raises InputError if unknown."""
    name, _, device_index = device.rpartition(":")
    device_kind = name if name in DEVICES and device_index.isdecimal() else device
    if device_kind not in DEVICES:
        raise InputError(f"--device {device}: it must be one of {', '.join(DEVICES)}, or NAME:N")
    module = import_module(f"packtrain.engine.backends.{DEVICES[device_kind]}")
    try:
        selected_backend: Backend = module.BACKENDS[device]
    except KeyError:
        raise InputError(f"--device {device}: {device_kind} has one memory only") from None
    return selected_backend


def target(device: str) -> Target:
    """Return a Target (where a graph runs) that places all calls and leaves on one device."""
    return Target.for_backend(backend(device))
