"""The training engine step by step beside its twin in PyTorch: same values and batches, so same losses."""

import numpy as np
import pytest

from packtrain.data.text import DocumentTokens
from packtrain.engine.optim import AdamW
from packtrain.models import transformer
from packtrain.models.config import Config
from packtrain.planner.step_shape import StepShape
from packtrain.planner.training_plans import make_plans
from packtrain.training.lr_schedule import LrSchedule
from packtrain.training.text_batches import TextBatches
from packtrain.training.training_engine import TrainingEngine
from tests import checks
from tests.models import initial_weights

pytest.importorskip("torch")
torch_llama = pytest.importorskip("benchmarks.torch_llama")
pytestmark = pytest.mark.torch

CONFIG = Config(320, 32, 32, 2, 64, 4, 2)
ROWS, TIME, STEPS = 4, 32, 6
MAX_NORM = 0.3  # below the norm of every step here, so that all are clipped


@pytest.fixture
def tokens() -> DocumentTokens:
    """Five documents, some shorter than a window, so that rows have several and the last is padded."""
    ids = np.random.default_rng(0).integers(3, CONFIG.vocab_size, 450).astype(np.uint16)
    starts = np.array([0, 100, 115, 200, 390])
    ids[starts] = 1
    ids[starts[1:] - 1] = 2
    return DocumentTokens(ids, starts)


@pytest.mark.parametrize("micros", [1, 2])
def test_steps_and_validation_are_those_of_the_twin(tokens: DocumentTokens, micros: int) -> None:
    train = TextBatches(tokens, ROWS, TIME, seed=3)
    valid = TextBatches(tokens, ROWS, TIME, shuffle=False)
    optimizer, schedule = AdamW(lr=5e-3), LrSchedule("cosine", 5e-3, 5e-4, 2, STEPS)
    engine = TrainingEngine(
        make_plans(StepShape(CONFIG, ROWS, TIME, micros, MAX_NORM), optimizer), optimizer
    )
    transformer.initialize_weights(CONFIG, 5, engine.session.fill)
    model = torch_llama.Llama(CONFIG, initial_weights(CONFIG, 5))
    twin = torch_llama.Trained(model, torch_llama.optimizer(model, 5e-3), MAX_NORM)
    actual, expected = list[float](), list[float]()
    for step in range(1, STEPS + 1):
        batches = [train[(step - 1) * micros + i] for i in range(micros)]
        stepped = engine.step(batches, step, schedule.rate(step))
        assert stepped.norm > MAX_NORM
        actual.append(stepped.loss)
        expected.append(twin.step(batches, schedule.rate(step)))
    valid_batches = [valid[i] for i in range(len(valid))]
    assert any(batch["seq"].any() for batch in valid_batches)
    assert min(batch["weights"].min() for batch in valid_batches) == 0
    actual.append(engine.evaluate(valid_batches).loss)
    expected.append(twin.evaluate(valid_batches))
    checks.assert_close(np.array(actual, np.float32), np.array(expected, np.float32), "losses")
