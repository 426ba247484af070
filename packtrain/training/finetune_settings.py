"""Settings of finetune that train lacks, or has with another default."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from packtrain.common import options
from packtrain.common.errors import InputError
from packtrain.common.options import DATA, OUTPUT, SOURCE, TRAINING, UPDATE, option, positional
from packtrain.data.conversations import TRUNCATE_CHOICES
from packtrain.models.distillation_loss import DistillationLoss
from packtrain.models.preference_loss import KINDS, PreferenceLoss, make_preference
from packtrain.training import run_settings
from packtrain.training.run_settings import ALL_TURNS, CHAT_TEMPLATE, VALIDATING, RunSettings

NEXT_TOKEN = "next-token"
LORA_RATE, FULL_RATE = 2e-4, 1e-5
# settings that exclude others, and why
FULL = {"full": "which trains the weights themselves"}
UNMERGED = {"merge=none": "which writes the adapter alone"}
AWARE = {"aware": "which trains what the matrices' own blocks can hold"}
LORA = partial(option, group="LoRA", conflicts=FULL)
PREFERENCES = partial(option, group="preferences")
DISTILLING = partial(TRAINING, requires="teacher")
PAIR_LOSSES = f"loss={'|'.join(KINDS)}"  # conditions of options, see common.option_rules
MARGIN_LOSSES = "loss=dpo|simpo|orpo"


@dataclass(frozen=True)
class TuneSettings(RunSettings):
    COMMON = "data output memory epochs iters lr lora_rank ctx full merge val_split seed resume overwrite"

    model: Path | None = positional("the base model, a GGUF file", None, resumable=True)
    output: Path = OUTPUT(
        Path("tuned.gguf"), "GGUF file to write; adapter, checkpoints and logs go to the folder NAME.run next to it",
        flags="-o",
    )  # fmt: skip
    data: Path | None = SOURCE(
        None, "conversations or text: a .jsonl, .json, .csv, .parquet or .txt file, or a folder of them",
    )  # fmt: skip
    ctx: int | None = DATA(
        None, "context length in tokens (default: the longest sample's, at most 2048 and the model's)",
        flags="-c --max-seq-length", min_value=2, max_value=run_settings.MAX_CONTEXT,
    )  # fmt: skip
    adapter: Path | None = OUTPUT(
        None, "write a copy of the LoRA adapter to this GGUF file", conflicts=FULL | UNMERGED
    )
    type: str | None = OUTPUT(
        None, "element type of the changed matrices (default: as in the base)", choices=run_settings.OUTPUT_TYPES,
        conflicts=UNMERGED | AWARE,
    )  # fmt: skip

    merge: str = OUTPUT(
        "calibrated",
        "how the adapter is merged into quantized matrices: calibrated on some of the data, or plain rounding; none:"
        " --output is the adapter alone",
        choices=("calibrated", "plain", "none"),
        conflicts=FULL | {"aware merge=plain": "which merges as it trains"},
    )
    tensor_type: tuple[str, ...] = OUTPUT(
        (), "element type for changed matrices of this name, such as ffn_down=q8_0; repeatable", metavar="NAME=TYPE",
        conflicts=FULL | UNMERGED | AWARE,
    )  # fmt: skip

    check_answers: int = OUTPUT(
        3, "after the run, base and tuned model answer so many held-out questions, side by side; 0: none",
        min_value=0, max_value=100,
    )  # fmt: skip

    full: bool = TRAINING(False, "train the weights themselves instead of a LoRA adapter")
    masters: str = TRAINING(
        "f32", "with --full: element type of the weights in training; bf16 needs half the bytes",
        choices=("f32", "bf16"), requires="full",
    )  # fmt: skip
    lora_rank: tuple[str, ...] = LORA(
        ("16",), "rank, or NAME=RANK for the matrices of this name; repeatable", metavar="RANK"
    )
    lora_alpha: float | None = LORA(
        None, "scale: the adapter's output counts alpha / rank (default: twice --lora-rank; 32 with --rslora)",
        min_value=0.001,
    )  # fmt: skip
    rslora: bool = LORA(False, "rank-stabilized scale: alpha / sqrt(rank)")
    lora_modules: str = LORA(
        "all", "matrices that get a LoRA adapter: all, attn, mlp, or names such as attn_q,attn_v", metavar="NAMES",
    )  # fmt: skip
    lora_dropout: float = LORA(
        0.0, "dropout probability of the adapter's input", min_value=0, max_value=0.9, conflicts=FULL | AWARE,
    )  # fmt: skip
    aware: bool = LORA(
        False,
        "compute with matrices as they will be stored with their adapter, rounded with the base's scales; the merge"
        " then stores what was trained, without data",
    )
    num_layers: int = TRAINING(-1, "train the last N blocks only; -1: all", min_value=-1)
    freeze: tuple[str, ...] = TRAINING(
        (), "with --full: tensors to freeze, such as 'token_embd*'; repeatable", metavar="PATTERN", requires="full",
    )  # fmt: skip

    loss: str = PREFERENCES(
        NEXT_TOKEN,
        "what is minimized: next-token; or, for pairs of a chosen and a rejected answer, dpo, ipo, simpo or orpo",
        choices=(NEXT_TOKEN, *KINDS),
    )
    beta: float | None = PREFERENCES(
        None,
        "losses of pairs: how strongly preferences count beside staying near the base (default: dpo 0.1, ipo 0.1,"
        " simpo 2, orpo 1)", min_value=1e-6, requires=PAIR_LOSSES,
    )  # fmt: skip
    gamma: float | None = PREFERENCES(
        None, "losses of pairs: the margin that rewards should differ by (default: simpo 0.5, else 0)", min_value=0,
        requires=MARGIN_LOSSES,
    )  # fmt: skip
    sft_weight: float | None = PREFERENCES(
        None,
        "losses of pairs: how much the chosen answer's own likelihood, the mean of its tokens, counts beside the"
        " preference (default: orpo 1, else 0)", min_value=0, requires=PAIR_LOSSES,
    )  # fmt: skip
    label_smoothing: float = PREFERENCES(
        0.0, "losses of pairs: the share of pairs expected to be the wrong way round", min_value=0, max_value=0.5,
        requires=MARGIN_LOSSES,
    )  # fmt: skip
    length_normalized: bool = PREFERENCES(
        False, "dpo: mean log-probabilities of an answer's tokens, not their sum", requires="loss=dpo",
    )  # fmt: skip
    reference_free: bool = PREFERENCES(
        False, "dpo: leave the base out of the rewards", requires="loss=dpo"
    )

    teacher: Path | None = TRAINING(
        None,
        "a larger model with the same vocabulary, a GGUF file, whose likeliest tokens the tuned model learns, too; it"
        " reads the data once, before step 1",
        requires={"loss=next-token": "with a loss of pairs"},
    )
    distill_weight: float = DISTILLING(
        0.5, "with --teacher: its share of the loss; the rest is the data's", min_value=1e-6, max_value=1,
    )  # fmt: skip
    distill_temperature: float = DISTILLING(
        1.0,
        "with --teacher: what both models' logits are divided by; other than 1, logits are computed twice unless"
        " --distill-weight is 1",
        min_value=0.05,
        max_value=100,
    )
    distill_top: int = DISTILLING(
        16, "with --teacher: how many of its likeliest tokens count", min_value=1, max_value=128
    )

    replay: int | None = TRAINING(
        None,
        "texts that the base writes before step 1; the tuned model stays near the base in them, so that it forgets"
        " less; 0: none (default: 64, for adapters that learn answers)",
        min_value=0, max_value=100_000,
    )  # fmt: skip
    replay_weight: float = TRAINING(
        3.0, "how much these texts count, where the data counts 1", min_value=1e-6, max_value=1e6,
        conflicts="replay=0",
    )  # fmt: skip

    mask_prompt: bool = DATA(True, "train on the assistant's words only, not the prompt")
    train_on: str = DATA(
        "all", "which of the assistant's turns to train on", choices=("all", "last"), conflicts=ALL_TURNS,
    )  # fmt: skip
    truncate: str = DATA(
        "end", "what to do with conversations longer than the context", choices=TRUNCATE_CHOICES
    )
    chat_template: str | None = DATA(None, CHAT_TEMPLATE, metavar="NAME|FILE|TEXT")
    pack: bool = DATA(True, "pack several samples into one sequence")

    batch_size: int = TRAINING(
        0, "rows per micro-batch; 0: 4, or 2 or 1 where 4 would make less than 180 steps", min_value=0,
    )  # fmt: skip
    epochs: float | None = TRAINING(
        None,
        "passes over the data, in place of --iters (default: 3 to 1, for few examples up to 12: 180 steps or more)",
        min_value=0.001, max_value=1e6, resumable=True, conflicts={"iters": "which sets the length"},
    )  # fmt: skip
    val_batches: int = VALIDATING(10, "most micro-batches per validation; 0: all", min_value=0)
    lr: float | None = UPDATE(
        None,
        "peak learning rate (default: 1e-4 at a width of 4096, 4.4e-4 at 640; a tenth with --full or for pairs; 1 with"
        " lbfgs)",
        flags="--learning-rate -lr", min_value=0,
    )  # fmt: skip
    warmup_ratio: float = UPDATE(
        0.03, "share of the steps used for learning-rate warm-up", min_value=0, max_value=1
    )
    weight_decay: float = options.OPTIMIZER(0.01, "weight decay", min_value=0)

    @property
    def maps_weights(self) -> bool:
        return not self.full

    @property
    def default_rate(self) -> float:
        """Learning rate of runs of old versions; training.finetune_defaults computes newer ones from the width."""
        default_rate = FULL_RATE if self.full else LORA_RATE
        return default_rate if self.loss == NEXT_TOKEN else default_rate / 10

    @property
    def distill(self) -> DistillationLoss | None:
        """The distillation loss of --teacher; None without a teacher."""
        if self.teacher is None:
            return None
        return DistillationLoss(self.distill_weight, self.distill_temperature, self.distill_top)

    @property
    def preference(self) -> PreferenceLoss | None:
        """The preference loss of --loss; None for next-token. Raises InputError for split answers."""
        if self.loss == NEXT_TOKEN:
            return None
        if self.truncate == "split":
            fact = f"--truncate split: --loss {self.loss} needs whole answers; give end or drop"
            raise InputError(fact)
        return make_preference(
            self.loss, beta=self.beta, gamma=self.gamma, nll=self.sft_weight, smoothing=self.label_smoothing or None,
            measure="mean" if self.length_normalized else None, reference=False if self.reference_free else None,
        )  # fmt: skip
