"""A backend is one file and its name in a list: a copy of packtrain gets one whose memory the host cannot read.

Its arrays are no NumPy arrays, its kernels run when somebody waits for them, and are the cpu's: all must come out as on
the cpu, bit for bit.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import packtrain

FAR = '''"""A memory of its own, and the kernels of the cpu on it, which run when somebody waits for them."""

import os
import weakref
from dataclasses import dataclass

import numpy as np

from packtrain.engine.backends.host import Host
from packtrain.engine.tensor import Kernel

CPU = Host("cpu", alignment=256)
HELD = {"now": 0, "most": 0}
WAITING = []


def hold(nbytes):
    HELD["now"] += nbytes
    HELD["most"] = max(HELD.values())


class Buffer:
    def __init__(self, nbytes):
        self._bytes = CPU.alloc(nbytes)
        hold(nbytes)
        weakref.finalize(self, hold, -nbytes)


class Array:
    def __init__(self, buffer, offset, spec, strides):
        self._buffer, self._offset, self._spec, self._strides = buffer, offset, spec, strides

    def __array__(self, *given, **named):
        raise TypeError("the host cannot read this")

    def _near(self):
        return CPU.view(self._buffer._bytes, self._offset, self._spec, self._strides)


def near(x):
    if isinstance(x, tuple):
        return tuple(map(near, x))
    return x._near() if isinstance(x, Array) else x


def later(run, *given, **named):
    WAITING.append((run, given, named))


def launched(run):
    def launch(*arrays, **attrs):
        named = {name: near(value) for name, value in attrs.items()}
        later(run, *map(near, arrays), **named)

    return launch


@dataclass(frozen=True)
class Far:
    name: str = "far"
    space: str = "far"
    alignment: int = 256
    import_nbytes: int = 0

    @property
    def capacity(self):
        return int(os.environ["FAR_NBYTES"]) if "FAR_NBYTES" in os.environ else None

    @property
    def on_host(self):
        return self.capacity is None

    def kernel(self, op, inputs):
        known = CPU.kernel(op, inputs)
        return known and Kernel(launched(known.run), known.strided)

    def workspaces(self, op, inputs, attrs):
        return CPU.workspaces(op, inputs, attrs)

    def pool(self, made, buffers=()):
        return 0

    def reserve(self, made):
        pass

    peak_reserved_nbytes = None
    streams = False

    def alloc(self, nbytes):
        return Buffer(nbytes)

    def share(self, values):
        buffer = Buffer(values.nbytes)
        buffer._bytes[:] = CPU.share(values)
        return buffer

    def view(self, buffer, offset, spec, strides):
        return Array(buffer, offset, spec, strides)

    def window(self, array):
        return None

    def write(self, array, values):
        later(np.copyto, array._near(), np.array(values))

    def read(self, array):
        self.sync()
        return array._near().copy()

    def fetch(self, array, there):
        self.sync()
        np.copyto(there, array._near())

    def fill(self, array, byte):
        later(CPU.fill, array._near(), byte)

    def all_finite(self, array):
        self.sync()
        return CPU.all_finite(array._near())

    def overlap(self, a, b):
        return CPU.overlap(a._near(), b._near())

    def recorded_calls(self, made, calls):
        return calls

    def sync(self):
        waiting = WAITING[:]
        WAITING.clear()
        with np.errstate(all="ignore"):
            for run, given, named in waiting:
                run(*given, **named)


BACKENDS = {"far": Far()}
'''
BEGIN = """
import json
import sys
import threading
from pathlib import Path
import numpy as np
import packtrain as pt
from packtrain.engine.backends import CPU, Target, far, target
from packtrain.cli.main import main
from packtrain.planner.machine_speed import rates_path

SIZES = dict(dim=32, layers=4, heads=2, ctx=16, vocab_size=300, batch_size=2, warmup_ratio=0.0)
SMALL = SIZES | dict(steps_per_eval=2, sample_every=2, iters=5, overwrite=True)
assert far.__file__.startswith(sys.argv[1])


def without_offload(device, more):  # where moments live must not depend on how fast this machine seems to be
    return more if device == "cpu" else {"offload": "none"} | more


def train(device, folder=None, **more):
    folder = Path(folder or device)
    folder.mkdir(exist_ok=True)
    return pt.train("text.txt", output=folder / "m.gguf", device=device, **SMALL | without_offload(device, more))


def tune(device, **more):
    Path(device).mkdir(exist_ok=True)
    given = dict(output=f"{device}/t.gguf", device=device, iters=3, ctx=16, batch_size=2, overwrite=True)
    return pt.finetune("q.gguf", "text.txt", **given | without_offload(device, more))


def losses(run):
    lines = map(json.loads, Path(run, "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def same(a, b, *files):
    for file in files:
        assert Path(a, file).read_bytes() == Path(b, file).read_bytes(), file


def freed():
    import gc

    gc.collect()
    return far.HELD["now"]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of packtrain that has the backend, too: a file, and its name in a list."""
    folder = tmp_path_factory.mktemp("far")
    source = Path(packtrain.__file__).parent
    shutil.copytree(source, folder / "packtrain", ignore=shutil.ignore_patterns("__pycache__"))
    backends_dir = folder / "packtrain/engine/backends"
    (backends_dir / "far.py").write_text(FAR)
    listed, old = (backends_dir / "__init__.py").read_text(), 'DEVICES = {"cpu": "host",'
    assert listed.count(old) == 1
    (backends_dir / "__init__.py").write_text(listed.replace(old, f'{old} "far": "far",'))
    words = "bal cem dis hor fin gut"
    (folder / "text.txt").write_text(
        "\n".join(f"{words} {i % 17} {words[: i % 20]}" for i in range(200))
    )
    run(folder, "train('cpu'); pt.quantize('cpu/m.gguf', 'q.gguf', 'q8_0')")
    return folder


def run(folder: Path, script: str, **variables: str) -> str:
    """What the script prints with the copy."""
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + script, str(folder)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), **variables},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_training_is_that_of_the_cpu(folder: Path) -> None:
    script = """
done = train("far")
assert done.losses == losses("cpu/m.run") and len(done.losses) == 5
same("cpu", "far", "m.gguf")
plan = done.plan.plans
assert far.HELD["most"] == plan.nbytes_in("far"), (far.HELD, plan.nbytes_in("far"))
leaves = sum(leaf.spec.nbytes for leaf in plan.leaves.values())
assert plan.nbytes_in("far") >= plan.arena_nbytes + leaves
assert plan.nbytes == plan.loop_nbytes  # nothing of the model in the process
assert freed() == 0
threads, where = pt.kernels.threads(), target("far")  # rates of its own, and a search that knows it
assert rates_path(threads, where).exists() and rates_path(threads, where) != rates_path(threads)
"""
    run(folder, script)


def test_tuning_a_quantized_base_is_that_of_the_cpu(folder: Path) -> None:
    script = """
for device in ("cpu", "far"):
    done = tune(device, lora_dropout=0.1, lr=0.02)
assert done.losses == losses("cpu/t.run") and len(done.losses) == 3
same("cpu", "far", "t.gguf", "t.run/adapter.gguf")
base = sum(array.nbytes for array in pt.models.model_file.open_model("q.gguf").stored().values())
assert done.plan.plans.mapped_nbytes <= base < done.plan.plans.nbytes_in("far")
assert "copied from its file" in str(done.plan) and "not in the total" not in str(done.plan)
for device in ("cpu", "far"):
    tune(device, full=True, output=f"{device}/f.gguf", patience=2, steps_per_eval=1)
same("cpu", "far", "f.gguf")
"""
    run(folder, script)


def test_offloaded_moments_give_the_bits_of_moments_beside_their_weights(folder: Path) -> None:
    script = """
kinds = dict(), dict(optimizer="muon"), dict(max_grad_value=1e-3), dict(optimizer="sgd", momentum=0.9)
for i, more in enumerate(kinds):
    runs = {mode: train("far", f"{mode}{i}", offload=mode, weight_decay=0.3, **more) for mode in ("none", "moments")}
    assert runs["none"].losses == runs["moments"].losses and len(runs["none"].losses) == 5
    moved = [run.plan.plans.nbytes_in("far") for run in runs.values()]
    assert moved[1] < moved[0], moved
    same(f"none{i}", f"moments{i}", "m.gguf")
pt.quantize("cpu/m.gguf", "b.gguf", "bf16")
for mode in ("none", "moments"):  # weights in bf16, rounded stochastically
    Path(mode).mkdir()
    more = dict(full=True, masters="bf16", iters=3, ctx=16, offload=mode)
    tuned = pt.finetune("b.gguf", "text.txt", output=f"{mode}/b.gguf", device="far", **more)
    weights = [leaf for leaf in tuned.plan.plans.leaves.values() if leaf.kind == "weight"]
    assert any(leaf.dtype.name == "bf16" for leaf in weights)
same("none", "moments", "b.gguf")
"""
    run(folder, script)


def test_its_memory_has_a_limit_of_its_own(folder: Path) -> None:
    """Where little is there, values are computed again; where too little is, the run is refused with its name."""
    script = """
most = {limit}
done = train("far", "less", memory="1GiB")
plan = done.plan.plans
assert "recomputed" in str(done.plan) and f"the memory of far, which has" in str(done.plan), str(done.plan)
assert plan.nbytes_in("far") == far.HELD["most"] <= most, (plan.nbytes_in("far"), far.HELD, most)
assert done.peak_nbytes < 1 << 30
flags = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()]
about = ["plan", "train", "--data=text.txt", "--device=far", "--map", "--json=p.json", "--html=p.html", "--svg=p.svg"]
assert main([*about, "-o", "less/p.gguf", "--iters=5", *flags, "--sample-every=2"]) == 0
told = json.loads(Path("p.json").read_text())
assert told["spaces"]["far"]["limit"] == most >= told["spaces"]["far"]["bytes"], told["spaces"]
assert done.losses == losses("cpu/m.run")
same("cpu", "less", "m.gguf")
"""
    full_nbytes = int(
        run(
            folder,
            "print(pt.plan(pt.train, 'text.txt', device='far', offload='none', **SMALL).plans.nbytes_in('far'))",
        )
    )
    limit = full_nbytes - 20_000
    run(folder, script.replace("{limit}", str(limit)), FAR_NBYTES=str(limit))
    refused = """
try:
    train("far", "none")
except pt.DoesNotFit as error:
    assert "does not fit into the memory of far: it has 293.0 KiB" in str(error), error
    assert "the peak of its arena" in str(error)
else:
    raise AssertionError("it was not refused")
for given in (["generate", "cpu/m.gguf", "-p", "bal"], ["eval", "cpu/m.gguf", "--data", "text.txt"]):
    assert main([*given, "--device", "far"]) == 3
"""
    run(folder, refused, FAR_NBYTES="300000")
    little = """
try:
    train("far", "none", memory="20MiB")
except pt.DoesNotFit as error:
    assert "smallest memory that would do" in str(error) and "in this process" in str(error), error
else:
    raise AssertionError("it was not refused")
"""
    run(folder, little)


def test_a_second_memory_steers_the_search(folder: Path) -> None:
    """Weights and activations live in far, whose limit the search keeps, and so does the first space."""
    script = """
from dataclasses import replace
from packtrain.planner import cost_model as cost
from packtrain.planner.cost_model import BackendRates
from packtrain.engine.backends import HOST
from packtrain.planner.budget import plan_within_limits
from packtrain.planner.step_shape import StepShape
from packtrain.planner.plan_request import PlanRequest
from packtrain.planner.plan_search import find_fastest_shape
from packtrain.models import transformer
from packtrain.models.config import Config
from packtrain.engine.optim import AdamW

shape = StepShape(Config(64, 32, 64, 4, 128, 2, 2), 4, 64, max_norm=1.0)
roles = dict.fromkeys(("weight", "moment", "sum"), far.BACKENDS["far"])
weights = [name for name in transformer.weights(shape.config) if name.startswith(("blk.1.", "blk.2."))]
one = dict.fromkeys([f"{kind}{name}" for name in weights for kind in ("", "m/", "v/")], far.BACKENDS["far"])
for homes in (roles, one):
    on = Target(CPU.backends, homes=homes)
    fast, slow = BackendRates(1e11, 1e10), BackendRates(1e10, 1e9)
    request = PlanRequest(AdamW(), replace(fast, backend_rates={"far": slow}), target=on)
    whole = request.make_plans(shape)
    assert whole.device_spaces == ["far"]
    most = {s: request.peak_nbytes(whole, s) + (1 << 20) * (s == HOST) for s in (HOST, "far")}
    limits = {HOST: most[HOST], "far": most["far"] - whole.largest_plan_in("far").arena("far").nbytes // 5}
    answer = find_fastest_shape(shape, replace(request, limits=limits))
    assert answer.is_within_limits and answer.shape != shape, (homes, answer)
    plans = request.make_plans(answer.shape)
    assert all(request.peak_nbytes(plans, s) <= limits[s] * 1.001 for s in limits), (limits, plans.nbytes_in("far"))
    assert find_fastest_shape(shape, replace(request, limits=most)).shape == shape
    refused = find_fastest_shape(shape, replace(request, limits={HOST: most[HOST], "far": 40_000}))
    assert not refused.is_within_limits and refused.suggested_change
    steps = [s for name in ("step", ) for s in whole.placed_graphs[name].steps]
    read = {t for step in steps for t in step.reads}
    own = [slow if s.backend.name == "far" else fast for s in steps]
    each = [cost.call_seconds(s, rates if s.source is None else request.rates, read) for s, rates in zip(steps, own)]
    assert all(cost.call_seconds(s, request.rates) >= cost.copy_seconds(s.results[0].spec.nbytes, slow)
               for s in whole.placed_graphs["step"].copies)
    assert whole.step_seconds(request.rates) == sum(each) > whole.step_seconds(fast)
made = plan_within_limits(shape, replace(request, limits={"far": 40_000}))
assert "does not fit into the memory of far" in made.refusal, made.refusal
"""
    run(folder, script)


def test_it_is_watched_as_the_cpu_is(folder: Path) -> None:
    script = """
with pt.debug("nan,poison,compare,time"):
    for mode in ("none", "moments", "all"):  # these copy values between memories
        watched = train("far", "watched", iters=2, sample_every=0, offload=mode)
        assert watched.losses == losses("cpu/m.run")[:2]
w = pt.weight("w", (3,))
graph = pt.Graph({"y": pt.ops.mul(pt.named("bad", pt.ops.log(w)), w)})
session = pt.Session()
run = session.executor(pt.place(graph, target("far")))
session.set({"w": np.array([1, 0, 2], np.float32)})
with pt.debug("nan"):
    try:
        run()
    except FloatingPointError as error:
        assert "bad is -inf at [1]" in str(error) and "w: f32[3] from 0 to 2" in str(error), error
    else:
        raise AssertionError("nothing was seen")
real = far.CPU.kernel(pt.ops.mul, ())
wrong = lambda y, a, b: (real.run(y, a, b), y.__setitem__(..., y + 1))
pt.ops.mul.kernels["cpu"] = pt.engine.tensor.Kernel(wrong, real.strided)
run = session.executor(pt.place(graph, target("far")))
session.set({"w": np.array([1, 3, 2], np.float32)})
with pt.debug("compare"):
    try:
        run()
    except AssertionError as error:
        assert "mul: mul differs from the specification by 1" in str(error), error
    else:
        raise RuntimeError("nothing was seen")
"""
    run(folder, script)


def test_a_failure_that_comes_late_is_one_of_the_run(folder: Path) -> None:
    script = """
from packtrain.engine.optim import SGD, training_graph

def fails(*arrays, **attrs):
    raise ValueError("too late")

w, session = pt.weight("w", (3,)), pt.Session()
graph = training_graph({"loss": pt.ops.sum(pt.ops.mul(w, w))}, [w], SGD())
name = next(call.op for call in graph.calls if call.op.writes)
name.kernels["cpu"] = pt.engine.tensor.Kernel(fails, True)
run = session.executor(pt.place(graph, target("far")))
session.set({"w": np.ones(3, np.float32)})
try:
    run(SGD().inputs(1))
except ValueError as error:
    assert "too late" in str(error)
else:
    raise AssertionError("it did not fail")
assert session.dirty and "failed during the update" in session.dirty
"""
    run(folder, script)


def test_a_stopped_run_goes_on_bit_for_bit(folder: Path) -> None:
    script = """
stop = threading.Event()
begun = train("far", "again", cancel=stop, on_step=lambda step: step.step == 2 and stop.set())
assert begun.stopped and begun.progress.step == 2
done = train("far", "again", resume=True, overwrite=False)
assert done.losses == losses("cpu/m.run")
same("cpu", "again", "m.gguf")
try:
    train("cpu", "again", resume=True, overwrite=False, iters=6)
except pt.InputError as error:
    assert "device was far and is cpu" in str(error), error
else:
    raise AssertionError("it went on elsewhere")
"""
    run(folder, script)


def test_it_writes_and_measures(folder: Path) -> None:
    script = """
for model in ("cpu/m.gguf", "q.gguf"):
    options = {"n_predict": 9, "seed": 3, "activations": "f32"}
    said = [pt.generate(model, "bal cem", device=device, **options) for device in ("cpu", "far")]
    assert said[0].ids == said[1].ids and len(said[0].ids) == 9
    lost = [pt.evaluate(model, "text.txt", ctx=16, device=device).losses[model] for device in ("cpu", "far")]
    assert lost[0].size and np.array_equal(*lost)
assert main(["generate", "q.gguf", "--device", "fra"]) == 2
"""
    run(folder, script)


def test_a_graph_over_both_gives_what_one_gives(folder: Path) -> None:
    script = """
from packtrain.planner.training_plans import make_plans
from packtrain.planner.step_shape import StepShape
from packtrain.models.config import Config
from packtrain.models import transformer
from packtrain.engine.optim import AdamW
from packtrain.training.training_engine import TrainingEngine

shape = StepShape(Config(64, 16, 32, 3, 64, 2, 2), 2, 16, max_norm=1.0)
there = {name: far.BACKENDS["far"] for name in transformer.weights(shape.config) if name.startswith("blk.1.")}
there |= {f"{kind}/{name}": home for name, home in there.items() for kind in "mv"}
random = np.random.default_rng(0)
ids = random.integers(0, 64, (5, 2, 17)).astype(np.int32)
found = []
for homes in ({}, there, dict.fromkeys(("weight", "moment"), far.BACKENDS["far"])):
    on = Target(CPU.backends, homes=homes)
    engine = TrainingEngine(make_plans(shape, AdamW(), target=on), AdamW())
    assert bool(homes) == bool(engine.plans.device_spaces)
    transformer.initialize_weights(shape.config, 0, engine.session.fill)
    batches = [
        {"tokens": x[:, :-1], "targets": x[:, 1:], "weights": np.ones((2, 16), np.float32),
         "pos": np.tile(np.arange(16, dtype=np.int32), (2, 1)), "seq": np.zeros((2, 16), np.int32)}
        for x in ids
    ]
    found.append([engine.step([batch], i + 1, 1e-2).loss for i, batch in enumerate(batches)])
assert found[0] == found[1] == found[2] and len(set(found[0])) == 5, found
"""
    run(folder, script)
