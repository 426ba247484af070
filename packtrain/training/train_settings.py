"""Every setting of train and finetune, with default and help: the source of the flags, run.yaml and checkpoints."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from packtrain.common.errors import InputError
from packtrain.common.options import COLUMNS, DATA, MEMORY, MODEL, OUTPUT, TRAINING, option_fields
from packtrain.data.chat_template import TEMPLATES
from packtrain.dtypes import MERGEABLE, PRECISIONS
from packtrain.engine.backends import Target
from packtrain.engine.optim import OPTIMIZERS
from packtrain.models.attention_choice import AUTO, FLASH_HELP, FLASH_MODES
from packtrain.models.config import PRESETS, Config, linear_scaling
from packtrain.planner.device_spread import DeviceSpread, parse_spread
from packtrain.training.lr_schedule import LR_SCHEDULES

T = TypeVar("T")
PRESET_RATES = {"1m": 2e-3, "15m": 1e-3, "110m": 6e-4}
CHECKPOINT_RATE = 1e-3  # that of train-text-from-scratch
MATRIX_TYPES = ("f32", "f16", "bf16")
SKIP_BAD_HELP = (
    "skip records that cannot be used instead of refusing the file; the first five are listed"
)
MAX_CONTEXT = 1 << 24  # tokens of a context
CHAT_TEMPLATE = (
    f"chat template to use instead of the model's own: {', '.join(TEMPLATES)}, or a file"
)
DEVICE_HELP = (
    "what computes, and whose memory holds the model; numpy is the specification, slow and with memory"
    " beside the plan; torch:cpu, cuda and mps need PyTorch (packtrain[torch])"
)
DEVICES_HELP = "several by commas share out the blocks; cpu:1, torch:cpu:1 or cuda:1 is another memory of its kind"
OUTPUT_TYPES = tuple(str(dtype) for dtype in MERGEABLE)


def with_optimizer_options(cls: type[T]) -> type[T]:
    """Add the options that optimizers declare to the class, after `optimizer`. Raises TypeError."""
    option_hints: dict[str, Any] = {}
    for optimizer_class in OPTIMIZERS.values():
        hints = get_type_hints(optimizer_class)
        option_hints |= {f.name: hints[f.name] for f in option_fields(optimizer_class)}
        for f in option_fields(optimizer_class):
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

    data: Path | None = DATA(
        None, "text to train on: a .txt, .jsonl, .csv or .parquet file, or a folder of them"
    )
    output: Path = OUTPUT(
        Path("model.gguf"),
        "GGUF file to write; checkpoints and logs go to the folder NAME.run next to it",
        flags="-o",
    )
    ctx: int | None = DATA(
        None,
        "context length in tokens (default: the preset's)",
        flags="-c --max-seq-length",
        min_value=2,
        max_value=MAX_CONTEXT,
    )
    separator: str | None = DATA(
        None, "text between two documents of a .txt file (default: <|endoftext|>, if present)"
    )
    val_split: float = DATA(
        0.05,
        "share of the data held out for validation if it has no valid file",
        min_value=0,
        max_value=0.5,
    )
    skip_bad: bool = DATA(False, SKIP_BAD_HELP)
    shuffle_samples: bool | None = DATA(
        None,
        "shuffle samples before short ones share a window, anew in each epoch, so that their neighbours change"
        " (default: on; a resumed run that began without it stays without)",
    )
    columns: str | None = DATA(None, COLUMNS, metavar="NAME=FIELD,…")

    batch_size: int = TRAINING(8, "sequences per micro-batch", min_value=1)
    grad_accumulation_steps: int = TRAINING(
        1, "micro-batches per step", min_value=1, max_value=10**6
    )
    iters: int | None = TRAINING(
        None,
        "steps to train; 0: none (default: those of --epochs)",
        flags="--steps",
        min_value=0,
        max_value=10**12,
    )
    epochs: float | None = TRAINING(
        None,
        "passes over the training data, in place of --iters (default: 1)",
        min_value=0.001,
        max_value=1e6,
    )
    lr: float | None = TRAINING(
        None,
        "peak learning rate (default: 2e-3 for 1m, 1e-3 for 15m, 6e-4 for 110m, 1e-3 with --from, 1 with lbfgs)",
        flags="--learning-rate -lr",
        min_value=0,
    )
    lr_min: float | None = TRAINING(
        None,
        "lowest learning rate of the decay (default: a tenth of --lr; halving: 0)",
        min_value=0,
    )
    lr_scheduler: str = TRAINING(
        "cosine", "decay of the learning rate after warm-up", choices=LR_SCHEDULES
    )
    lr_cycles: int = TRAINING(
        1, "decay cycles in the run; each starts at --lr", min_value=1, max_value=100
    )
    lr_cycle_growth: float = TRAINING(
        1.0, "length of a decay cycle over that of the one before", min_value=0.1, max_value=10
    )
    lr_half_every: int | None = TRAINING(
        None, "halving: steps until the learning rate is halved (default: one epoch)", min_value=1
    )
    warmup_ratio: float = TRAINING(
        0.05, "share of the steps used for learning-rate warm-up", min_value=0, max_value=1
    )
    warmup_lr: float = TRAINING(0.0, "learning rate from which the warm-up starts", min_value=0)
    optimizer: str = TRAINING(
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
    weight_decay: float = TRAINING(0.1, "weight decay", min_value=0)
    max_grad_norm: float = TRAINING(
        1.0, "clip gradients to this global norm; 0 turns clipping off", min_value=0
    )
    max_grad_value: float = TRAINING(
        0.0, "clip each value of a gradient to this, after its norm; 0: off", min_value=0
    )
    memory: str | None = MEMORY(
        None,
        "limit on the private memory of the process: 2GiB, 800MiB or 80%; a run that does not fit is refused",
        metavar="SIZE",
    )
    strict: bool = MEMORY(False, "count the weights mapped from the base file in --memory, too")
    measure_speed: bool = OUTPUT(
        False, "measure the speed of this machine again, for time estimates"
    )
    recompute: str = MEMORY(
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

    steps_per_eval: int | None = TRAINING(
        None,
        "validate every N steps; 0: only at the end (default: about eight times in a run, at least every 200 steps)",
        min_value=0,
    )
    val_batches: int = TRAINING(25, "most micro-batches per validation; 0: all", min_value=0)
    patience: int = TRAINING(
        0,
        "early stopping: end after N validations without improvement and keep the best weights; 0: off",
        min_value=0,
    )
    past: int = TRAINING(
        0,
        "end if the loss has changed by less than --delta in N steps; 0: off",
        min_value=0,
        max_value=10**5,
    )
    delta: float = TRAINING(1e-5, "change of the loss that ends it, over the loss", min_value=0)
    max_no_improvement: int = TRAINING(
        0, "end after N steps without a lower training loss; 0: off", min_value=0
    )
    grad_tol: float = TRAINING(
        0.0, "end at a step whose gradients' norm is at most this; 0: off", min_value=0
    )
    steps_per_report: int = OUTPUT(
        10, "print a line every N steps if there is no terminal", min_value=1
    )
    save_every: int = OUTPUT(
        100, "save a checkpoint every N steps; 0: only at the end", min_value=0
    )
    save_name: str = OUTPUT(
        "",
        "keep each checkpoint in the run folder, such as checkpoint-ITERATION.gguf, and the newest with LATEST",
        metavar="PATTERN",
    )
    save_model: str = OUTPUT(
        "",
        "the same for the model, or the adapter alone, at each checkpoint: model-ITERATION.gguf",
        metavar="PATTERN",
    )
    sample_every: int = OUTPUT(
        0, "print a sample of the model's text every N steps; 0: never", min_value=0
    )
    sample_prompt: str = OUTPUT("", "prompt of these samples")
    tensorboard: bool = OUTPUT(True, "write TensorBoard events")
    watch: str | None = OUTPUT(
        None,
        "serve a page with the run's curves, while it goes on, at a port of this machine; 0: any that is free",
        metavar="[HOST:]PORT",
    )
    device: str = MEMORY("cpu", f"{DEVICE_HELP}; {DEVICES_HELP}", metavar="NAME[,NAME]")
    device_memory: str | None = MEMORY(
        None,
        "limit on the memory of --device, or of each of several: 2GiB or 1GiB,3GiB; a run that does not fit is refused",
        metavar="SIZE",
    )
    gpu_layers: str | None = MEMORY(
        None,
        "blocks on --device, the last ones, with what follows them if it is more than there are; the others are on the"
        " cpu. auto: as many as fit",
        flags="-ngl --n-gpu-layers",
        metavar="N",
    )
    split: str | None = MEMORY(
        None,
        "shares of the blocks for each of --device, such as 3,5 (default: by --device-memory)",
        metavar="A,B",
    )
    offload: str = MEMORY(
        "auto",
        "what a run on a --device with a memory of its own has in this process's memory: moments of weights, updated"
        " there, too; activations kept for the backward pass, copied there and back; all: both; none; auto: what makes"
        " a run fit, or faster",
        choices=("auto", "none", "moments", "activations", "all"),
    )
    threads: int = MEMORY(0, "CPU threads; 0: one per core", flags="-t", min_value=0)
    nproc: int = MEMORY(
        1,
        "train in N processes of this machine, which share out the rows of each step, with --memory for each; needs"
        " PyTorch (packtrain[torch])",
        min_value=1,
        max_value=1024,
        metavar="N",
    )
    zero: int = MEMORY(
        0,
        "processes share out, so that each has a part: 1: the optimizer's moments (ZeRO-1), with the same bits; 2:"
        " sums of gradients, too (ZeRO-2)",
        min_value=0,
        max_value=2,
    )
    resume: bool = OUTPUT(False, "continue from the last checkpoint in the run folder, bit for bit")
    force_reshuffle: bool = OUTPUT(
        False, "with --resume: go on with the data in a new random order, no longer bit for bit"
    )
    overwrite: bool = OUTPUT(False, "start over: replace the earlier run and its result")

    @property
    def spread(self) -> DeviceSpread:
        """How the model is spread over --device. Raises InputError."""
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


@dataclass(frozen=True)
class TrainSettings(RunSettings):
    COMMON = (
        "data output preset vocab_size memory iters epochs lr batch_size ctx val_split patience "
        "watch seed resume overwrite"
    )

    preset: str = MODEL("1m", "size of the model, by its parameters", choices=tuple(PRESETS))
    from_checkpoint: Path | None = MODEL(
        None,
        "begin with the weights of this checkpoint of llama.cpp's former train-text-from-scratch, a GGUF file; its"
        " sizes, and its vocabulary if it has one, replace the preset's",
        flags="--from",
    )
    dim: int | None = MODEL(None, "width of the embedding (default: the preset's)", min_value=1)
    layers: int | None = MODEL(
        None, "number of blocks (default: the preset's)", min_value=1, max_value=1024
    )
    heads: int | None = MODEL(None, "attention heads (default: the preset's)", min_value=1)
    kv_heads: int | None = MODEL(
        None, "key and value heads (default: the preset's, or --heads)", min_value=1
    )
    ffn: int | None = MODEL(
        None, "width of the feed-forward layers (default: the preset's)", min_value=1
    )
    norm_rms_eps: float = MODEL(1e-5, "epsilon of the RMS norms", min_value=1e-12, max_value=0.1)
    rope_freq_base: float = MODEL(
        10_000.0, "base of the RoPE frequencies", min_value=1, max_value=1e12
    )
    rope_freq_scale: float = MODEL(
        1.0,
        "factor of the RoPE frequencies: 0.5 halves them (linear scaling)",
        min_value=1e-4,
        max_value=1,
    )
    vocab: Path | None = DATA(
        None, "use the vocabulary of this GGUF file instead of training a new one"
    )
    vocab_size: str = DATA(
        "auto",
        "tokens of the new vocabulary; auto: the preset's, fewer for a small text",
        metavar="N",
    )
    type: str = OUTPUT("f32", "element type of the matrices in the GGUF file", choices=MATRIX_TYPES)
    sample_start: str | None = DATA(
        None, "documents of a .txt file, and windows, begin right after this text, such as '\\n'"
    )
    fill_samples: bool = DATA(
        True, "fill a window with several short documents; otherwise pad after each"
    )
    random_offsets: bool = DATA(
        True, "start each epoch at a random place, so that its windows differ"
    )

    @property
    def default_rate(self) -> float:
        return PRESET_RATES[self.preset] if self.from_checkpoint is None else CHECKPOINT_RATE

    def config(self, vocab_size: int) -> Config:
        """Return the model's configuration for a vocabulary size. Raises InputError if its sizes do not match."""
        preset_config = PRESETS[self.preset]
        heads = self.heads or preset_config.head_count
        model_config = Config(
            vocab_size,
            self.ctx or preset_config.context_length,
            self.dim or preset_config.embedding_length,
            self.layers or preset_config.block_count,
            self.ffn or preset_config.feed_forward_length,
            heads,
            self.kv_heads or (preset_config.head_count_kv if self.heads is None else heads),
            rope_freq_base=self.rope_freq_base,
            rms_eps=self.norm_rms_eps,
            rope_scaling=linear_scaling(self.rope_freq_scale),
        )
        if model_config.embedding_length % (2 * heads):
            raise InputError(
                f"--dim {model_config.embedding_length} must be an even multiple of --heads {heads}"
            )
        if heads % model_config.head_count_kv:
            raise InputError(
                f"--heads {heads} must be a multiple of --kv-heads {model_config.head_count_kv}"
            )
        return model_config


def run_folder(output: Path) -> Path:
    """Return the folder for all files of a run but its model: model.run for model.gguf."""
    return output.with_name(f"{output.stem or 'model'}.run") if output.name else output


# Settings that may differ when a run is resumed: they change no bit of a step, or the checkpoint holds what they became
RESUMABLE_NAMES = """
model adapter from_checkpoint strict data vocab vocab_size output iters epochs memory measure_speed recompute threads
steps_per_eval val_batches patience past delta max_no_improvement grad_tol steps_per_report save_every save_name
save_model check_answers sample_every sample_prompt tensorboard watch type merge tensor_type resume overwrite
force_reshuffle nproc zero device_memory offload
"""
RESUMABLE = frozenset(RESUMABLE_NAMES.split())
