"""A LoRA step on a pretrained base, beside transformers with PEFT: python -m benchmarks.peft_step BASE.gguf

    python -m benchmarks.peft_step BASE.gguf [--rows 4] [--time 557] [--rounds 3] [--memory 2GiB]

Rank 16 on every matrix of the blocks, AdamW, clipping; the same tokens, of this project's own documents, and the first
40 % of each row are a prompt that is not learnt. packtrain maps the file, keeps its weights packed, and its private
memory to --memory, as finetune does; transformers unpacks the same file to f32, or to bf16 under autocast, with two
kinds of attention. Each side runs in a process of its own; they take turns, step by step. Private memory is sampled in
the first step, whose time does not count. Exit code 1 if the losses of the first step differ by more than 3 %; later
ones differ by the initial values of the adapters. It needs torch, transformers, peft and gguf, and 20 GB for the steps
above. Only ratios mean something on a busy machine; `waited` is the time in which threads waited for the processor, of
each second.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.peer_process import PeerProcess
from packtrain import kernels
from packtrain.common.memory import parse_size
from packtrain.devtools.bench import training
from packtrain.devtools.bench.bench_table import BenchTable
from packtrain.devtools.bench.timing import BenchProgram, TimedStep, paired, timed_steps
from packtrain.engine.optim import AdamW
from packtrain.kernels.runtime.environment import has_cpu_feature
from packtrain.models.model_file import open_model

ROOT = Path(__file__).parent.parent
PARTS = "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
RANK, ALPHA = 16, 32.0
UNLEARNT = 0.4  # of the positions
WARM = 1  # steps whose time does not count: the first, which is watched for memory
LIKE = 0.03  # by how much the losses of the first step may differ, relatively; bf16 has 8 bits
OURS, ATTENTION = "packtrain", ("sdpa", "eager")
COLUMNS = {
    "program": "", "precision": "", "s": ".2f", "ours × as fast": ".2f", "peak MiB": ",.0f",
    "ours × memory": ".3f", "first loss": ".4f", "last loss": ".4f", "waited": ".0%",
}  # fmt: skip


@dataclass(slots=True, kw_only=True)
class TuningSide(BenchProgram):
    """A program that tunes the base."""

    num_warmup: int = WARM

    def peer(self, base: Path, ids: np.ndarray, memory: int) -> PeerProcess:
        common_args = kernels.threads(), base, ids
        if self.name == OURS:
            return PeerProcess("benchmarks.peft_step", "ours", *common_args, self.precision, memory)
        peer_args = self.name.split()[-1], self.precision == "bf16"
        return PeerProcess("benchmarks.peft_step", "theirs", *common_args, *peer_args)

    def row(self, baseline: BenchProgram) -> list[str | float | None]:
        speed = None if self is baseline else paired(baseline.seconds, self.seconds)
        memory = None if self is baseline else baseline.nbytes / self.nbytes
        return [
            *(self.name, self.precision, statistics.median(self.seconds), speed),
            *(
                self.nbytes / 2**20,
                memory,
                self.steps[0].loss,
                self.steps[-1].loss,
                self.waited_share,
            ),
        ]


def text_ids(base: Path, rows: int, time: int) -> np.ndarray:
    """Tokens of this project's documents."""
    pages = (path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    ids = open_model(base).tokenizer().encode("\n".join(pages))
    if len(ids) < rows * time:
        raise SystemExit(f"the documents have {len(ids)} tokens; --rows times --time must be less")
    return np.array(ids[: rows * time], np.int32).reshape(rows, time)


def is_learnt(time: int) -> np.ndarray:
    """Whether a position's token is a target."""
    return np.arange(time) >= round(UNLEARNT * time)


def ours(
    threads: int, base: Path, ids: np.ndarray, precision: str, memory: int
) -> Callable[..., TimedStep]:
    kernels.set_threads(threads)
    kernels.load_all((*kernels.TRAINING_KERNELS, "update"))
    rows, time = ids.shape
    setup = training.of_base(base, rows, time, precision, memory)
    targets = np.where(is_learnt(time), ids, -1)
    targets = np.append(targets[:, 1:], np.full((rows, 1), -1), 1).astype(np.int32)
    loss_weights = (targets >= 0).astype(np.float32)
    arrays = {"tokens": ids, "targets": targets, "weights": loss_weights}
    batch = {**training.batch_of(open_model(base).config, rows, time), **arrays}
    setup.batches = training.split_batch(batch, len(setup.batches[0]["tokens"]))
    return timed_steps(setup.step)


def theirs(
    threads: int, base: Path, ids: np.ndarray, attention: str, half: bool
) -> Callable[..., TimedStep]:
    import peft
    import torch
    import transformers

    torch.set_num_threads(threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        base.parent,
        gguf_file=base.name,
        dtype=torch.bfloat16 if half else torch.float32,
        attn_implementation=attention,
        local_files_only=True,
    )
    low = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=[*PARTS], task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, low).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    adamw = AdamW()
    update = torch.optim.AdamW(
        trained, training.LR, (adamw.beta1, adamw.beta2), adamw.eps, adamw.weight_decay
    )
    tokens = torch.from_numpy(ids).long()
    labels = torch.where(torch.from_numpy(is_learnt(ids.shape[1])), tokens, -100)

    def step() -> float:
        update.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss = model(input_ids=tokens, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, training.MAX_NORM)
        update.step()
        return float(loss.item())

    return timed_steps(step)


def measure_sides(
    sides: Sequence[TuningSide], base: Path, ids: np.ndarray, memory: int, rounds: int
) -> None:
    """Steps in turn."""
    with ExitStack() as stack:
        peers = [stack.enter_context(side.peer(base, ids, memory)) for side in sides]
        for turn in range(WARM + rounds):
            for side, peer in zip(sides, peers, strict=True):
                side.steps.append(peer(turn == WARM - 1))
                cost_text = f"{side.steps[-1].seconds:.2f} s, {side.nbytes >> 20} MiB"
                print(
                    f"{side.name} {side.precision}, step {turn + 1}: {cost_text}",
                    file=sys.stderr,
                )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base", type=Path, metavar="BASE.gguf")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--time", type=int, default=557, help="tokens of a row")
    parser.add_argument("--rounds", type=int, default=3, help="steps that count")
    parser.add_argument("--memory", default="2GiB", help="what our side keeps to")
    parser.add_argument("--precision", nargs="+", choices=("f32", "bf16"),
                        default=("f32", "bf16") if has_cpu_feature("avx512bf16") else ("f32",))  # fmt: skip
    parser.add_argument("--attention", nargs="+", choices=ATTENTION, default=ATTENTION)
    args = parser.parse_args()
    if not args.base.exists():
        parser.error(f"there is no {args.base}")
    return args


def main() -> int:
    args = parse_args()
    memory = parse_size(args.memory, "--memory")
    ids, good = text_ids(args.base, args.rows, args.time), True
    size = args.base.stat().st_size / 2**20
    for precision in args.precision:
        names = (OURS, *(f"PEFT {name}" for name in args.attention))
        sides = [TuningSide(name=name, precision=precision) for name in names]
        measure_sides(sides, args.base, ids, memory, args.rounds)
        title = f"A LoRA step on {args.base.name}, {args.rows} × {args.time} tokens"
        note = f"Ours maps {size:.0f} MiB of the base beside its private memory."
        rows = [side.row(sides[0]) for side in sides]
        print(BenchTable("peft", title, COLUMNS, rows, [note]).text() + "\n", flush=True)
        losses = [side.steps[0].loss for side in sides]
        good = good and max(losses) <= min(losses) * (1 + LIKE)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
