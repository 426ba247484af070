"""Train a small llama on the letters of its own source, then let it write: python examples/train_llama.py"""

from pathlib import Path

import numpy as np

import packtrain as pt
from packtrain.engine.optim import AdamW, training_graph
from packtrain.inference.kv_cache.cell_pools import CellPools
from packtrain.models import transformer
from packtrain.models.cached_transformer import CacheLayout, generation
from packtrain.models.config import Config

ROWS, TIME, STEPS, CELLS = 8, 64, 120, 128


def main() -> None:
    text = np.frombuffer(Path(__file__).read_bytes(), np.uint8).astype(np.int32)
    config = Config(256, TIME, 64, 2, 128, 4, 2)
    weights = transformer.weights(config)
    model_loss, optimizer = transformer.loss(config, weights, ROWS, TIME), AdamW(lr=3e-3)
    step_graph = training_graph(
        {"loss": model_loss.loss}, list(weights.values()), optimizer, max_norm=1.0
    )
    logits, handles = generation(config, weights, 1, CacheLayout(CELLS))

    session = pt.Session()
    train = session.executor(pt.place(step_graph))
    decode = session.executor(pt.place(pt.Graph({"logits": logits}, handles)))
    transformer.initialize_weights(config, 0, session.fill)
    print(train.plan.arena())

    rng = np.random.default_rng(0)
    fixed = {
        "weights": np.full((ROWS, TIME), 1 / (ROWS * TIME), np.float32),
        "pos": np.tile(np.arange(TIME, dtype=np.int32), (ROWS, 1)),
        "seq": np.zeros((ROWS, TIME), np.int32),
    }
    for t in range(1, STEPS + 1):
        starts = rng.integers(0, len(text) - TIME - 1, ROWS)
        rows = np.stack([text[s : s + TIME + 1] for s in starts])
        outputs = train(
            fixed | optimizer.inputs(t) | {"tokens": rows[:, :-1], "targets": rows[:, 1:]}
        )
        if t == 1 or t % 20 == 0:
            print(f"step {t:4}  loss {outputs['loss']:.3f}")

    cells, generated = CellPools(CELLS, sequences=1), list(b"import ")
    zeros = np.zeros(1, np.int32)
    for i in range(60):
        token = cells.place_tokens(np.array([generated[i]], np.int32), [(0,)])
        fed = cells.inputs(token, size=1) | {"rows": zeros}
        choice = int(decode(fed)["logits"].argmax())
        if i + 1 == len(generated):
            generated.append(choice)
    print(repr(bytes(generated).decode(errors="replace")))


if __name__ == "__main__":
    main()
