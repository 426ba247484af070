"""Names of options in llama.cpp's finetune and train-text-from-scratch, mlx-lm, PEFT, TRL, axolotl and unsloth.

ALIASES mean exactly what packtrain's option means, and are taken as flags, keywords and in YAML files. ADVICE names
packtrain's option where the meaning differs. In both, _ stands for -, and one dash for two. COMMAND_NAMES: commands.
"""

from collections.abc import Collection

TRAINING_OPTION = "--grad-accumulation-steps"  # which commands that train have
_COMMAND_ROWS = (
    "run: chat; lora sft: finetune; fuse export-lora: merge; show: inspect; perplexity: eval"
)
COMMON_NAMES = "m", "model", "hf", "hf-repo"  # whose advice holds for every command
_ALIAS_ROWS = """
--optimizer: opt; --weight-decay: wd adam-decay; --decay-axes: adam-decay-min-ndim; --lr: adam-alpha
--lr-min: learning-rate-min; --beta1: adam-beta1; --beta2: adam-beta2; --eps: adam-epsilon
--max-grad-norm: adam-gclip; --past: opt-past; --delta: opt-delta; --max-no-improvement: opt-max-no-improvement
--epochs: num-train-epochs num-epochs; --iters: max-steps adam-iter; --batch-size: batch
--grad-accumulation-steps: grad-acc gradient-accumulation-steps; --ctx: ctx-size max-length sequence-len cutoff-len
--val-split: val-set-size; --steps-per-eval: eval-steps; --steps-per-report: logging-steps; --save-every: save-steps
--patience: early-stopping-patience; --seed: random-state; --data: train-data f; --fill-samples: fill-with-next-samples
--vocab: vocab-model; --dim: embd; --ffn: ff; --heads: head; --layers: layer; --lora-rank: lora-r r rank
--rslora: use-rslora; --num-layers: lora-layers; --pack: packing sample-packing
--mask-prompt: assistant-only-loss completion-only-loss
"""
_ADVICE_ROWS = r"""
optim: --optimizer is adamw, adamw8bit, sgd, muon, muon8bit or lbfgs
lr-half: --lr-scheduler halving halves the rate every --lr-half-every steps
decay-epochs learning-rate-decay-epochs: the decay lasts the whole run, down to --lr-min
adam-min-alpha: --lr-min is the end of the decay, --warmup-lr the start of the warm-up
adam-epsf: --past and --delta end a run whose loss no longer changes
lr-scheduler-type lr-schedule lr-scheduler-kwargs: --lr-scheduler is cosine, linear, halving or constant
warmup warmup-steps: --warmup-ratio is the share of the steps used for warm-up
cos-decay-steps cos-decay-restart cos-decay-min enable-restart disable-restart: --lr-cycles decays that often
per-device-train-batch-size micro-batch-size: --batch-size counts the rows of all processes together
per-device-eval-batch-size eval-batch-size: --val-batches is the number of micro-batches of a validation
evals-per-epoch saves-per-epoch eval-strategy save-strategy: --steps-per-eval and --save-every count steps
save-total-limit: only the newest checkpoint is kept; --save-name keeps each
output-dir adapter-path: -o names the GGUF file; the folder NAME.run beside it has adapter and checkpoints
lora-out: -o names the adapter with --merge none; --adapter writes a copy of it
model-out: -o names the GGUF file; --save-model saves the model at each checkpoint
checkpoint-in checkpoint-out: --resume continues the run of -o, --save-name keeps each checkpoint
resume-from-checkpoint resume-adapter-file: --resume continues the run of -o
pattern-fn-it fn-latest: --save-name and --save-model name the files, with ITERATION and LATEST in them
m model model-base model-name model-name-or-path base-model: MODEL, a GGUF file, is the first argument; in YAML, model
dataset dataset-name datasets train-file: --data takes a file or folder
lora-target-modules target-modules lora-target-linear: --lora-modules takes GGUF's names: q_proj is attn_q
lora-parameters: use lora_rank, lora_alpha (rank times scale), lora_dropout and lora_modules
fine-tune-type finetuning-type load-adapter use-lora train-type: LoRA is the default; --full trains the weights
load-in-4bit load-in-8bit qlora quantize: the base keeps the types of its GGUF file, quantized or not
bf16 fp16 dtype torch-dtype: --precision is that of products; the base keeps the types of its GGUF file
grad-checkpoint gradient-checkpointing: --recompute is blocks, sqrt or none, or auto, which does what --memory needs
use-gradient-checkpointing use-checkpointing no-checkpointing: --recompute is blocks, sqrt, none or auto
use-flash no-flash flash-attention attn-implementation: --flash-attn is auto, on or off
train-on-inputs: --no-mask-prompt trains on prompts, too
loss-type dpo orpo simpo: --loss is next-token, dpo, ipo, simpo or orpo
sample-random-offsets overlapping-samples: --random-offsets starts each epoch at a random place
hf hf-repo: packtrain downloads nothing; `packtrain help base` says where GGUF files are
mmap no-mmap mlock: the base is always mapped from its file; --resident limits its pages in memory
cpu gpu cuda use-cpu: --device is cpu, torch:cpu, cuda or mps
dry-run: `packtrain plan train` and `packtrain plan finetune` run nothing
force overwrite-output-dir: --overwrite replaces the earlier run and its result
escape: \n and \t in texts are always read as a line feed and a tab
separate-with-eos separate-with-bos include-sample-start: --separator is the text between documents
report-to wandb wandb-project: --tensorboard writes its events, metrics.jsonl has every step, --watch shows curves
"""


def _table(rows: Collection[str]) -> dict[str, str]:
    """Parse rows such as `wd adam-decay: text` into a dictionary: the text behind the colon, by each word before it."""
    pairs = (row.strip().partition(": ") for row in rows)
    return {name: text for names, _, text in pairs for name in names.split()}


ALIASES = {
    name: option
    for option, names in _table(_ALIAS_ROWS.replace("\n", ";").split(";")).items()
    for name in names.split()
}
ADVICE = _table(_ADVICE_ROWS.splitlines())
COMMAND_NAMES = _table(_COMMAND_ROWS.split("; "))


def stem(name: str) -> str:
    """Return a name as ALIASES and ADVICE have it: --lora_r, -lora-r and lora_r are lora-r."""
    return name.lstrip("-").replace("_", "-")


def canonical_option(name: str, options: Collection[str]) -> str | None:
    """Return the one of `options` that a name, perhaps of another tool, means, or its --no-… form; None if none."""
    key = stem(name)
    candidates = [name, f"--{key}"]
    if TRAINING_OPTION in options:
        negated = ALIASES.get(key.removeprefix("no-"), "--")[2:]
        candidates += [ALIASES.get(key, ""), f"--no-{negated}" if key.startswith("no-") else ""]
    return next((candidate for candidate in candidates if candidate in options), None)


def advice(name: str, options: Collection[str]) -> str:
    """Return what to use instead of another tool's option: `; --resume continues …`, or an empty text."""
    key = stem(name)
    is_option = TRAINING_OPTION in options or key in COMMON_NAMES
    return f"; {ADVICE[key]}" if key in ADVICE and is_option else ""
