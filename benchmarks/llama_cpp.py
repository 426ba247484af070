"""The same GGUF written out greedily by packtrain and by llama.cpp: equal, or where they part.

    python -m benchmarks.llama_cpp MODEL.gguf [-p PROMPT] [-n 64]

llama.cpp comes as the package llama-cpp-python, which this project does not install. Its KV cache is set to f32 and
its flash attention is off; with an f16 or bf16 model it still rounds activations to that type, packtrain does not,
so that there replies may part where two tokens are nearly as likely. Exit code 0 if the tokens are equal.
"""

import argparse
import time
from collections.abc import Callable

import llama_cpp
import numpy as np

from packtrain.generate import Generator, Limits, Reply
from packtrain.models.file import ModelFile, open_model
from packtrain.sample import Sampling
from packtrain.tokenizer import Tokenizer

F32 = 0  # ggml.h, GGML_TYPE_F32


def ours(
    model: ModelFile, tokenizer: Tokenizer, prompt: list[int], count: int
) -> Callable[[], list[int]]:
    generator = Generator.of(model, len(prompt) + count)

    def write() -> list[int]:
        reply = Reply(generator, tokenizer, prompt, Sampling(temp=0.0), 0, Limits(count))
        list(reply)
        return reply.ids

    return write


def theirs(model: llama_cpp.Llama, prompt: list[int], count: int) -> Callable[[], list[int]]:
    vocabulary = llama_cpp.llama_model_get_vocab(model.model)

    def write() -> list[int]:
        model.reset()
        model.eval(prompt)
        ids: list[int] = []
        while len(ids) < count:
            logits = np.ctypeslib.as_array(
                llama_cpp.llama_get_logits(model.ctx), shape=(model.n_vocab(),)
            )
            ids.append(int(logits.argmax()))
            if llama_cpp.llama_vocab_is_eog(vocabulary, ids[-1]):
                return ids[:-1]
            if len(ids) < count:
                model.eval(ids[-1:])
        return ids

    return write


def timed(write: Callable[[], list[int]]) -> tuple[list[int], float]:
    """The tokens of a second run, and its seconds: the first one loads code and pages."""
    write()
    began = time.perf_counter()
    ids = write()
    return ids, time.perf_counter() - began


def compare(path: str, text: str, count: int) -> bool:
    """Print both texts and where they part; whether they are equal."""
    model = open_model(path)
    tokenizer = model.tokenizer()
    prompt = tokenizer.encode(text, eos=False)
    other = llama_cpp.Llama(
        path,
        n_ctx=len(prompt) + count,
        type_k=F32,
        type_v=F32,
        flash_attn=False,
        verbose=False,
    )
    same_prompt = other.tokenize(text.encode(), add_bos=tokenizer.add_bos, special=True) == prompt
    writers = {
        "packtrain": ours(model, tokenizer, prompt, count),
        "llama.cpp": theirs(other, prompt, count),
    }
    replies = {}
    for name, write in writers.items():
        replies[name], seconds = timed(write)
        whole = tokenizer.decode([*prompt, *replies[name]])
        print(f"{name}: {len(replies[name])} tokens in {seconds:.3f} s, prompt included\n{whole}\n")
    a, b = replies.values()
    at = next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
    said = "equal" if a == b else f"they part at token {at}: {a[at : at + 3]} and {b[at : at + 3]}"
    print(f"prompts {'equal' if same_prompt else 'DIFFER'}; replies: {said}")
    return same_prompt and a == b


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("-p", "--prompt", default="Once upon a time")
    parser.add_argument("-n", "--count", type=int, default=64)
    args = parser.parse_args()
    return 0 if compare(args.model, args.prompt, args.count) else 1


if __name__ == "__main__":
    raise SystemExit(main())
