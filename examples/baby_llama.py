"""A tiny llama learns a sine wave, by AdamW and by L-BFGS: python examples/baby_llama.py

After ggml's baby-llama: a token is a level of the wave, a datapoint a part of it. L-BFGS gets no more evaluations of
loss and gradient than AdamW; then the model goes on with the wave by itself, through a KV cache.
"""

import math
from dataclasses import replace

import numpy as np

import packtrain as pt
from packtrain.inference.kv_cache.cell_pools import CellPools
from packtrain.models import transformer
from packtrain.models.cached_transformer import CacheLayout, generation
from packtrain.models.config import Config
from packtrain.models.lora import A, Lora

LEVELS, PERIOD, TIME, ROWS, PROMPT_LENGTH = 16, 19.0, 64, 16, 8
FULL_CONFIG = Config(LEVELS, TIME, 32, 2, 64, 4, 2)
LOW = replace(
    FULL_CONFIG, lora=Lora((("blk.*", 4),))
)  # every matrix of a block as the product of two of rank 4


def wave(phases: np.ndarray, count: int) -> np.ndarray:
    """Levels (N, count) i32 of waves with these phases (N,)."""
    angles = 2 * math.pi * (np.arange(count) + phases[:, None]) / PERIOD
    return np.round((np.sin(angles) + 1) / 2 * (LEVELS - 1)).astype(np.int32)


def windows() -> dict[str, np.ndarray]:
    """All inputs of `transformer.loss`: the batch of every step."""
    tokens = wave(np.arange(ROWS) * PERIOD / ROWS, TIME + 1)
    weights = np.zeros((ROWS, TIME), np.float32)
    weights[:, PROMPT_LENGTH:] = 1 / (
        ROWS * (TIME - PROMPT_LENGTH)
    )  # before that, several waves look alike
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "weights": weights,
        "pos": np.tile(np.arange(TIME, dtype=np.int32), (ROWS, 1)),
        "seq": np.zeros((ROWS, TIME), np.int32),
    }


def learn(
    config: Config, optimizer: pt.AdamW | pt.LBFGS, evaluations: int
) -> tuple[pt.Trainer, float]:
    """Train with so many evaluations of loss and gradient; the trainer, and its last loss.

    The low-rank model is an adapter of matrices that are zero and stay so.
    """
    weights, data = transformer.weights(config), windows()
    frozen = tuple(name for name in weights if name + A in weights)
    zeros = {name: np.zeros(weights[name].shape, np.float32) for name in frozen}
    model = pt.Model(transformer.loss(config, weights, ROWS, TIME).loss, frozen=frozen)
    trainer, done = pt.Trainer(model, optimizer, batch=ROWS, physical=ROWS, values=zeros), 0
    while done < evaluations:
        done += trainer.step(data).evaluations
    loss = float(trainer.forward(data)["loss"])
    print(
        f"  {optimizer.name:5} lr {optimizer.lr:<6g} loss {loss:.6f}, {done} evaluations, {trainer.done} steps"
    )
    return trainer, loss


def go_on(config: Config, trainer: pt.Trainer, prompt_ids: np.ndarray, count: int) -> np.ndarray:
    """The wave, and `count` likeliest tokens after it, each fed back through the cache."""
    weights, cells = transformer.weights(config), CellPools(config.context_length, sequences=1)
    logits, handles = generation(config, weights, 1, CacheLayout(config.context_length))
    decode = trainer.session.executor(pt.place(pt.Graph({"logits": logits}, handles)))
    tokens, zeros = [*prompt_ids], np.zeros(1, np.int32)
    for at in range(len(prompt_ids) + count - 1):
        token = cells.place_tokens(np.array([tokens[at]], np.int32), [(0,)])
        fed = cells.inputs(token, size=1) | {"rows": zeros}
        choice = int(decode(fed)["logits"].argmax())
        if at + 1 == len(tokens):
            tokens.append(choice)
    return np.array(tokens)


def draw(tokens: np.ndarray, prompt_length: int) -> str:
    """A line for each second level from the top: o where the wave was given, * where the model wrote it."""
    marks = np.where(np.arange(len(tokens)) < prompt_length, "o", "*")
    lines = (
        "".join(np.where(tokens // 2 == level, marks, " "))
        for level in reversed(range(LEVELS // 2))
    )
    return "\n".join(line.rstrip() for line in lines)


def show(config: Config, trainer: pt.Trainer) -> None:
    expected = wave(np.zeros(1), TIME)[0]
    generated = go_on(config, trainer, expected[:16], TIME - 16)
    print(
        f"{(generated == expected)[16:].mean():.0%} of the {TIME - 16} tokens that it wrote are those of the wave:"
    )
    print(draw(generated, 16))


def main() -> None:
    print("the whole model")
    by_adamw = [
        learn(FULL_CONFIG, pt.AdamW(lr=lr, weight_decay=0.0), 100)[1] for lr in (3e-3, 1e-2, 3e-2)
    ]
    trainer, lbfgs_loss = learn(FULL_CONFIG, pt.LBFGS(), 80)
    assert lbfgs_loss < min(by_adamw)
    show(FULL_CONFIG, trainer)
    print("the model of low rank")
    trainer, _ = learn(LOW, pt.LBFGS(wolfe=0.5), 300)
    show(LOW, trainer)


if __name__ == "__main__":
    main()
