"""Times our f32 products beside PyTorch's, which run in a process of their own; both take turns."""

from benchmarks.peer_process import PeerProcess
from packtrain import kernels
from packtrain.common.events import Counted
from packtrain.devtools.bench import products
from packtrain.devtools.bench.bench_table import BenchTable
from packtrain.devtools.bench.products import Shapes, TimedProduct
from packtrain.devtools.bench.timing import CLOCK, Clock, burst_seconds

COLUMNS = products.COLUMNS | {"PyTorch GFLOP/s": ".1f", "× PyTorch": ".2f"}


def time_beside_torch(
    shapes: Shapes, rounds: int, count: Counted, clock: Clock = CLOCK
) -> list[TimedProduct]:
    """Time every product in every form, beside PyTorch's."""
    timed_products = products.make_products(shapes)
    with PeerProcess("benchmarks.torch_peer", "products", kernels.threads()) as peer:
        for i, timed in enumerate(timed_products):
            count(i + 1, len(timed_products))
            bound_product = products.bind_product(timed.product)
            for _ in range(rounds):
                timed.ours.append(burst_seconds(bound_product, clock))
                timed.peer_seconds.append(peer(timed.product))
    return timed_products


def f32_table(shapes: Shapes, rounds: int, count: Counted) -> BenchTable:
    """Return the table of products.f32_table with PyTorch's rates and the ratio to them."""
    timed_products = time_beside_torch(shapes, rounds, count)
    rows = [
        [*timed.labels, *map(timed.rate, (timed.ours, timed.peer_seconds)), timed.ratio]
        for timed in timed_products
    ]
    note = products.ratio_summary([timed.ratio for timed in timed_products], "PyTorch's")
    return BenchTable("products", products.TITLE, COLUMNS, rows, [note])
