"""Expected times beside what steps take, and what data means for them."""

import numpy as np
import pytest

from packtrain.engine.optim import SGD
from packtrain.planner import expected_pace
from packtrain.planner.expected_pace import NUM_COMPARED_STEPS, attended_share, num_trained_tokens
from packtrain.planner.plan_table import plan_text
from packtrain.planner.step_shape import StepShape
from packtrain.planner.training_plans import make_plans
from tests.models import CONFIG


def batch(*lengths: int, weights: float = 1.0) -> dict[str, np.ndarray]:
    """A row of documents of these lengths."""
    return {
        "seq": np.repeat(np.arange(len(lengths)), lengths)[None],
        "pos": np.concatenate([np.arange(n) for n in lengths])[None],
        "weights": np.full((1, sum(lengths)), weights, np.float32),
    }


def test_one_document_is_seen_whole():
    assert attended_share([batch(256)]) == attended_share([batch(300)]) == 1.0


def test_documents_hide_others():
    assert attended_share([batch(64, 64, 64, 64)]) == 4 / 10
    assert attended_share([batch(128, 128), batch(256)]) == (6 + 10) / 20
    assert attended_share([batch(*[8] * 32)]) == 4 / 10  # each block of queries sees its own


def test_learnt_tokens_are_counted():
    batches = [batch(10), batch(5, weights=0.0), batch(4, 3)]
    assert num_trained_tokens(batches, 22) == 17
    assert num_trained_tokens(batches, 220) == 170
    assert num_trained_tokens([], 2048) == 2048


@pytest.fixture
def processor(monkeypatch):
    """The time for which other programs had the processor, as a test says."""
    lost = [0.0]
    monkeypatch.setattr(expected_pace, "processor_wait_seconds", lambda: lost[0])
    return lost


def paced_steps(
    expected: float, took: float, processor: list[float], share: float = 1.0, left: int = 1000
):
    """What is said in some steps of so many seconds, and by what the rates were corrected."""
    corrections = list[float]()
    report_pace = expected_pace.pace(expected, corrections.append)
    said = []
    for i in range(3 * NUM_COMPARED_STEPS):
        processor[0] += took * (1 - share)
        said.append(report_pace(took * (10 if i == 0 else 1), left - i))
    return [text for text in said if text], corrections


def test_a_step_as_expected_needs_no_word(processor):
    assert paced_steps(1.0, 1.15, processor) == ([], [])
    assert paced_steps(1.0, 0.85, processor) == ([], [])


def test_a_run_that_is_off_says_so_once_and_corrects_the_rates(processor):
    said, corrections = paced_steps(12.1, 21.0, processor, left=105)
    assert corrections == [21.0 / 12.1] and said == [
        "a step takes 21 s, not the 12.1 s expected: 35:00 for the 100 steps left; "
        "the next run expects that"
    ]
    said, corrections = paced_steps(1.0, 0.5, processor)
    assert corrections == [0.5] and len(said) == 1


def test_a_busy_machine_poisons_nothing(processor):
    said, corrections = paced_steps(1.0, 3.0, processor, share=0.4)
    assert not corrections and said[0].endswith("other programs are using the processor")


def test_the_end_of_a_short_run_is_not_worth_a_word(processor):
    assert paced_steps(0.001, 0.002, processor) == ([], [])


def test_one_slow_step_is_no_reason(processor):
    report_pace = expected_pace.pace(1.0, lambda _: pytest.fail("corrected"))
    assert not any(report_pace(t, 1000) for t in (1.0, 1.0, 9.0, 1.0, 1.1, 1.0, 1.0))
    assert expected_pace.NUM_COMPARED_STEPS >= 3


def test_a_plan_tells_computed_from_learnt_tokens():
    plans = make_plans(StepShape(CONFIG, 4, 16, evaluate=False), SGD())
    first, *_, last = plan_text(plans, 2.0, 10, num_trained=20).splitlines()
    assert "4 × 16 = 64 tokens, 20 of them learnt" in first
    assert " 32 tokens/s" in last and "learnt" not in last
    first, *_, last = plan_text(plans, 2.0, 10, num_trained=63).splitlines()
    assert first.endswith("= 64 tokens") and " 32 tokens/s" in last
