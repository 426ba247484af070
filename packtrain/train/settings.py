"""Every setting of train and finetune, with its default and help: flags, run.yaml and checkpoints all read this."""

from dataclasses import dataclass
from pathlib import Path

from packtrain.errors import InputError
from packtrain.models.config import PRESETS, Config
from packtrain.quant import WRITABLE
from packtrain.samples import TRUNCATE
from packtrain.settings import option, positional
from packtrain.train.schedule import KINDS

RATES = {"1m": 2e-3, "15m": 1e-3, "110m": 6e-4}
LORA_RATE, FULL_RATE = 2e-4, 1e-5
TYPES = ("f32", "f16", "bf16")
WRITTEN = tuple(str(dtype) for dtype in WRITABLE)


@dataclass(frozen=True)
class RunSettings:
    """Settings of every run that trains."""

    data: Path | None = option(
        None, "text to train on: .txt or .jsonl, or a folder with train, valid"
    )
    output: Path = option(
        Path("model.gguf"), "the model to write; its run folder stands beside it", flags="-o"
    )
    ctx: int | None = option(
        None, "context: tokens of a window", flags="-c --max-seq-length", least=2
    )
    separator: str | None = option(
        None, "text between two documents; found by itself if it is <|endoftext|>"
    )
    val_split: float = option(0.05, "part of the data for validation", least=0, most=0.5)

    batch_size: int = option(8, "windows of a micro-batch", least=1)
    grad_accumulation_steps: int = option(1, "micro-batches of a step", least=1)
    iters: int | None = option(None, "steps to train", flags="--steps", least=1)
    epochs: float | None = option(
        None, "passes over the data, if --iters is not given (1)", least=0.001
    )
    lr: float | None = option(
        None,
        "highest learning rate; by default by the model's size, or 2e-4 for adapters and 1e-5 for --full",
        flags="--learning-rate -lr",
        least=0,
    )
    lr_min: float | None = option(
        None, "learning rate of the last step; a tenth of --lr by default", least=0
    )
    lr_scheduler: str = option("cosine", "how the rate goes down after warm-up", choices=KINDS)
    lr_cycles: int = option(1, "times that the schedule begins anew", least=1)
    warmup_ratio: float = option(0.05, "part of the steps with a rising rate", least=0, most=1)
    optimizer: str = option("adamw", "update rule; sgd has no state", choices=("adamw", "sgd"))
    beta1: float = option(0.9, "AdamW: memory of the mean", least=0, most=0.9999)
    beta2: float = option(0.95, "AdamW: memory of the squares", least=0, most=0.99999)
    weight_decay: float = option(0.1, "decay of weights of two or more axes", least=0)
    max_grad_norm: float = option(1.0, "clip gradients to this global norm; 0 does not", least=0)
    memory: str | None = option(
        None, "most private memory, as 2GiB, 800MiB or 80%; refused if it cannot be kept"
    )
    strict: bool = option(
        False,
        "count weights that are only mapped from a file, too; training from scratch maps none",
    )
    calibrate: bool = option(False, "measure again how fast this machine is, for predicted times")
    recompute: str = option(
        "auto", "what the backward pass computes again", choices=("none", "blocks", "sqrt", "auto")
    )
    seed: int = option(0, "of initial values and the order of the data", least=0, most=2**63 - 1)

    steps_per_eval: int = option(200, "validate so often; 0 only at the end", least=0)
    val_batches: int = option(25, "most micro-batches of one validation; 0: all", least=0)
    patience: int = option(
        0, "stop after so many validations without a better one; 0 goes on", least=0
    )
    steps_per_report: int = option(10, "a line so often, where there is no terminal", least=1)
    save_every: int = option(100, "checkpoint so often; 0 only at the end", least=0)
    sample_every: int = option(0, "write a sample so often; 0 never", least=0)
    sample_prompt: str = option("", "how samples begin")
    tensorboard: bool = option(True, "write TensorBoard events")
    threads: int = option(0, "threads of the kernels; 0: one for each core", flags="-t", least=0)
    resume: bool = option(False, "go on with the run in the run folder, bit for bit")
    overwrite: bool = option(False, "begin anew although the run folder has a run")

    @property
    def folder(self) -> Path:
        return run_folder(self.output)

    @property
    def learning_rate(self) -> float:
        raise NotImplementedError


@dataclass(frozen=True)
class TrainSettings(RunSettings):
    preset: str = option("1m", "shape of the model", choices=tuple(PRESETS))
    dim: int | None = option(None, "width of the model, instead of the preset's", least=1)
    layers: int | None = option(None, "blocks, instead of the preset's", least=1)
    heads: int | None = option(None, "attention heads, instead of the preset's", least=1)
    kv_heads: int | None = option(None, "key and value heads, instead of the preset's", least=1)
    ffn: int | None = option(
        None, "width of the feed-forward part, instead of the preset's", least=1
    )
    vocab: Path | None = option(
        None, "take the vocabulary of this GGUF file instead of training one"
    )
    vocab_size: str = option(
        "auto", "tokens of the vocabulary, or auto: the preset's, less if the text is small"
    )
    type: str = option("f32", "type of matrices in the written model", choices=TYPES)
    fill_samples: bool = option(True, "fill windows of short documents up with the next one")
    random_offsets: bool = option(True, "begin the windows of each epoch somewhere else")

    @property
    def learning_rate(self) -> float:
        return RATES[self.preset] if self.lr is None else self.lr

    def config(self, vocab_size: int) -> Config:
        """The model's sizes for a vocabulary. Raises InputError if they do not go together."""
        base = PRESETS[self.preset]
        heads = self.heads or base.head_count
        given = Config(
            vocab_size,
            self.ctx or base.context_length,
            self.dim or base.embedding_length,
            self.layers or base.block_count,
            self.ffn or base.feed_forward_length,
            heads,
            self.kv_heads or (base.head_count_kv if self.heads is None else heads),
        )
        if given.embedding_length % (2 * heads):
            raise InputError(
                f"--dim {given.embedding_length} must be an even multiple of --heads {heads}"
            )
        if heads % given.head_count_kv:
            raise InputError(
                f"--heads {heads} must be a multiple of --kv-heads {given.head_count_kv}"
            )
        return given


@dataclass(frozen=True)
class TuneSettings(RunSettings):
    model: Path | None = positional("the model to begin with, a GGUF file", None)
    output: Path = option(
        Path("tuned.gguf"), "the tuned model to write; its run folder stands beside it", flags="-o"
    )
    data: Path | None = option(
        None, "conversations or texts: .jsonl, .json, .txt, or a folder with train, valid"
    )
    adapter: Path | None = option(None, "write the adapter here, too")
    type: str | None = option(
        None, "type of changed matrices; by default what each has in the base", choices=WRITTEN
    )

    full: bool = option(False, "train the matrices themselves, not low-rank additions")
    masters: str = option(
        "f32", "with --full: type in which matrices are trained", choices=("f32", "bf16")
    )
    lora_rank: tuple[str, ...] = option(
        ("16",), "rank of the additions; NAME=RANK for matrices of this name, again and again"
    )
    lora_alpha: float = option(32.0, "additions count alpha / rank", least=0.001)
    rslora: bool = option(False, "additions count alpha / sqrt(rank)")
    lora_modules: str = option(
        "all", "matrices with additions: all, attn, mlp, or names as attn_q,attn_v"
    )
    lora_dropout: float = option(
        0.0, "part of an addition's input that is dropped", least=0, most=0.9
    )
    num_layers: int = option(-1, "train so many blocks, from the last one; -1 is all", least=-1)
    freeze: tuple[str, ...] = option(
        (), "with --full: tensors to leave as they are, as token_embd*"
    )

    mask_prompt: bool = option(True, "learn what the assistant says, and nothing else")
    train_on: str = option("all", "the assistant's turns to learn", choices=("all", "last"))
    truncate: str = option(
        "end", "longer conversations: cut their end, drop or split them", choices=TRUNCATE
    )
    pack: bool = option(True, "put several samples into a row as long as they fit")

    batch_size: int = option(4, "rows of a micro-batch", least=1)
    warmup_ratio: float = option(0.03, "part of the steps with a rising rate", least=0, most=1)
    weight_decay: float = option(0.01, "decay of weights of two or more axes", least=0)

    @property
    def learning_rate(self) -> float:
        return (FULL_RATE if self.full else LORA_RATE) if self.lr is None else self.lr


def run_folder(output: Path) -> Path:
    """Where a run keeps all but its model: model.gguf has model.run."""
    return output.with_name(f"{output.stem or 'model'}.run") if output.name else output


# Settings that may differ when a run is resumed: they change no bit of a step, or the checkpoint holds what they became
FREE = frozenset(
    (
        *(
            "model",
            "adapter",
            "strict",
            "data",
            "vocab",
            "vocab_size",
            "output",
            "iters",
            "epochs",
            "memory",
            "calibrate",
            "recompute",
            "threads",
        ),
        *("steps_per_eval", "val_batches", "patience", "steps_per_report", "save_every"),
        *("sample_every", "sample_prompt", "tensorboard", "type", "resume", "overwrite"),
    )
)
