"""PyTorch's side of a comparison. Importing this loads PyTorch; only processes of their own do."""

from benchmarks.torch_llama import Llama, Trained, optimizer
from packtrain import kernels
from packtrain.devtools.bench.bench_ops import BACK, FORWARD
from packtrain.devtools.bench.timing import burst_seconds, timed_steps
from packtrain.devtools.bench.training import LR, MAX_NORM, ROWS, batch_of
from packtrain.models.config import PRESETS
from tests.models import initial_weights

torch = kernels.torch()


def products(threads):
    """Median seconds of a product, with its result in place."""
    torch.set_num_threads(threads)
    cached = {}

    def turn(product):
        if product not in cached:
            cached.clear()
            cached[product] = operands(product)
        a, b, y = cached[product]
        return burst_seconds(lambda: torch.mm(a, b, out=y))

    return turn


def operands(product):
    m, n, k = product.m, product.n, product.k
    x, dy, w = (torch.randn(shape) for shape in ((m, k), (m, n), (n, k)))
    a, b, y = {FORWARD: (x, w.T, dy), BACK: (dy, w, x)}.get(product.form, (dy.T, x, w))
    torch.mm(a, b, out=y)
    return a, b, y


def steps(threads, preset, compiled, bf16):
    """Steps of the same model, values and tokens as ours."""
    torch.set_num_threads(threads)
    config = PRESETS[preset]
    model = Llama(config, initial_weights(config), real=compiled)
    batch = batch_of(config, ROWS[preset], config.context_length)
    return timed_steps(training(model, batch, compiled, bf16))


def training(model, batch, compiled, bf16, device="cpu"):
    """A step of the model on the device, which returns its loss."""
    model = model.to(device)
    compiled_model = torch.compile(model) if compiled else model

    def forward(*args):
        with torch.autocast(device.partition(":")[0], torch.bfloat16, enabled=bf16):
            return compiled_model(*args)

    trained = Trained(model, optimizer(model, LR), MAX_NORM, forward)
    return lambda: trained.step([batch], LR)
