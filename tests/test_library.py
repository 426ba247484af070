"""The commands as functions: the same results, the same sentences, and a handle."""

import inspect
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import packtrain as pt
from packtrain.common.errors import DoesNotFit, InputError
from packtrain.common.events import StepReport
from packtrain.common.options import option_fields
from packtrain.gguf import GGUF
from packtrain.training.finetune_settings import TuneSettings
from packtrain.training.train_settings import TrainSettings

SMALL = {"dim": 32, "layers": 1, "heads": 2, "kv_heads": 2, "ffn": 32, "ctx": 32, "batch_size": 2}
SMALL |= {"vocab_size": 300, "tensorboard": False}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n".join(f"the {i} cats see {i * 7 % 13} dogs." for i in range(400)))
    return path


def weights(path: Path) -> dict[str, bytes]:
    gguf = GGUF(path)
    return {name: gguf.array(name).tobytes() for name in gguf.entries}


def test_training_tells_every_step_and_gives_a_result(text: Path, tmp_path: Path) -> None:
    steps, plans, said, saved = list[StepReport](), [], list[str](), list[Path]()
    done = pt.train(
        text, output=tmp_path / "m.gguf", iters=4, **SMALL,
        on_step=steps.append, on_plan=plans.append, on_message=said.append, on_save=saved.append,
    )  # fmt: skip
    assert [s.step for s in steps] == [1, 2, 3, 4] and {s.steps for s in steps} == {4}
    assert done.losses == [s.loss for s in steps] and not done.stopped
    assert steps[-1].val_loss == done.progress.last and done.output.exists()
    assert plans == [done.plan]
    assert saved == [done.folder / "checkpoint.gguf"]
    assert any(line.startswith("trained 4 steps") for line in said)


def test_a_program_stays_within_its_plan(text: Path, tmp_path: Path) -> None:
    code = f"""import packtrain as pt
done = pt.train({str(text)!r}, output={str(tmp_path / "m.gguf")!r}, iters=4, **{SMALL!r})
assert done.peak_nbytes <= done.plan.planned_nbytes, (done.peak_nbytes, done.plan.planned_nbytes)
"""
    subprocess.run([sys.executable, "-c", code], check=True)  # nothing else takes memory there


def test_a_second_run_in_a_process_gives_the_same(text: Path, tmp_path: Path) -> None:
    first = pt.train(text, output=tmp_path / "a.gguf", iters=3, **SMALL)
    second = pt.train(text, output=tmp_path / "b.gguf", iters=3, **SMALL)
    assert first.losses == second.losses
    assert weights(first.output) == weights(second.output)


def test_a_stop_from_another_thread_saves_and_returns(text: Path, tmp_path: Path) -> None:
    started = threading.Event()
    options = {"output": tmp_path / "m.gguf", "iters": 100_000, **SMALL}
    run = pt.start(pt.train, text, **options, on_step=lambda step: started.set())
    assert started.wait(60)
    run.stop()
    done = run.result(60)
    assert done.stopped and run.done and not done.output.exists()
    steps = done.progress.step
    assert 1 <= steps < 100_000 and (done.folder / "checkpoint.gguf").exists()
    options |= {"iters": steps + 2}
    mapped = list[bool]()  # a mapped file takes room on the disk after saves have replaced it

    def record_mapping(step: StepReport) -> None:
        mapped.append(str(done.folder) in Path("/proc/self/maps").read_text())

    on = pt.train(text, **options, resume=True, on_step=record_mapping)
    assert on.progress.step == steps + 2 and not on.stopped and mapped == [False, False]


def test_a_task_in_a_thread_raises_where_its_result_is_asked_for(tmp_path: Path) -> None:
    run = pt.start(pt.train, tmp_path / "none.txt", output=tmp_path / "m.gguf")
    with pytest.raises(InputError, match=r"none\.txt"):
        run.result(60)


def test_errors_are_the_sentences_of_the_command_line_with_keywords(
    text: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"^batch_size is 0; it must be 1 or more"):
        pt.train(text, output=tmp_path / "m.gguf", batch_size=0)
    with pytest.raises(InputError, match=r"on_step is 5; it must be a function"):
        pt.train("none.txt", on_step=5)
    with pytest.raises(InputError, match=r"cancel is 5; it must be a threading\.Event"):
        pt.train("none.txt", cancel=5)
    with pytest.raises(InputError, match=r"^there is no setting itres; did you mean iters"):
        pt.train(text, output=tmp_path / "m.gguf", itres=3)
    for memory in ("10MiB", 10 << 20):
        with pytest.raises(DoesNotFit, match=r"10(\.0 )?MiB.*the smallest memory that would do is"):
            pt.train(text, output=tmp_path / "m.gguf", memory=memory, **SMALL)
    with pytest.raises(InputError, match=r"plan takes pt\.train or pt\.finetune"):
        pt.plan(pt.evaluate, text)


def test_columns_are_a_dict_too(text: Path, tmp_path: Path) -> None:
    rows = [{"Body, all": line} for line in text.read_text().splitlines()]
    options = {"output": tmp_path / "m.gguf", "iters": 1, **SMALL}
    planned = pt.plan(pt.train, rows, columns={"Body, all": "text"}, **options)
    assert planned.job.settings.columns == '"Body, all"=text'


def test_a_plan_is_that_of_the_run(text: Path, tmp_path: Path) -> None:
    options = {"output": tmp_path / "m.gguf", "iters": 1, **SMALL}
    planned = pt.plan(pt.train, text, **options)
    assert "total" in str(planned) and planned.refusal is None and not (tmp_path / "m.run").exists()
    done = pt.train(text, **options)
    assert planned.plans.nbytes == done.plan.plans.nbytes
    small = pt.plan(pt.train, text, memory="10MiB", **options)
    assert small.refusal is not None and small.minimum() > 10 << 20
    assert "memory" in small.refusal and "--" not in small.refusal  # keywords, not flags


def test_sizes_that_are_named_run_in_the_same_process(text: Path, tmp_path: Path) -> None:
    """A search beside loaded kernels takes more than the run; the smallest plans are known by then."""
    shape = {"layers": 4, "ctx": 128, "batch_size": 8}
    options = {"output": tmp_path / "m.gguf", "iters": 1, "overwrite": True, **SMALL | shape}
    with pytest.raises(DoesNotFit, match="memory that would do") as refusal:
        pt.train(text, memory="10MiB", **options)
    named = re.search(r"would do is about (\d+)MiB", str(refusal.value))
    assert named is not None
    assert pt.train(text, memory=f"{named[1]}MiB", **options).progress.step == 1
    minimum = pt.plan(pt.train, text, **options).minimum()
    assert pt.train(text, memory=minimum, **options).progress.step == 1


def test_tuning_measuring_and_writing(text: Path, tmp_path: Path) -> None:
    base = pt.train(text, output=tmp_path / "base.gguf", iters=1, **SMALL | {"ctx": 128}).output
    done = pt.finetune(base, text, output=tmp_path / "t.gguf", iters=2, ctx=32, lora_rank=4)
    assert np.isfinite(done.progress.base) and done.output.exists()
    evaluation = pt.evaluate([base, done.output], text, ctx=32)
    assert len(evaluation.losses) == 2 and evaluation.same and evaluation.loss().value > 0
    pieces = list[str]()
    generated = pt.generate(done.output, "the", n_predict=6, temp=0, on_text=pieces.append)
    assert str(generated) == "".join(pieces) and len(generated.ids) <= 6
    merged = pt.merge(base, done.folder / "adapter.gguf", tmp_path / "merged.gguf")
    assert merged.changed > 0 and merged.output.exists()
    smaller = pt.quantize(base, tmp_path / "q.gguf", "Q8_0")
    assert 0 < smaller.nbytes < smaller.before_nbytes
    assert pt.embed(base, ["the", "cat"], on_message=pieces.append).shape == (2, 32)
    talk = pt.chat(base, n_predict=4, temp=0)
    assert len(talk.answer("the").ids) <= 4 and talk.messages[-1]["role"] == "assistant"


@pytest.mark.parametrize(
    "name", ["train", "finetune", "evaluate", "generate", "chat", "embed", "quantize", "merge"]
)
def test_signatures_show_settings_and_callbacks(name: str) -> None:
    shown = inspect.signature(getattr(pt, name)).parameters
    assert {"on_message", "cancel"} <= shown.keys()
    if name in ("train", "finetune"):
        assert (
            shown["iters"].default is None
            and shown["iters"].annotation is not inspect.Parameter.empty
        )
        assert len(str(inspect.signature(getattr(pt, name)))) < 1100 and "settings" in shown


def test_every_setting_of_a_run_is_a_keyword_of_one_group() -> None:
    groups = vars(pt.options).values()
    names = [name for group in groups for name in inspect.signature(group).parameters]
    fields = {f.name: f for cls in (TrainSettings, TuneSettings) for f in option_fields(cls)}
    positional = {name for name, field in fields.items() if field.metadata.get("positional")}
    assert sorted(names) == sorted(fields.keys() - positional)
    assert "nesterov: bool = False" in pt.options.optimizer.__doc__


def test_groups_of_options_are_keywords_of_a_run(tmp_path: Path, text: Path) -> None:
    base = pt.train(text, output=tmp_path / "base.gguf", iters=1, **SMALL).output
    lora = pt.options.lora(lora_rank=2, lora_modules="attn")
    assert lora == {"lora_rank": 2, "lora_modules": "attn"}
    steps = pt.options.training(iters=2) | pt.options.data(ctx=32) | pt.options.output(quiet=True)
    done = pt.finetune(base, text, output=tmp_path / "t.gguf", merge="none", **lora, **steps)
    assert done.progress.step == 2 and done.plan.job.settings.lora_rank == ("2",)
    with pytest.raises(
        InputError, match=r"lora_rnk is no setting of LoRA; did you mean lora_rank\?"
    ):
        pt.options.lora(lora_rnk=8)
