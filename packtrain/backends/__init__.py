"""Where values live and what runs on them: `numpy` is the specification, `cpu` the product."""

from packtrain.backends.host import Backend, Host

numpy = Host("numpy")
cpu = Host("cpu")

__all__ = ["Backend", "Host", "cpu", "numpy"]
