"""`packtrain convert` beside llama.cpp's own converter, on what transformers saves: a table of benchmarks.conformance.

    pip install transformers torch protobuf
    python -m benchmarks.converters FOLDER [--types f32 f16 …] [CLASS …]

FOLDER is llama.cpp's source, with convert_hf_to_gguf.py. Each small model of benchmarks.convert, and an InternLM 2,
which transformers does not have, is saved with a SentencePiece model and with a byte-level vocabulary, and both
converters read the folder. Names, shapes, types and bytes of tensors and all keys must be equal, or stand with their
reason in DIFFERENCE_REASONS.
"""

import argparse
import contextlib
import io
import json
import logging
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from packtrain.common.errors import InputError
from packtrain.conversion.hugging_face import convert
from packtrain.gguf import GGUF
from tests.hugging_face import (
    bpe_tokenizer,
    internlm2,
    sentencepiece_model,
    write_checkpoint,
    write_safetensors,
)

HEADING = """
`packtrain convert` beside llama.cpp's convert_hf_to_gguf on small checkpoints that transformers saves, each with a
SentencePiece model and with a byte-level vocabulary where llama.cpp's converter takes both: how many tensors have equal
names, shapes, types and bits, and how many keys are equal, of all that either file has but names of folders. What
differs must be listed, with its reason.

| class | type | vocabularies | tensors equal | keys equal | what differs, and why |
|---|---|---|---|---|---|"""
# names of folders, and what gguf writes beside
GUESSED = {f"general.{n}" for n in ("name", "basename", "finetune", "size_label")}
GUESSED |= {"general.quantization_version"}
INTERN = "InternLM2Config"
EOT, CAP = "tokenizer.ggml.eot_token_id", "final_logit_softcapping"
# (beginning of the class, name of the key or tensor, reason); names may be patterns
DIFFERENCE_REASONS = (
    ("", r".*\.ssm_a", "-exp(x), which PyTorch and NumPy round differently, in the last bit"),
    ("Gemma3nTextConfig shared", r"blk\.2[01]\.attn_(k|v|k_norm)\.weight",
     "llama.cpp demands them in every block and does not use them; transformers no longer saves them"),
    ("GemmaConfig", EOT, "107 there, whatever the vocabulary has"),
    ("Gemma4", r"tokenizer\.ggml\.pre", "llama.cpp names the kind of vocabulary only, which is enough for both"),
    ("Gemma4", r"tokenizer\.ggml\.scores", "read by neither, as this vocabulary has merges"),
    ("Gemma4", r"tokenizer\.ggml\.token_type", "<unk> is unknown here, control there"),
    ("Gemma4", r"tokenizer\.ggml\.add_eos_token", "false, which is what llama.cpp takes without it"),
    ("Gemma4", rf"gemma4\.{CAP}", "0, as config.json says; without the key llama.cpp takes 30"),
    ("HunYuan", EOT, "what ends a turn; llama.cpp finds it by its name"),
    ("Ernie4_5_Moe", r".*expert_shared_feed_forward_length",
     "llama.cpp divides the feed-forward's width by the key heads, which is the same in Baidu's models"),
    ("Deepseek", r".*expert_gating_func", "as transformers computes it; there only if config.json says scoring_func"),
    ("Glm4Moe", r".*(block_count|nextn_predict_layers)",
     "llama.cpp counts a block that guesses further tokens, which transformers does not save"),
    ("GraniteMoeHybridConfig all", r"granite\.(attention\.head_count_kv|ssm\..*|expert_.*)",
     "llama.cpp writes the mixture's and scan's sizes of a model without either, and key heads for each block"),
    ("PhiConfig", r"phi2\.(attention\.head_count_kv|feed_forward_length)",
     "constants there, as in Phi 2; here as config.json says"),
    ("Olmo3Config", r"olmo2\.rope\.scaling\.attn_factor",
     "attention_factor divided by YaRN's own factor, by which llama.cpp multiplies the key; logits are transformers'"),
    ("Olmo3Config", r"olmo2\.rope\.scaling\.yarn_attn_factor",
     "attention_factor, which llama.cpp reads for Grok only; logits differ from transformers'"),
    ("FalconConfig", r"falcon\.context_length", "2048 there, whatever config.json says"),
    (INTERN, r"tokenizer\.ggml\.add_space_prefix", "true, which is what llama.cpp takes without it"),
    ("NemotronConfig", r"tokenizer\.ggml\.unknown_token_id", "1 there, whatever the vocabulary has"),
    ("", r"tokenizer\.ggml\.unknown_token_id",
     "as tokenizer.model says; there only if a tokenizer.json lists it, and llama.cpp takes 0 without it"),
)  # fmt: skip
Hyper = dict[str, Any]


def hybrid(hparams: Hyper) -> None:
    names = {"linear_attention": "mamba", "full_attention": "attention"}
    hparams["layer_types"] = [
        names.get(layer_type, layer_type) for layer_type in hparams["layer_types"]
    ]


# keys of config.json by names that transformers 5 has given up and llama.cpp's converter reads, by its own reader only
OLDER: dict[str, Callable[[Hyper], Any]] = {
    "Cohere2": lambda config: config.update(rotary_pct=1.0),
    "FalconConfig": lambda config: (
        config["new_decoder_architecture"] or config.update(num_kv_heads=1)
    ),
    "GPT2": lambda config: config.update(n_ctx=config["n_positions"]),
    "GraniteMoeHybrid": hybrid,
}


# ---- vocabularies --------------------------------------------------------------------------------------------


def pieces(folder: Path) -> None:
    """A SentencePiece model, whose special and user-defined pieces tokenizer_config.json lists, as Llama 2's does."""
    texts = "<unk>", "<s>", "</s>", "[UNUSED_TOKEN_1]"
    (folder / "tokenizer.model").write_bytes(sentencepiece_model(symbols=texts[3:]))
    listed = {
        str(id): {"content": text, "special": text.startswith("<")} for id, text in enumerate(texts)
    }
    settings = {"add_bos_token": True, "add_eos_token": False, "added_tokens_decoder": listed}
    settings |= {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    settings |= {"tokenizer_class": "LlamaTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def tokenizer(folder: Path, hf_tokenizer: Any, **settings: Any) -> None:
    """A tokenizer.json and its settings; the model's config and the generation's name ids of the same tokens."""
    hf_tokenizer.save(str(folder / "tokenizer.json"))
    ids = {
        f"{name}_id": hf_tokenizer.token_to_id(text)
        for name, text in settings.items()
        if name.endswith("_token")
    }
    for path in folder.glob("*config.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | ids))
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def bytewise(folder: Path) -> None:
    """A byte-level vocabulary as GPT-2's, which llama.cpp is told that it is."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    model = bpe_tokenizer("")["model"]
    hf_tokenizer = Tokenizer(models.BPE(model["vocab"], [tuple(pair) for pair in model["merges"]]))
    hf_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    hf_tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    hf_tokenizer.decoder = decoders.ByteLevel()
    special = "<|begin|>", "<|eot_id|>", "<|endoftext|>", "[gMASK]", "<|user|>", "<|observation|>"
    hf_tokenizer.add_special_tokens([*special])
    hf_tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    tokenizer(folder, hf_tokenizer, bos_token="<|begin|>", eos_token="<|eot_id|>")


def merged(folder: Path) -> None:
    """One that spells bytes as <0x0A> and has merges, as Gemma 4's."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    special = "<pad>", "</s>", "<s>", "<unk>"
    texts = [*special, *(f"<0x{b:02X}>" for b in range(256)), "\u2581", *"hel", "he", "ll", "hell"]
    words = {text: id for id, text in enumerate(dict.fromkeys(texts))}
    pairs = [("h", "e"), ("l", "l"), ("he", "ll")]
    hf_tokenizer = Tokenizer(
        models.BPE(words, pairs, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    hf_tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    spaced = decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()
    hf_tokenizer.decoder = decoders.Sequence([*spaced])
    turns = "<|turn>", "<turn|>"
    hf_tokenizer.add_special_tokens([*special, "<|channel>", "<channel|>", *turns, "<|tool_call>"])
    while (count := hf_tokenizer.get_vocab_size()) < 320:
        hf_tokenizer.add_tokens([AddedToken(f"[word{count}]", special=False)])
    tokenizer(
        folder, hf_tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>",
        additional_special_tokens=[*turns],
    )  # fmt: skip


VOCABULARIES: dict[str, Callable[[Path], None]] = {
    "pieces": pieces,
    "bytes": bytewise,
    "merged": merged,
}


def remove_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


# ---- checkpoints, and both files of one ----------------------------------------------------------------------


def save(name: str, folder: Path) -> None:
    """The checkpoint of a class, without a vocabulary."""
    if name == INTERN:
        config, tensors = write_checkpoint(folder)
        rope = {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "model_type": "internlm2"}
        config, converted = internlm2(config | rope, tensors)
        rows = config["vocab_size"] = 310  # pieces of the model, as llama.cpp asks for each
        end_names = "model.tok_embeddings.weight", "output.weight"
        converted |= {end: converted[end][:rows] for end in end_names}
        (folder / "config.json").write_text(json.dumps(config))
        write_safetensors(folder / "model.safetensors", converted)
        return
    from benchmarks.convert import tiny

    tiny(name)[1].save_pretrained(folder)


def theirs(name: str, folder: Path, out: Path, kind: str) -> None:
    """llama.cpp's file."""
    import gguf
    import torch
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class

    types = gguf.LlamaFileType
    by_name = {"f32": types.ALL_F32, "auto": types.GUESSED}
    hparams = ModelBase.load_hparams(folder, False)
    for beginning, change in OLDER.items():
        if name.startswith(beginning):
            change(hparams)
    model_class = get_model_class(get_model_architecture(hparams, ModelType.TEXT))
    if model_class.supports_mtp_export and "Qwen3" in name:
        model_class.no_mtp = (
            True  # transformers does not save the block that guesses further tokens
        )
    with torch.inference_mode(), contextlib.redirect_stderr(io.StringIO()):
        file_type = by_name[kind] if kind in by_name else types[f"MOSTLY_{kind.upper()}"]
        model_class(folder, file_type, out, hparams=hparams).write()


def equal_values(a: Any, b: Any) -> bool:
    """Whether two values of a key are equal, numbers to the last digits of f32."""
    if not (isinstance(a, list | tuple | np.ndarray) and isinstance(b, list | tuple | np.ndarray)):
        real = isinstance(a, float | np.floating)
        return bool(a == b or (real and abs(a - b) <= 1e-6 * max(1.0, abs(a))))
    return len(a) == len(b) and all(map(equal_values, a, b))


def compare_files(our_file: GGUF, their_file: GGUF) -> tuple[Counter[str], list[str]]:
    """Counts of tensors and keys, all and equal ones, and the names of those that differ."""
    counts, names = Counter[str](), list[str]()
    for name in sorted({*our_file.entries, *their_file.entries}):
        counts["tensors"] += 1
        a, b = our_file.entries.get(name), their_file.entries.get(name)
        fits = a and b and (tuple(a.shape), str(a.dtype)) == (tuple(b.shape), str(b.dtype))
        if fits and our_file.array(name).tobytes() == their_file.array(name).tobytes():
            counts["equal tensors"] += 1
        else:
            names.append(name)
    for name in sorted({*our_file.values, *their_file.values} - GUESSED):
        counts["keys"] += 1
        our_value, their_value = our_file.values.get(name), their_file.values.get(name)
        if (
            our_value
            and their_value
            and our_value.kind == their_value.kind
            and equal_values(our_value.value, their_value.value)
        ):
            counts["equal keys"] += 1
        else:
            names.append(name)
    return counts, names


def close(name: str, our_file: GGUF, their_file: GGUF) -> bool:
    """Whether a tensor that differs does so in its last bits only."""
    pair = [file.entries.get(name) for file in (our_file, their_file)]
    if not all(entry and str(entry.dtype) == "f32" for entry in pair):
        return False
    a, b = (gguf_entry.array(name).astype(np.float64) for gguf_entry in (our_file, their_file))
    return a.shape == b.shape and bool((np.abs(a - b) <= 4e-7 * np.abs(b)).all())


def explain_differences(
    name: str, our_file: GGUF, their_file: GGUF, names: Sequence[str]
) -> tuple[bool, list[str]]:
    """Whether all that differs has a reason, and what to say about it."""
    grouped: dict[tuple[str, str], list[str]] = {}
    for key in names:
        fits = (
            reason_text
            for start, form, reason_text in DIFFERENCE_REASONS
            if name.startswith(start) and re.fullmatch(form, key)
        )
        reason = next(fits, "**no**")
        if key.endswith(".ssm_a") and not close(key, our_file, their_file):
            reason = "**no**"
        is_ours, is_theirs = (
            key in file.values or key in file.entries for file in (our_file, their_file)
        )
        side = "" if is_ours and is_theirs else "here only: " if is_ours else "there only: "
        short_name = re.sub(r"blk\.\d+", "blk.*", key).replace("tokenizer.ggml.", "")
        grouped.setdefault((reason, side), []).append(short_name)
    said = [
        f"{at}{', '.join(dict.fromkeys(short_names))} ({reason_text})"
        for (reason_text, at), short_names in grouped.items()
    ]
    return all(reason_text != "**no**" for reason_text, _ in grouped), said


def allows_vocabulary(name: str, vocabulary: str) -> bool:
    """Whether models of the class may have the vocabulary."""
    if name.startswith("Gemma4"):
        return vocabulary == "merged"
    return vocabulary == "pieces" or (vocabulary == "bytes" and not name.startswith("Gemma"))


def compare_folder(
    name: str, kind: str, folder: Path
) -> tuple[bool, Counter[str], list[str]] | None:
    """Both files of a folder: whether they are as they should be, counts, and what to say; None for no such class."""
    a, b = folder.parent / "a.gguf", folder.parent / "b.gguf"
    theirs(name, folder, b, kind)
    their_file = GGUF(b)
    model = their_file.metadata["tokenizer.ggml.model"]
    if (folder / "tokenizer.model").exists() and model != "llama":
        return None  # its converter made bytes of pieces, which such models never have
    convert(folder, a, kind)
    counts, names = compare_files(GGUF(a), their_file)
    good, said = explain_differences(name, GGUF(a), their_file, names)
    return good, counts, said


def row(name: str, kind: str) -> tuple[bool, str]:
    """Both files of a class, with each vocabulary that llama.cpp's converter takes."""
    used, counts, lines, refused = [*""], Counter[str](), [*""], ""
    short_name, good = name.replace("Config", ""), True
    with tempfile.TemporaryDirectory() as tmp_folder:
        folder = Path(tmp_folder) / "tiny"
        save(name, folder)
        for vocabulary in (
            vocabulary_name
            for vocabulary_name in VOCABULARIES
            if allows_vocabulary(name, vocabulary_name)
        ):
            remove_tokenizer(folder)
            VOCABULARIES[vocabulary](folder)
            try:
                comparison = compare_folder(name, kind, folder)
            except InputError as error:  # packtrain's
                return False, f"| {short_name} | {kind} | {vocabulary} | - | - | **no**: {error} |"
            except (Exception, SystemExit) as error:
                refused = f"llama.cpp's converter stops: {error!r}"[:200]
                continue
            if comparison is not None:
                used.append(vocabulary)
                good, counts, lines = (
                    good and comparison[0],
                    counts + comparison[1],
                    lines + comparison[2],
                )
    if not used:
        return False, f"| {short_name} | {kind} | - | - | - | **no**: {refused} |"
    tensors, keys = (
        f"{counts[f'equal {quantity}']} of {counts[quantity]}" for quantity in ("tensors", "keys")
    )
    differs = "; ".join(dict.fromkeys(lines)) or "-"
    return good, f"| {short_name} | {kind} | {', '.join(used)} | {tensors} | {keys} | {differs} |"


def yield_returned(generate: Callable[..., Any]) -> Callable[..., Iterator[Any]]:
    """With what a generator returns behind what it yields: llama.cpp's of StableLM returns the heads' norms."""

    def wrapper(*args: Any) -> Iterator[Any]:
        returned: Any = yield from generate(*args)
        yield from returned or ()

    return wrapper


def import_converter(folder: Path) -> None:
    """llama.cpp's converter, importable; it is told the byte-level vocabulary, which it knows by a sum of real ones."""
    sys.path[:0] = [str(folder), str(folder / "gguf-py")]
    import torch
    import transformers
    from conversion.base import TextModel
    from conversion.stablelm import StableLMModel

    TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    StableLMModel.modify_tensors = yield_returned(StableLMModel.modify_tensors)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)


def rows_from_python(python: str, folder: Path) -> Iterator[tuple[bool, str]]:
    """The rows, by a Python that has transformers."""
    command = [
        python,
        "-m",
        "benchmarks.converters",
        str(folder),
        "--rows",
        "--types",
        "f32",
        "q8_0",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("|"):
                yield "**no**" not in line, line.rstrip()
    if process.returncode not in (0, 1):
        yield False, f"| **no**: {' '.join(command)} ended with {process.returncode} |"


def main() -> int:
    from benchmarks.convert import CLASSES

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("llama_cpp", type=Path, help="llama.cpp's source")
    parser.add_argument("classes", nargs="*", help="these only, by the beginnings of their names")
    parser.add_argument("--types", nargs="+", default=["f32"])
    parser.add_argument("--rows", action="store_true", help="without the heading")
    args = parser.parse_args()
    import_converter(args.llama_cpp.absolute())
    if not args.rows:
        print(HEADING)
    prefixes, good = tuple(args.classes), True
    for name in [*CLASSES, INTERN]:
        for kind in args.types if name.startswith(prefixes or "") else ():
            is_good, line = row(name, kind)
            good = good and is_good
            print(line, flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
