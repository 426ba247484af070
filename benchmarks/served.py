"""Greedy answers of packtrain serve, beside llama-server's and `packtrain generate`'s, alone and with seven neighbours.

    python -m benchmarks.served MODEL.gguf --llama-server PATH

Prints how many answers are equal; where one is not, the token at which it differs and how far our two likeliest tokens
are apart there, in nats. llama.cpp rounds activations of packed types to 8 bits: unpack a model to F32 to compare
exactly. Exit code 1 if an answer depends on its neighbours, or is not what `generate` writes.
"""

import argparse
import http.client
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.serving import run_concurrently, server_process

COUNT, OURS, THEIRS = 32, 8981, 8982
PROMPTS = (
    "Once upon a time", "The capital of France is", "Water boils at", "def add(a, b):", "In 1969,",
    "My favourite food is", "The little girl", "A train leaves at noon", "She said that", "The sun is",
)  # fmt: skip


def ask(port: int, prompt: str) -> Any:
    body = {
        "prompt": prompt, "n_predict": COUNT, "temperature": 0, "n_probs": 2, "return_tokens": True,
        "cache_prompt": False,
    }  # fmt: skip
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", "/completion", json.dumps(body))
    return json.loads(connection.getresponse().read())


def difference(our_answer: Any, their_answer: Any) -> tuple[int, float] | None:
    """The first token that differs, and how far our two likeliest are apart there; None: there is none."""
    pairs = zip(our_answer["tokens"], their_answer["tokens"], strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if at is None:
        return None
    top_token, runner_up = our_answer["completion_probabilities"][at]["top_logprobs"]
    return at, top_token["logprob"] - runner_up["logprob"]


def print_peer_differences(single_answers: dict[str, Any]) -> None:
    """Print how our answers differ from llama-server's."""
    comparisons = {
        prompt: difference(our_answer, ask(THEIRS, prompt))
        for prompt, our_answer in single_answers.items()
    }
    print(
        f"llama-server: {sum(mismatch is None for mismatch in comparisons.values())} of {len(comparisons)} are equal"
    )
    for prompt, mismatch in comparisons.items():
        if mismatch is not None:
            print(
                f"  {prompt!r}: differs at token {mismatch[0]}, where our two likeliest are {mismatch[1]:.4f} apart"
            )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--llama-server", type=Path, required=True)
    args = parser.parse_args()
    os.environ["LD_LIBRARY_PATH"] = str(args.llama_server.resolve().parent)
    packtrain, model = [sys.executable, "-m", "packtrain"], str(args.model)
    ours = [*packtrain, "serve", model, "--port", str(OURS), "--ctx-size", "4096", "-np", "8"]
    theirs = [str(args.llama_server), "-m", model, "--port", str(THEIRS), "-c", "4096", "-t", "2"]
    with server_process(ours, OURS), server_process(theirs, THEIRS):
        single_answers, crowd = {prompt: ask(OURS, prompt) for prompt in PROMPTS}, dict[str, Any]()

        def among(prompt: str) -> None:
            crowd[prompt] = ask(OURS, prompt)

        run_concurrently([partial(among, prompt) for prompt in PROMPTS[:8]])
        num_equal = sum(
            crowd[prompt]["tokens"] == single_answers[prompt]["tokens"] for prompt in crowd
        )
        print(f"with seven neighbours: {num_equal} of {len(crowd)} are those alone")
        generate_flags = ["-n", str(COUNT), "--temperature", "0", "--no-display-prompt"]
        texts = {
            prompt: subprocess.run(
                [*packtrain, "generate", model, "-p", prompt, *generate_flags], stdout=-1, stderr=-3
            ).stdout
            for prompt in PROMPTS
        }  # fmt: skip
        written = sum(
            single_answers[p]["content"].strip() == texts[p].decode().strip() for p in PROMPTS
        )
        print(f"packtrain generate: {written} of {len(PROMPTS)} are equal")
        print_peer_differences(single_answers)
        return 0 if num_equal == len(crowd) and written == len(PROMPTS) else 1


if __name__ == "__main__":
    sys.exit(main())
