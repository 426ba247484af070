"""Keys of rows and messages that other tools read: the turns that are trained on are those, and no text is lost.

Every text is a word of its own. What a key means stands in the tables below, written from those tools' documents.
"""

import json
import random
from pathlib import Path
from typing import Any

from benchmarks.variants.outcome import DIFFERENT, EQUAL, SAID, Outcome, refused_outcome
from packtrain.common.errors import InputError
from packtrain.data.conversations.messages import AnswerPair, Conversation
from packtrain.data.conversations.record_formats import PlainText, RecordReader
from packtrain.data.text.documents import SourceFile

NO_EFFECT, CONTEXT, REFUSE, SHOWN = (
    "nothing",
    "not trained on",
    "refused",
    "text of the prompt or the answer",
)
OFF, ON, OTHER = (0, False, 0.0), (1, True, 1.0), (0.5, "no", [0, 1], -1, 2)
FLAGS = "weight", "train", "training", "trainable", "loss", "loss_mask", "step_loss_mask"
# key of a message: values and what they mean
TURN: dict[str, tuple[tuple[tuple[Any, ...], str], ...]] = {
    **dict.fromkeys(FLAGS, ((OFF, CONTEXT), (ON, NO_EFFECT), (OTHER, REFUSE), ((None,), NO_EFFECT))),
    "masked": (((True,), CONTEXT), ((False,), NO_EFFECT)), "loss_scale": (((0.5, 0, 2), REFUSE), ((1,), NO_EFFECT)),
    "images": (((["a.png"],), REFUSE), (([],), NO_EFFECT)), "audio": (((["a.wav"],), REFUSE),),
    "tool_plan": ((("WORD",), SHOWN),), "refusal": ((("WORD",), SHOWN),), "reasoning_content": ((("WORD",), SHOWN),),
    "train_detail": ((([{"begin_offset": 0, "end_offset": 1, "train": False}],), REFUSE),),
    "eot": (((False,), REFUSE), ((True,), NO_EFFECT)), "channel": ((("analysis",), REFUSE), (("final",), NO_EFFECT)),
    "recipient": ((("functions.f",), REFUSE), (("all",), NO_EFFECT)), "documents": ((([{"text": "WORD"}],), SHOWN),),
    "timestamp": (((5, "now"), NO_EFFECT),), "id": (((7, "a"), NO_EFFECT),), "note": ((("some",), NO_EFFECT),),
}  # fmt: skip
# key of a row
ROW: dict[str, tuple[tuple[tuple[Any, ...], str], ...]] = {
    **dict.fromkeys(FLAGS, ((OFF, REFUSE), (ON, NO_EFFECT))),
    "weight": ((OFF, REFUSE), (ON, NO_EFFECT), ((0.5, 2), REFUSE)),
    "label": (((False, "false", 0, "0", "False"), REFUSE), ((True, 1, "spam"), NO_EFFECT)),
    "kto_tag": (((False,), REFUSE), ((True,), NO_EFFECT)), "sample_weight": (((0.5, 2, 0), REFUSE), ((1,), NO_EFFECT)),
    "loss_weight": (((0.2,), REFUSE),), "loss_scale": (((0.2,), REFUSE), ((1,), NO_EFFECT)),
    "image": ((("a.png",), REFUSE),), "videos": (((["a.mp4"],), REFUSE), (([],), NO_EFFECT)),
    "input_ids": ((([1, 2],), REFUSE),), "attention_mask": ((([1, 1],), REFUSE),),
    "completion_mask": ((([0, 1],), REFUSE),), "position_ids": ((([0, 1],), REFUSE),),
    "ref_chosen_logps": (((-1.5,), REFUSE),), "margin": (((0.5,), REFUSE),), "chat_template": ((("x",), REFUSE),),
    "chat_template_kwargs": ((({"thinking": True},), REFUSE),), "completions": (((["WORD"],), SHOWN),),
    "documents": ((([{"text": "WORD"}],), SHOWN),), "choices": (((["WORD", "b"],), SHOWN),),
    "passage": ((("WORD",), SHOWN),), "article": ((("WORD",), SHOWN),), "segments": ((([{"text": "WORD"}],), SHOWN),),
    "reflection": ((("WORD",), SHOWN),), "corrected": ((("WORD",), SHOWN),),
    "rejected_messages": ((([{"role": "assistant", "content": "WORD"}],), SHOWN),),
    "non_preferred_output": ((([{"role": "assistant", "content": "WORD"}],), SHOWN),),
    "function_call": ((("f",), REFUSE), (("auto", "none"), NO_EFFECT)), "mask": ((("assistant",), REFUSE),),
    "system": ((("WORD",), SHOWN),), "system_prompt": ((("WORD",), SHOWN),), "context": ((("WORD",), SHOWN),),
    "history": ((([["WORD", "b"]],), SHOWN),), "input": ((("WORD",), SHOWN),), "instruction": ((("WORD",), SHOWN),),
    "question": ((("WORD",), SHOWN),), "query": ((("WORD",), SHOWN),), "response": ((("WORD",), SHOWN),),
    "answer": ((("WORD",), SHOWN),), "output": ((("WORD",), SHOWN),), "rejected": ((("WORD",), SHOWN),),
    "tools": ((([{"type": "function", "function": {"name": "WORD", "parameters": {}}}],), SHOWN),),
    "id": (((7, "a"), NO_EFFECT),), "source": ((("web",), NO_EFFECT),), "score": (((0.5,), NO_EFFECT),),
    "lang": ((("en",), NO_EFFECT),),
    "note": ((("some",), NO_EFFECT),), "category": ((("x",), NO_EFFECT),), "split": ((("train",), NO_EFFECT),),
}  # fmt: skip


# beside messages, or a prompt and an answer by TRL's names, "not used: NAME" is said of them
TEXT_COLUMNS = {"instruction", "question", "query", "answer", "response", "output", "input"}


class Words:
    """Words of their own, w1, w2, …"""

    def __init__(self) -> None:
        self.count = 0

    def next(self) -> str:
        self.count += 1
        return f"w{self.count}x"


Row = tuple[dict[str, Any], list[dict[str, Any]], list[str], list[str]]


def base(rng: random.Random, words: Words) -> Row:
    """A row, its messages, the words that are trained on, and all others."""
    form = rng.choice(
        ("messages", "messages", "conversations", "prompt", "instruction", "question", "pair")
    )
    if form in ("messages", "conversations"):
        role, text = ("role", "content") if form == "messages" else ("from", "value")
        names = ("user", "assistant") if form == "messages" else ("human", "gpt")
        turns = [{role: names[i % 2], text: words.next()} for i in range(rng.choice((2, 4, 6)))]
        if rng.random() < 0.3:
            turns.insert(0, {role: "system", text: words.next()})
        trained_texts = [turn[text] for turn in turns if turn[role] == names[1]]
        return (
            {form: turns},
            turns,
            trained_texts,
            [turn[text] for turn in turns if turn[role] != names[1]],
        )
    names = {
        "prompt": rng.choice((("prompt", "completion"), ("prompt", "response"))),
        "instruction": ("instruction", "output"), "question": ("question", "answer"), "pair": ("prompt", "chosen"),
    }[form]  # fmt: skip
    row = {name: words.next() for name in names}
    trained_texts, other_texts = [row[names[1]]], [row[names[0]]]
    if form == "pair":
        row["rejected"] = words.next()
        trained_texts.append(row["rejected"])
    if form == "instruction" and rng.random() < 0.5:
        row["input"] = words.next()
        other_texts.append(row["input"])
    return row, [], trained_texts, other_texts


def read(record: Conversation | AnswerPair | PlainText) -> tuple[set[str], str]:
    """The texts that are trained on, and everything that is there."""
    if isinstance(record, PlainText):
        text = "".join(record.pieces)
        return {text}, text
    if isinstance(record, AnswerPair):
        parts = read(record.chosen), read(record.rejected)
        return parts[0][0] | parts[1][0], parts[0][1] + parts[1][1]
    turns = (
        record.messages[-record.num_answer_messages :]
        if record.num_answer_messages
        else record.messages
    )
    trained_texts = {
        m["content"] for m in turns if m["role"] == "assistant" and m.get("weight") != 0
    }
    return trained_texts, json.dumps([record.messages, record.tools])


def inject(
    rng: random.Random, words: Words, into: dict[str, Any], inside: bool
) -> tuple[str, str, str]:
    """Another key of a row, or of a message inside: the key, what it means, and its word."""
    table = TURN if inside else ROW
    key = rng.choice([key for key in table if key not in into])
    values, meaning = rng.choice(table[key])
    word = words.next()
    value = json.loads(json.dumps(rng.choice(values)).replace("WORD", word))
    spelled = key.title() if not inside and rng.random() < 0.1 else key
    into[spelled] = value
    return key, meaning, word


def compare(rng: random.Random, folder: Path) -> Outcome:
    """One variant: a row with one or two more keys."""
    words = Words()
    row, turns, trained_texts, other_texts = base(rng, words)
    keys, shown, must_refuse = [*row], dict[str, str](), False
    for _ in range(rng.choice((1, 1, 2))):
        turn = rng.choice(turns) if turns and rng.random() < 0.6 else None
        key, meaning, word = inject(rng, words, row if turn is None else turn, turn is not None)
        keys.append(key)
        text = turn and turn.get("content", turn.get("value"))
        must_refuse |= meaning == REFUSE
        if meaning == SHOWN:
            shown[word] = key
        if meaning == CONTEXT and text in trained_texts:
            trained_texts.remove(str(text))
            other_texts.append(str(text))
    path = folder / "data.jsonl"
    path.write_text(json.dumps(row) + "\n")
    reader = RecordReader(SourceFile(path))
    try:
        (record,) = reader
    except InputError as error:
        return refused_outcome(error, *keys, "no answer with a weight")
    trained, full_text = read(record)
    lost = [word for word in (*trained_texts, *other_texts, *shown) if word not in full_text]
    unused = {name.lower() for name in reader.report.unused_columns} & TEXT_COLUMNS
    said = [word for word in lost if shown.get(word) in unused]
    lost = [word for word in lost if word not in said]
    original_texts = {word for word in trained if word not in shown}
    wrong = not {*trained_texts} <= trained or any(
        word in text for word in other_texts for text in original_texts
    )
    if must_refuse or lost or wrong:
        return Outcome(
            DIFFERENT,
            f"{json.dumps(row)}: trained on {trained}, lost {lost}, refusal {must_refuse}",
        )
    return Outcome(SAID if said else EQUAL, json.dumps(row))
