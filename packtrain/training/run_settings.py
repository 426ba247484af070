"""Settings that train and finetune share, with help and rules: the source of flags, run.yaml and checkpoints."""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from packtrain.common import options
from packtrain.common.memory import parse_size
from packtrain.common.options import DATA, MEMORY, OUTPUT, RESOURCES, STOPPING, TRAINING, UPDATE
from packtrain.data.chat_template import TEMPLATES
from packtrain.data.text.documents import has_valid_file
from packtrain.dtypes import MERGEABLE, PRECISIONS
from packtrain.engine.backends import Target
from packtrain.engine.optim import OPTIMIZERS
from packtrain.models.attention_choice import AUTO, FLASH_HELP, FLASH_MODES
from packtrain.planner.device_spread import DeviceSpread, parse_spread
from packtrain.training.lr_schedule import LR_SCHEDULES

T = TypeVar("T")
SKIP_BAD_HELP = (
    "skip records that cannot be used instead of refusing the file; the first five are listed"
)
MAX_CONTEXT = 1 << 24  # tokens of a context
CHAT_TEMPLATE = f"chat template to use instead of the model's own: {', '.join(TEMPLATES)}, a file, or the text of one"
DEVICE_HELP = (
    "what computes, and whose memory holds the model; numpy is the specification, slow and with memory"
    " beside the plan; torch:cpu, cuda and mps need PyTorch (packtrain[torch])"
)
DEVICES_HELP = "several by commas share out the blocks; cpu:1, torch:cpu:1 or cuda:1 is another memory of its kind"
VALID_FILE = {"has_valid_file": "with the valid file in the folder --data"}
MAPS_WEIGHTS = {"maps_weights": "in train and with --full, whose weights are private memory"}
ALL_TURNS = {"mask_prompt=False": "which trains on all turns"}
# whether there is validation data is known once the data is read
VALIDATING = partial(STOPPING, requires={"has_validation": "without validation data"})
OUTPUT_TYPES = tuple(str(dtype) for dtype in MERGEABLE)


def with_optimizer_options(cls: type[T]) -> type[T]:
    """Class decorator: add the options that optimizers declare, after `optimizer`. Raises TypeError for equal names."""
    option_hints: dict[str, Any] = {}
    for optimizer_class in OPTIMIZERS.values():
        hints = get_type_hints(optimizer_class)
        option_hints |= {f.name: hints[f.name] for f in options.option_fields(optimizer_class)}
        for f in options.option_fields(optimizer_class):
            existing = vars(cls).get(f.name, f)
            if (existing.default, existing.metadata) != (f.default, f.metadata):
                raise TypeError(f"{optimizer_class.name}: another setting is called {f.name}")
            setattr(cls, f.name, field(default=f.default, metadata=f.metadata))
    hints = dict[str, Any]()
    for name, hint in cls.__annotations__.items():
        hints |= {name: hint, **(option_hints if name == "optimizer" else {})}
    cls.__annotations__ = hints
    return cls


@dataclass(frozen=True)
@with_optimizer_options
class RunSettings:
    """Settings of every training run, including those of all optimizers."""

    data: Path | None = options.SOURCE(
        None, "text to train on: a .txt, .jsonl, .csv or .parquet file, or a folder of them"
    )
    output: Path = OUTPUT(
        Path("model.gguf"), "GGUF file to write; checkpoints and logs go to the folder NAME.run next to it",
        flags="-o",
    )  # fmt: skip
    ctx: int | None = DATA(
        None, "context length in tokens (default: the preset's)", flags="-c --max-seq-length", min_value=2,
        max_value=MAX_CONTEXT,
    )  # fmt: skip
    separator: str | None = DATA(
        None, "text between two documents of a .txt file (default: <|endoftext|>, if present)",
        conflicts={"sample_start": "which begins windows there"},
    )  # fmt: skip
    val_split: float = DATA(
        0.05, "share of the data held out for validation if it has no valid file", min_value=0, max_value=0.5,
        conflicts=VALID_FILE,
    )  # fmt: skip
    skip_bad: bool = DATA(False, SKIP_BAD_HELP)
    shuffle_samples: bool | None = DATA(
        None,
        "shuffle samples before short ones share a window, anew in each epoch, so that their neighbours change"
        " (default: on; a resumed run that began without it stays without)",
        conflicts={
            "fill_samples=False": "", "pack=False": "", "sample_start": "which begins windows there"
        },
    )  # fmt: skip
    columns: str | None = DATA(None, options.COLUMNS, metavar="NAME=FIELD,…")

    batch_size: int = TRAINING(8, "sequences per micro-batch", min_value=1)
    grad_accumulation_steps: int = TRAINING(1, "micro-batches a step", min_value=1, max_value=10**6)
    iters: int | None = TRAINING(
        None, "steps to train; 0: none (default: those of --epochs)", flags="--steps", min_value=0, max_value=10**12,
        resumable=True,
    )  # fmt: skip
    epochs: float | None = TRAINING(
        None, "passes over the training data, in place of --iters (default: 1)", min_value=0.001, max_value=1e6,
        resumable=True, conflicts={"iters": "which sets the length"},
    )  # fmt: skip
    lr: float | None = UPDATE(
        None,
        "peak learning rate (default: 2e-3 for 1m, 1e-3 for 15m and --from-checkpoint, 6e-4 for 110m, 1 with lbfgs)",
        flags="--learning-rate -lr", min_value=0,
    )  # fmt: skip
    lr_min: float | None = UPDATE(
        None, "lowest learning rate of the decay (default: a tenth of --lr; halving: 0)", min_value=0,
        conflicts={"lr_scheduler=constant": "with a constant rate"},
    )  # fmt: skip
    lr_scheduler: str = UPDATE("cosine", "learning-rate decay after warm-up", choices=LR_SCHEDULES)
    lr_cycles: int = UPDATE(
        1, "decay cycles in the run; each starts at --lr", min_value=1, max_value=100,
        requires="lr_scheduler=cosine|linear",
    )  # fmt: skip
    lr_cycle_growth: float = UPDATE(
        1.0, "length of each decay cycle as a multiple of the cycle before", min_value=0.1, max_value=10,
        conflicts={"lr_cycles=1": "without --lr-cycles"},
    )  # fmt: skip
    lr_half_every: int | None = UPDATE(
        None, "halving: steps until the learning rate is halved (default: one epoch)", min_value=1,
        requires="lr_scheduler=halving",
    )  # fmt: skip
    warmup_ratio: float = UPDATE(
        0.05, "share of the steps used for learning-rate warm-up", min_value=0, max_value=1
    )
    warmup_lr: float = UPDATE(
        0.0, "learning rate from which the warm-up starts", min_value=0, requires={"warmup_ratio": "without warm-up"},
    )  # fmt: skip
    optimizer: str = UPDATE(
        next(iter(OPTIMIZERS)),
        "; ".join(["update rule", *(f"{o.name} {o.note}" for o in OPTIMIZERS.values() if o.note)]),
        choices=tuple(OPTIMIZERS),
    )
    precision: str = TRAINING(
        "f32",
        "of matrix products: bf16 rounds their factors, sums and everything else stay in f32; two to three times as"
        " fast, on CPUs with AVX512_BF16 and on cuda; bf16x3 takes factors as sums of two bf16: nearly f32 and faster,"
        " with AMX and on cuda",
        choices=PRECISIONS,
    )
    flash_attn: str = TRAINING(AUTO, FLASH_HELP, flags="-fa", choices=FLASH_MODES)
    weight_decay: float = options.OPTIMIZER(0.1, "weight decay", min_value=0)
    max_grad_norm: float = UPDATE(
        1.0, "clip gradients to this global norm; 0 turns clipping off", min_value=0
    )
    max_grad_value: float = UPDATE(
        0.0, "clip each value of a gradient to this, after its norm; 0: off", min_value=0
    )
    memory: str | None = RESOURCES(
        None, "limit on the private memory of the process: 2GiB, 800MiB or 80%; a run that does not fit is refused",
        metavar="SIZE",
    )  # fmt: skip
    resident: str | None = RESOURCES(
        None, "limit on private memory and pages of the base in memory, together: 3GiB or 50%; the base is then read"
        " from its file while the run computes", metavar="SIZE", requires=MAPS_WEIGHTS,
        conflicts={"strict": "which is --resident with the size of --memory"},
    )  # fmt: skip
    strict: bool = RESOURCES(
        False, "let --memory limit the pages of the base, too, as --resident does",
        requires={**MAPS_WEIGHTS, "memory": ""},
    )  # fmt: skip
    measure_speed: bool = OUTPUT(False, "measure this machine's speed again, for time estimates")
    recompute: str = RESOURCES(
        "auto",
        "activation checkpointing: recompute no activations, those of every block, those of about sqrt(blocks)"
        " segments, or as --memory requires; without --memory, auto recomputes what takes next to no time",
        choices=("none", "blocks", "sqrt", "auto"),
    )
    saved_activations: str = MEMORY(
        "f32",
        "type in which activations are saved for the backward pass: bf16 rounds them and halves their bytes, but for"
        " the residual stream and what attention returns",
        choices=("f32", "bf16"),
    )
    seed: int = TRAINING(
        0, "seed of initial values, data order and dropout", min_value=0, max_value=2**63 - 1
    )

    steps_per_eval: int | None = VALIDATING(
        None,
        "validate every N steps; 0: only at the end (default: about eight times in a run, at least every 200 steps)",
        min_value=0,
    )
    val_batches: int = VALIDATING(25, "most micro-batches per validation; 0: all", min_value=0)
    patience: int = VALIDATING(
        0, "early stopping: end after N validations without improvement and keep the best weights; 0: off",
        min_value=0, conflicts={"steps_per_eval=0": "which validates once, at the end"},
    )  # fmt: skip
    past: int = STOPPING(
        0, "end if the loss has changed by less than --delta in N steps; 0: off", min_value=0, max_value=10**5,
    )  # fmt: skip
    delta: float = STOPPING(
        1e-5, "change of the loss that ends it, over the loss", min_value=0, requires="past"
    )
    max_no_improvement: int = STOPPING(
        0, "end after N steps without a lower training loss; 0: off", min_value=0
    )
    grad_tol: float = STOPPING(
        0.0, "end at a step whose gradients' norm is at most this; 0: off", min_value=0
    )
    steps_per_report: int = OUTPUT(10, "print a line every N steps without a terminal", min_value=1)
    quiet: bool = OUTPUT(False, "print only errors, and how to go on after Ctrl-C")
    log_json: bool = OUTPUT(False, "print steps and messages as JSON lines to standard output, too")
    save_every: int = OUTPUT(100, "checkpoint every N steps; 0: only at the end", min_value=0)
    save_name: str = OUTPUT(
        "", "keep each checkpoint in the run folder, such as checkpoint-ITERATION.gguf, and the newest with LATEST",
        metavar="PATTERN",
    )  # fmt: skip
    save_model: str = OUTPUT(
        "", "the same for the model, or the adapter alone, at each checkpoint: model-ITERATION.gguf",
        metavar="PATTERN", conflicts={"full": "whose checkpoints hold the weights"},
    )  # fmt: skip
    sample_every: int = OUTPUT(0, "print a text of the model every N steps; 0: never", min_value=0)
    sample_prompt: str = OUTPUT("", "prompt of these samples", requires="sample_every")
    tensorboard: bool = OUTPUT(True, "write TensorBoard events")
    watch: str | None = OUTPUT(
        None, "serve a page with the run's curves, while it goes on, at a port of this machine; 0: any that is free",
        metavar="[HOST:]PORT",
    )  # fmt: skip
    device: str = MEMORY("cpu", f"{DEVICE_HELP}; {DEVICES_HELP}", metavar="NAME[,NAME]")
    device_memory: str | None = RESOURCES(
        None,
        "limit on the memory of --device, or of each of several: 2GiB or 1GiB,3GiB; a run that does not fit is refused",
        metavar="SIZE",
    )
    gpu_layers: str | None = MEMORY(
        None,
        "blocks on --device, the last ones, with what follows them if it is more than there are; the others are on the"
        " cpu. auto: as many as fit",
        flags="-ngl --n-gpu-layers", metavar="N",
    )  # fmt: skip
    split: str | None = MEMORY(
        None, "shares of the blocks for each of --device, such as 3,5 (default: by --device-memory)", metavar="A,B",
    )  # fmt: skip
    offload: str = RESOURCES(
        "auto",
        "what a run on a --device with a memory of its own has in this process's memory: moments of weights, updated"
        " there, too; activations kept for the backward pass, copied there and back; all: both; none; auto: what makes"
        " a run fit, or faster",
        choices=("auto", "none", "moments", "activations", "all"),
        requires={"has_device_memory": "without a --device with a memory of its own"},
    )
    threads: int = RESOURCES(0, "CPU threads; 0: one per core", flags="-t", min_value=0)
    nproc: int = RESOURCES(
        1,
        "train in N processes of this machine, which share out the rows of each step, with --memory for each; needs"
        " PyTorch (packtrain[torch])",
        min_value=1, max_value=1024, metavar="N",
    )  # fmt: skip
    zero: int = MEMORY(
        0,
        "processes share out, so that each has a part: 1: the optimizer's moments (ZeRO-1), with the same bits; 2:"
        " sums of gradients, too (ZeRO-2)",
        min_value=0, max_value=2, resumable=options.ON_ALL_RANKS,
    )  # fmt: skip
    resume: bool = OUTPUT(False, "continue from the last checkpoint in the run folder, bit for bit")
    force_reshuffle: bool = OUTPUT(
        False, "with --resume: go on with the data in a new random order, no longer bit for bit", requires="resume",
        resumable=options.ON_ALL_RANKS,
    )  # fmt: skip
    overwrite: bool = OUTPUT(
        False, "start over: replace the earlier run and its result", conflicts="resume"
    )

    @property
    def has_valid_file(self) -> bool:
        return self.data is not None and has_valid_file(self.data)

    @property
    def maps_weights(self) -> bool:
        """Whether the run maps weights from a base file."""
        return False

    @property
    def resident_nbytes(self) -> int | None:
        """The limit, in bytes, on private memory and pages of the base together; None if pages are not limited."""
        name, text = ("--memory", self.memory) if self.strict else ("--resident", self.resident)
        return None if text is None else parse_size(text, name)

    @property
    def has_device_memory(self) -> bool:
        return not self.spread.target.private

    @property
    def spread(self) -> DeviceSpread:
        """Which blocks are on which device, by --device, --gpu-layers and --split. Raises InputError."""
        return parse_spread(self.device, self.gpu_layers, self.split, self.device_memory)

    @property
    def target(self) -> Target:
        """Devices and memory spaces of the run. Raises InputError."""
        return self.spread.target

    @property
    def folder(self) -> Path:
        return run_folder(self.output)

    @property
    def learning_rate(self) -> float:
        first_length = OPTIMIZERS[self.optimizer].first_length
        default_rate = self.default_rate if first_length is None else first_length
        return default_rate if self.lr is None else self.lr

    @property
    def default_rate(self) -> float:
        """Learning rate without --lr, for optimizers that follow a schedule."""
        raise NotImplementedError


def run_folder(output: Path) -> Path:
    """Return the folder for all files of a run but its model: model.run for model.gguf."""
    return output.with_name(f"{output.stem or 'model'}.run") if output.name else output
