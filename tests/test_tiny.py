"""The whole system in five seconds: build, train three steps, generate a token."""

import numpy as np

from packtrain import Graph, Session, make_plan, place, verify
from packtrain.engine.optim import AdamW, training_graph
from packtrain.inference.kv_cache.kv_cells import CellTable
from packtrain.models import transformer
from packtrain.models.cached_transformer import CacheLayout, generation
from packtrain.models.config import Config
from tests.cell_inputs import feed_inputs

CONFIG = Config(
    vocab_size=17,
    context_length=16,
    embedding_length=16,
    block_count=2,
    feed_forward_length=32,
    head_count=2,
    head_count_kv=1,
)
TIME, CELLS = 12, 16


def test_build_train_and_generate():
    weights, optimizer = transformer.weights(CONFIG), AdamW(lr=0.02)
    loss = transformer.loss(CONFIG, weights, 1, TIME)
    graph = training_graph({"loss": loss.loss}, list(weights.values()), optimizer, max_norm=1.0)
    logits, handles = generation(CONFIG, weights, 1, CacheLayout(CELLS))
    session = Session()
    step, decode = (
        _bind(session, model_graph) for model_graph in (graph, Graph([logits], handles))
    )
    transformer.initialize_weights(CONFIG, 0, session.fill)

    text = np.arange(TIME + 1, dtype=np.int32)[None] % 5
    positions = np.arange(TIME, dtype=np.int32)[None]
    batch = {
        "tokens": text[:, :-1],
        "targets": text[:, 1:],
        "weights": np.full((1, TIME), 1 / TIME, np.float32),
        "pos": positions,
        "seq": np.zeros_like(positions),
    }
    losses = [float(step(batch | optimizer.inputs(t))["loss"]) for t in range(1, 21)]
    assert losses[0] > losses[1] > losses[2]

    cells, token = CellTable(CELLS), 0
    said = []
    for _ in range(6):
        fed = feed_inputs(cells, *(np.array([n], np.int32) for n in (token, 0, 0)))
        token = int(decode(fed)["logits"].argmax())
        said.append(token)
    assert said == [1, 2, 3, 4, 0, 1]


def _bind(session: Session, graph: Graph):
    placed = place(graph)
    plan = make_plan(placed)
    verify(plan, placed)
    return session.executor(placed, plan)
