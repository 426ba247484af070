"""llama.cpp, asked one question: a JSON object on standard input, the answer as one on standard output.

    {"model": PATH, "tokens": [...], "count": N, "scores": PATH}   N greedy tokens after the last of `tokens`; the
                                                                   logits at each of `tokens` go to the .npy file;
                                                                   with "lora": [PATH, SCALE] beside an adapter
    {"model": PATH, "texts": [...], "special": BOOL}               ids of each text, the vocabulary alone is loaded
    {"model": PATH, "embed": [...], "pooling": N}                  vectors of texts, see llama_pooling_type
    {"model": PATH, "chains": [...], …}                            tokens drawn by samplers, see sampler_peer
    {}                                                             its version

It runs under a Python that has llama-cpp-python and needs nothing of packtrain. The KV cache is f32 and flash
attention is off, so that nothing is rounded that need not be.
"""

import json
import sys

import llama_cpp
import numpy as np

from benchmarks import sampler_peer

F32 = 0  # ggml.h, GGML_TYPE_F32


def answer(question: dict) -> dict:
    version = {"version": llama_cpp.__version__}
    if not question:
        return version
    if "texts" in question:
        model = llama_cpp.Llama(question["model"], vocab_only=True, verbose=False)
        special = question["special"]
        return version | {
            "ids": [model.tokenize(text.encode(), True, special) for text in question["texts"]]
        }
    if "embed" in question:
        return version | {"vectors": vectors(question)}
    if "chains" in question:
        return version | {"drawn": sampler_peer.drawn(question)}
    if "greedy" in question:
        return version | {"greedy": sampler_peer.greedy(question)}
    tokens, count = question["tokens"], question["count"]
    lora, scale = question.get("lora", (None, 1.0))
    model = llama_cpp.Llama(
        question["model"],
        n_ctx=len(tokens) + count,
        logits_all=True,
        type_k=F32,
        type_v=F32,
        flash_attn=False,
        lora_path=lora,
        lora_scale=scale,
        n_threads=2,
        verbose=False,
    )
    model.eval(tokens)
    np.save(question["scores"], model.scores[: len(tokens)])
    reply: list[int] = []
    while len(reply) < count:
        reply.append(int(model.scores[model.n_tokens - 1].argmax()))
        model.eval(reply[-1:])
    return version | {"reply": reply}


def vectors(question: dict) -> list[list[float]]:
    model = llama_cpp.Llama(
        question["model"],
        embedding=True,
        pooling_type=question["pooling"],
        type_k=F32,
        type_v=F32,
        flash_attn=False,
        n_threads=2,
        verbose=False,
    )
    return model.embed(question["embed"], normalize=False)


if __name__ == "__main__":
    print(json.dumps(answer(json.load(sys.stdin))))
