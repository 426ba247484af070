"""Settings of train that finetune lacks."""

from dataclasses import dataclass
from pathlib import Path

from packtrain.common.errors import InputError
from packtrain.common.options import DATA, MODEL, OUTPUT, SOURCE
from packtrain.models.config import PRESETS, Config, linear_scaling
from packtrain.training.run_settings import RunSettings

PRESET_RATES = {"1m": 2e-3, "15m": 1e-3, "110m": 6e-4}
CHECKPOINT_RATE = 1e-3  # that of train-text-from-scratch
OWN_SIZES = {"from_checkpoint": "with --from-checkpoint, whose file has its own sizes"}
MATRIX_TYPES = ("f32", "f16", "bf16")


@dataclass(frozen=True)
class TrainSettings(RunSettings):
    COMMON = (
        "data output preset vocab_size memory iters epochs lr batch_size ctx val_split patience "
        "watch seed resume overwrite"
    )

    preset: str = MODEL(
        "1m", "size of the model, by its parameters", choices=tuple(PRESETS), conflicts=OWN_SIZES
    )
    from_checkpoint: Path | None = MODEL(
        None,
        "begin with the weights of this checkpoint of llama.cpp's former train-text-from-scratch, a GGUF file; its"
        " sizes, and its vocabulary if it has one, replace the preset's",
        flags="--from", resumable=True,
    )  # fmt: skip
    dim: int | None = MODEL(None, "width of the embedding (default: the preset's)", min_value=1)
    layers: int | None = MODEL(
        None, "number of blocks (default: the preset's)", min_value=1, max_value=1024
    )
    heads: int | None = MODEL(None, "attention heads (default: the preset's)", min_value=1)
    kv_heads: int | None = MODEL(
        None, "key and value heads (default: the preset's, or --heads)", min_value=1
    )
    ffn: int | None = MODEL(None, "feed-forward width (default: the preset's)", min_value=1)
    norm_rms_eps: float = MODEL(1e-5, "epsilon of the RMS norms", min_value=1e-12, max_value=0.1)
    rope_freq_base: float = MODEL(10_000.0, "base of RoPE frequencies", min_value=1, max_value=1e12)
    rope_freq_scale: float = MODEL(
        1.0, "factor of the RoPE frequencies: 0.5 halves them (linear scaling)", min_value=1e-4, max_value=1,
    )  # fmt: skip
    vocab: Path | None = SOURCE(None, "take this GGUF file's vocabulary instead of training one")
    vocab_size: str = SOURCE(
        "auto", "tokens of the new vocabulary; auto: the preset's, fewer for a small text", metavar="N",
        conflicts={**OWN_SIZES, "vocab": "which has its own size"},
    )  # fmt: skip
    type: str = OUTPUT("f32", "element type of the matrices in the GGUF file", choices=MATRIX_TYPES)
    sample_start: str | None = DATA(
        None, "documents of a .txt file, and windows, begin right after this text, such as '\\n'"
    )
    fill_samples: bool = DATA(
        True, "fill a window with several short documents; otherwise pad after each",
        conflicts={"sample_start": "which begins windows there"},
    )  # fmt: skip
    random_offsets: bool = DATA(
        True, "start each epoch at a random place, so that its windows differ",
        conflicts={"fill_samples=False": "", "sample_start": "which begins windows there"},
    )  # fmt: skip

    @property
    def default_rate(self) -> float:
        return PRESET_RATES[self.preset] if self.from_checkpoint is None else CHECKPOINT_RATE

    def config(self, vocab_size: int) -> Config:
        """Return the model's configuration for a vocabulary size. Raises InputError if its sizes do not match."""
        preset_config = PRESETS[self.preset]
        heads = self.heads or preset_config.head_count
        model_config = Config(
            vocab_size, self.ctx or preset_config.context_length, self.dim or preset_config.embedding_length,
            self.layers or preset_config.block_count, self.ffn or preset_config.feed_forward_length, heads,
            self.kv_heads or (preset_config.head_count_kv if self.heads is None else heads),
            rope_freq_base=self.rope_freq_base, rms_eps=self.norm_rms_eps,
            rope_scaling=linear_scaling(self.rope_freq_scale),
        )  # fmt: skip
        if model_config.embedding_length % (2 * heads):
            raise InputError(
                f"--dim {model_config.embedding_length} must be an even multiple of --heads {heads}"
            )
        if heads % model_config.head_count_kv:
            fact = f"--heads {heads} must be a multiple of --kv-heads {model_config.head_count_kv}"
            raise InputError(fact)
        return model_config
