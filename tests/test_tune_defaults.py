"""Settings of finetune that follow from the model and the data."""

from dataclasses import replace

import pytest

from packtrain.training.finetune_defaults import (
    GOOD_UPDATES,
    MIN_UPDATES,
    count_updates,
    default_alpha,
    default_rate,
    prospect_text,
    with_defaults,
    with_saved_choices,
)
from packtrain.training.finetune_settings import TuneSettings
from packtrain.training.lr_schedule import steps_per_eval

SETTINGS = TuneSettings()


@pytest.mark.parametrize(("width", "lowest", "highest"), [(640, 3e-4, 1.2e-3), (4096, 1e-4, 2e-4)])
def test_the_rate_follows_the_width(width, lowest, highest):
    assert lowest <= default_rate(SETTINGS, width) <= highest


def test_rates_of_all_weights_and_of_pairs_are_tenths():
    rate = default_rate(SETTINGS, 640)
    assert default_rate(replace(SETTINGS, full=True), 640) == pytest.approx(rate / 10, rel=0.05)
    assert default_rate(replace(SETTINGS, loss="dpo"), 640) == pytest.approx(rate / 10, rel=0.05)


@pytest.mark.parametrize("rank", [4, 16, 64])
def test_the_scale_does_not_depend_on_the_rank(rank):
    assert default_alpha(False, rank) / rank == default_alpha(False, 16) / 16


@pytest.mark.parametrize(
    ("examples", "rows", "batch_size", "epochs"),
    [
        (82, 17, 1, 11),  # a style
        (82, 82, 1, 3),  # a row each
        (300, 63, 1, 3),
        (1_000, 210, 2, 2),
        (9_000, 4_000, 4, 1),
        (20, 8, 1, 12),
        (3, 1, 1, 12),
    ],
)
def test_small_data_gets_small_steps_and_more_passes(examples, rows, batch_size, epochs):
    settings = with_defaults(SETTINGS, 640, examples, rows)
    assert (settings.batch_size, settings.epochs) == (batch_size, epochs)
    updates = count_updates(settings, rows, settings.epochs)
    assert updates >= GOOD_UPDATES or settings.epochs == 12


def test_what_is_asked_for_stays():
    requested = replace(SETTINGS, lr=1e-5, batch_size=3, epochs=2.5)
    assert with_defaults(requested, 640, 82, 17) == requested
    steps = with_defaults(replace(SETTINGS, iters=8), 640, 9_000, 4_000)
    assert (steps.batch_size, steps.epochs, steps.iters) == (4, None, 8)
    assert with_defaults(replace(SETTINGS, iters=40), 640, 82, 17).batch_size == 1


@pytest.mark.parametrize(("nproc", "batch_size"), [(2, 2), (3, 3), (4, 4), (8, 8)])
def test_processes_share_out_the_rows(nproc, batch_size):
    assert with_defaults(replace(SETTINGS, nproc=nproc), 640, 82, 17).batch_size == batch_size


@pytest.mark.parametrize(
    ("examples", "updates", "end"),
    [
        (82, 51, "enough for a style, not for facts"),
        (20, 40, "enough for a tone; 50 to 100 examples make a style"),
        (9_000, 1_000, "enough for a style or a task; facts belong in the prompt"),
    ],
)
def test_the_prospect_says_what_the_data_can_teach(examples, updates, end):
    settings = with_defaults(SETTINGS, 640, examples, 17)
    assert prospect_text(examples, updates, 17, settings).endswith(end)


def test_too_few_updates_are_named_with_what_would_do():
    settings = with_defaults(replace(SETTINGS, epochs=1.0), 640, 82, 17)
    said = prospect_text(78, 17, 17, settings)
    assert "78 examples, 17 updates (1 epoch, learning rate 4.4e-04)" in said
    assert "too few" in said and "--epochs 2" in said
    assert count_updates(settings, 17, 2) >= MIN_UPDATES


def test_a_resumed_run_has_the_choices_of_its_beginning(tmp_path):
    resumed = replace(SETTINGS, output=tmp_path / "mine.gguf", resume=True)
    assert with_saved_choices(resumed) == resumed  # it has not begun
    (tmp_path / "mine.run").mkdir()
    run = tmp_path / "mine.run" / "run.yaml"
    run.write_text("lr: 0.0007\nbatch_size: 2\nepochs: 5.0\nlora_alpha: null\n")
    restored = with_saved_choices(resumed)
    assert (restored.lr, restored.batch_size, restored.epochs) == (7e-4, 2, 5)
    assert restored.lora_alpha is None
    assert with_saved_choices(replace(resumed, epochs=6.0)).epochs == 6
    # a run from before the defaults followed from the data
    run.write_text("lr: null\nbatch_size: 4\nepochs: null\niters: null\nlora_alpha: 32.0\n")
    restored = with_saved_choices(resumed)
    assert (restored.lr, restored.batch_size, restored.epochs, restored.lora_alpha) == (
        None,
        4,
        1,
        32,
    )
    assert with_defaults(restored, 640, 82, 17).learning_rate == 2e-4


@pytest.mark.parametrize(("steps", "every"), [(4, 5), (40, 5), (51, 7), (300, 38), (10_000, 200)])
def test_a_run_validates_about_eight_times(steps, every):
    assert steps_per_eval(None, steps) == every
