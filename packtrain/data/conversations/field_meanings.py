"""Columns of records and keys of messages to which other tools give a meaning: honoured, or the record is refused."""

from collections.abc import Mapping
from typing import Any

from packtrain.common.errors import InputError
from packtrain.common.text import shortlist

# keys of a message by the tools that read them: with 0 or false a turn is context, with 1 or true it is trained on
LOSS = {
    "weight": "OpenAI and mistral-finetune", "train": "Axolotl", "training": "Axolotl", "trainable": "several tools",
    "loss": "ms-swift and XTuner", "loss_mask": "several tools", "step_loss_mask": "slime",
    "loss_weight": "LLaMA-Factory",
}  # fmt: skip
EMPTY_VALUES = ("none", "", "[]", "{}")
TRUE, FALSE, ANY = ("true", "1", "1.0"), ("false", "0", "0.0"), ()
FieldTable = dict[str, tuple[str, str, tuple[str, ...], tuple[str, ...]]]


def _table(*rows: tuple[str, str, str, tuple[str, ...], tuple[str, ...]]) -> FieldTable:
    """Build a table from rows of names, tools, meaning, refused values (ANY: all others), and harmless values."""
    return {name: row[1:] for row in rows for name in row[0].split()}


MEDIA = "image images video videos audio audios objects"
UNWANTED = "marks answers that are not wanted, for which there is no loss"
PROMPT, PARTS = "is part of the prompt, where it must stand", "says which parts are trained on"
LABEL = _table(("label", "TRL's KTO and ms-swift", UNWANTED, FALSE, ()))  # other values are classes
ROW_TABLE = _table(
    ("kto_tag", "LLaMA-Factory", UNWANTED, ANY, TRUE),
    (" ".join(LOSS), "Axolotl and others", "says that it is not trained on", FALSE, ()),
    ("weight sample_weight loss_weight loss_scale", "Fireworks and ms-swift", "weighs the loss", ANY, TRUE),
    ("loss_mask step_loss_mask response_mask", "slime and verl", "says what is not trained on", ANY, TRUE),
    (MEDIA, "TRL, LLaMA-Factory and ms-swift", "is no text, and this model reads text only", ANY, ()),
    ("input_ids attention_mask completion_mask assistant_masks position_ids", "TRL", "has tokens or masks", ANY, ()),
    ("ref_chosen_logps ref_rejected_logps", "TRL", "is the reference, which the base is here", ANY, ()),
    ("margin", "TRL and ms-swift", "says how much better the chosen answer is", ANY, ()),
    ("chat_template chat_template_kwargs", "TRL", "changes the chat template", ANY, ()),
    ("completions", "TRL", "has the steps of an answer", ANY, ()),
    ("documents", "transformers", PROMPT, ANY, ()),
    ("choices passage article", "Axolotl and lm-evaluation-harness", PROMPT, ANY, ()),
    ("reflection corrected", "Axolotl", "is part of the answer, where it must stand", ANY, ()),
    ("segments", "Axolotl", PARTS, ANY, ()),
    ("rejected_messages positive_messages negative_messages", "ms-swift", "has other answers", ANY, ()),
    ("preferred_output non_preferred_output", "OpenAI", "has other answers", ANY, ()),
    ("function_call", "OpenAI", "says which function is called", ANY, ("auto",)),
    ("mask", "NeMo", "says whose turns are not trained on", ANY, ("user", "human")),
    ("system tools history chosen rejected", "packtrain", "belongs to rows of another form", ANY, ()),
)  # fmt: skip
CONTEXT_TABLE = _table(("context", "packtrain", PROMPT, ANY, ()))  # beside messages
OTHER_FIELDS_TABLE = _table(
    ("instruction question query request", "packtrain", "is another question; --columns NAME=prompt joins it", ANY, ()),
    ("answer response output reply", "packtrain", "is another answer; --columns NAME=completion takes it", ANY, ()),
)  # fmt: skip
PART = _table((" ".join(LOSS), "Axolotl", PARTS, ANY, TRUE))  # of a message's content
MESSAGE = _table(
    (MEDIA, "Ollama, OpenAI and TRL", "is no text, and this model reads text only", ANY, ()),
    ("documents", "Cohere", PROMPT, ANY, ()),
    ("tools functions", "GLM-4 and DeepSeek", "lists tools, which are a field of the row", ANY, ()),
    ("tool_plan", "Cohere", "is part of the answer; it must be in the content", ANY, ()),
    ("channel", "gpt-oss", "tells thoughts from answers; thoughts are reasoning_content", ANY, ("final",)),
    ("recipient", "gpt-oss", "says what is called; calls are tool_calls", ANY, ("all",)),
)  # fmt: skip
TURN = MESSAGE | _table(
    ("refusal", "OpenAI", "is the answer; it must be in the content", ANY, ()),
    ("train_detail", "Axolotl", PARTS, ANY, ()),
    ("loss_scale", "ms-swift", "weighs the loss", ANY, TRUE),
    ("masked", "torchtune", "says what is not trained on; weight says so, too", ANY, FALSE),
    ("eot", "torchtune", "says whether the turn ends", ANY, TRUE),
    ("ipython", "torchtune", "says what is called; calls are tool_calls", ANY, FALSE),
    ("label", "NeMo", PROMPT, ANY, ()),
)  # fmt: skip


def check(field_values: Mapping[str, Any], location: str, field_table: FieldTable) -> None:
    """Raise InputError for the first field that other tools honour, by `field_table`, and packtrain would ignore."""
    for name in sorted(field_values.keys() & field_table.keys()):
        tools, meaning, refused_values, harmless_values = field_table[name]
        text = str(field_values[name]).strip().lower()
        if text in (refused_values or {text}) and text not in (*EMPTY_VALUES, *harmless_values):
            fact = f"{location}: {name} is {shortlist([str(field_values[name])])}"
            advice = f"in data of {tools} it {meaning}; remove it if it means something else"
            raise InputError(fact, advice)


def weight_of(turn: Mapping[str, Any], role: str, at: str) -> dict[str, int]:
    """Return {"weight": 1 or 0}, from keys of LOSS: whether to train on a message; {} without. Raises InputError."""
    values = {key: turn[key] for key in LOSS if turn.get(key) is not None}
    for key, value in values.items():
        if value not in (0, 1):
            raise InputError(f"{at}: {key} is {value!r}", "it must be 0 or 1")
        if value and role != "assistant":
            fact = f"{at}: {key} is {value!r} for the {role}"
            raise InputError(fact, "only the assistant's turns are trained on")
    if len(set(values.values())) > 1:
        raise InputError(f"{at}: {' and '.join(values)} contradict each other")
    return {"weight": int(next(iter(values.values())))} if values else {}
