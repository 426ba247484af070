"""docs/reference.md says what the command line takes today."""

from tests.reference import PAGE, page


def test_the_page_is_that_of_the_settings():
    assert PAGE.read_text() == page(), "run `make reference`"


def test_every_command_has_a_section():
    text = page()
    for name in ("train", "finetune", "plan finetune", "eval", "merge"):
        assert f"\n## packtrain {name}\n" in text
    assert "`--lora-rank`" in text
