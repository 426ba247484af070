"""From the settings of `packtrain train` to a kernel a step passes few types: those of all values on the call stack.

Counted are the types of packtrain that the local variables of its functions have while a kernel of a step runs, and
those of their attributes, which a reader must know to follow them; but not what Events and a Watch write with.
A step of a graph costs few Python calls until it runs, and `benchmarks.calls` counts those of a whole command.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import packtrain as pt
from packtrain.cli.main import main
from packtrain.common.events import Events
from packtrain.dtypes import f32
from packtrain.engine.optim.adamw import AdamW, opt_step_adamw
from packtrain.engine.tensor import Kernel
from packtrain.models import transformer
from packtrain.models.lora import Lora
from packtrain.planner.step_shape import BaseModel, StepShape
from packtrain.planner.training_plans import TrainingPlans, make_plans
from packtrain.training.monitoring import RunMonitor
from tests.models import CONFIG

MAX_CLASSES = 20
# Python calls for each step of a LoRA graph: 32.3 to build, place and plan it and 5.7 to bind it, once 97 and 40
MAX_PLANNING_CALLS, MAX_BINDING_CALLS = 34, 6.5


def is_packtrain_object(value: Any) -> bool:
    return type(value).__module__.split(".")[0] == pt.__name__ and not isinstance(value, type)


def on_stack(frame: FrameType | None) -> Iterator[Any]:
    """The values of packtrain's types in the local variables of its functions, from this frame outwards."""
    while frame is not None:
        if frame.f_globals["__name__"].startswith(pt.__name__):
            yield from filter(is_packtrain_object, frame.f_locals.values())
        frame = frame.f_back


def attribute_values(value: Any) -> Iterator[Any]:
    """What a value has as attributes, or as elements of attributes."""
    slots = (getattr(cls, "__slots__", ()) for cls in type(value).__mro__)
    names = {
        name
        for slot_names in slots
        for name in ([slot_names] if isinstance(slot_names, str) else slot_names)
    }
    for name in names | vars(value).keys() if hasattr(value, "__dict__") else names:
        attribute = getattr(value, name, None)
        elements: Iterable[Any] = [attribute]
        if isinstance(attribute, Mapping):
            elements = [*attribute.keys(), *attribute.values()]
        elif isinstance(attribute, list | tuple | set | frozenset):
            elements = attribute
        yield from filter(is_packtrain_object, elements)


def test_a_step_passes_few_types(tmp_path: Path, monkeypatch) -> None:
    kernel, seen = opt_step_adamw.kernels["cpu"], dict[type, None]()

    def run(*arrays: Any, **attrs: Any) -> None:
        if not seen:
            stack = list(on_stack(sys._getframe(1)))
            assert len(stack) > 10  # the whole way is there
            inner = (
                y
                for x in stack
                if not isinstance(x, RunMonitor | Events)
                for y in attribute_values(x)
            )
            seen.update(dict.fromkeys(type(x) for x in (*stack, *inner)))
        kernel.run(*arrays, **attrs)

    monkeypatch.setitem(opt_step_adamw.kernels, "cpu", Kernel(run, kernel.strided))
    (tmp_path / "t.txt").write_text("\n".join(f"a line of words {i}" for i in range(300)))
    io_flags = ["--data", str(tmp_path / "t.txt"), "-o", str(tmp_path / "m.gguf"), "--iters", "1"]
    size_flags = "--dim 32 --layers 1 --heads 2 --ctx 16 --vocab-size 300 --batch-size 2"
    assert main(["train", *io_flags, *size_flags.split()]) == 0
    assert 10 < len(seen) < MAX_CLASSES, sorted(cls.__qualname__ for cls in seen)


def count_calls(run: Callable[[], object]) -> int:
    """The Python frames in packtrain's files that begin or continue during a run."""
    num_calls = 0

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal num_calls
        num_calls += event == "call" and frame.f_code.co_filename.startswith(folder)

    folder, profiler = str(Path(pt.__file__).parent), sys.getprofile()
    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(profiler)
    return num_calls


def test_a_step_of_a_graph_costs_few_python_calls_before_it_runs() -> None:
    config = replace(CONFIG, lora=Lora((("blk.*", 4),), 0, 4.0))
    base = BaseModel(tuple((name, f32) for name in transformer.weights(CONFIG)))
    shape = StepShape(config, 2, 16, base=base, evaluate=False)
    plans = list[TrainingPlans]()
    planning_calls = count_calls(lambda: plans.append(make_plans(shape, AdamW())))
    placed_graphs, session = plans[0].placed_graphs, pt.Session()
    num_steps = len(placed_graphs["step"].steps)
    binding_calls = count_calls(lambda: session.executors(placed_graphs, plans[0].plans))
    assert num_steps > 100
    assert planning_calls < MAX_PLANNING_CALLS * num_steps, planning_calls / num_steps
    assert binding_calls < MAX_BINDING_CALLS * num_steps, binding_calls / num_steps
