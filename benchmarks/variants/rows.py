"""Keys of rows and messages that other tools read: the turns that are trained on are those, and no text is lost.

Every text is a word of its own. What a key means stands in the tables below, written from those tools' documents.
"""

import json
import random
from pathlib import Path
from typing import Any

from benchmarks.variants.outcome import DIFFERENT, EQUAL, SAID, Outcome, refused
from packtrain.common.errors import InputError
from packtrain.data.conversations.messages import Conversation, Pair
from packtrain.data.conversations.record_formats import Plain, Reader
from packtrain.data.text.documents import Source

IDLE, CONTEXT, REFUSE, SHOWN = (
    "nothing",
    "not trained on",
    "refused",
    "text of the prompt or the answer",
)
OFF, ON, OTHER = (0, False, 0.0), (1, True, 1.0), (0.5, "no", [0, 1], -1, 2)
FLAGS = "weight", "train", "training", "trainable", "loss", "loss_mask", "step_loss_mask"
# key of a message: values and what they mean
TURN: dict[str, tuple[tuple[tuple[Any, ...], str], ...]] = {
    **dict.fromkeys(FLAGS, ((OFF, CONTEXT), (ON, IDLE), (OTHER, REFUSE), ((None,), IDLE))),
    "masked": (((True,), CONTEXT), ((False,), IDLE)), "loss_scale": (((0.5, 0, 2), REFUSE), ((1,), IDLE)),
    "images": (((["a.png"],), REFUSE), (([],), IDLE)), "audio": (((["a.wav"],), REFUSE),),
    "tool_plan": ((("WORD",), SHOWN),), "refusal": ((("WORD",), SHOWN),), "reasoning_content": ((("WORD",), SHOWN),),
    "train_detail": ((([{"begin_offset": 0, "end_offset": 1, "train": False}],), REFUSE),),
    "eot": (((False,), REFUSE), ((True,), IDLE)), "channel": ((("analysis",), REFUSE), (("final",), IDLE)),
    "recipient": ((("functions.f",), REFUSE), (("all",), IDLE)), "documents": ((([{"text": "WORD"}],), SHOWN),),
    "timestamp": (((5, "now"), IDLE),), "id": (((7, "a"), IDLE),), "note": ((("some",), IDLE),),
}  # fmt: skip
# key of a row
ROW: dict[str, tuple[tuple[tuple[Any, ...], str], ...]] = {
    **dict.fromkeys(FLAGS, ((OFF, REFUSE), (ON, IDLE))), "weight": ((OFF, REFUSE), (ON, IDLE), ((0.5, 2), REFUSE)),
    "label": (((False, "false", 0, "0", "False"), REFUSE), ((True, 1, "spam"), IDLE)),
    "kto_tag": (((False,), REFUSE), ((True,), IDLE)), "sample_weight": (((0.5, 2, 0), REFUSE), ((1,), IDLE)),
    "loss_weight": (((0.2,), REFUSE),), "loss_scale": (((0.2,), REFUSE), ((1,), IDLE)),
    "image": ((("a.png",), REFUSE),), "videos": (((["a.mp4"],), REFUSE), (([],), IDLE)),
    "input_ids": ((([1, 2],), REFUSE),), "attention_mask": ((([1, 1],), REFUSE),),
    "completion_mask": ((([0, 1],), REFUSE),), "position_ids": ((([0, 1],), REFUSE),),
    "ref_chosen_logps": (((-1.5,), REFUSE),), "margin": (((0.5,), REFUSE),), "chat_template": ((("x",), REFUSE),),
    "chat_template_kwargs": ((({"thinking": True},), REFUSE),), "completions": (((["WORD"],), SHOWN),),
    "documents": ((([{"text": "WORD"}],), SHOWN),), "choices": (((["WORD", "b"],), SHOWN),),
    "passage": ((("WORD",), SHOWN),), "article": ((("WORD",), SHOWN),), "segments": ((([{"text": "WORD"}],), SHOWN),),
    "reflection": ((("WORD",), SHOWN),), "corrected": ((("WORD",), SHOWN),),
    "rejected_messages": ((([{"role": "assistant", "content": "WORD"}],), SHOWN),),
    "non_preferred_output": ((([{"role": "assistant", "content": "WORD"}],), SHOWN),),
    "function_call": ((("f",), REFUSE), (("auto", "none"), IDLE)), "mask": ((("assistant",), REFUSE),),
    "system": ((("WORD",), SHOWN),), "system_prompt": ((("WORD",), SHOWN),), "context": ((("WORD",), SHOWN),),
    "history": ((([["WORD", "b"]],), SHOWN),), "input": ((("WORD",), SHOWN),), "instruction": ((("WORD",), SHOWN),),
    "question": ((("WORD",), SHOWN),), "query": ((("WORD",), SHOWN),), "response": ((("WORD",), SHOWN),),
    "answer": ((("WORD",), SHOWN),), "output": ((("WORD",), SHOWN),), "rejected": ((("WORD",), SHOWN),),
    "tools": ((([{"type": "function", "function": {"name": "WORD", "parameters": {}}}],), SHOWN),),
    "id": (((7, "a"), IDLE),), "source": ((("web",), IDLE),), "score": (((0.5,), IDLE),), "lang": ((("en",), IDLE),),
    "note": ((("some",), IDLE),), "category": ((("x",), IDLE),), "split": ((("train",), IDLE),),
}  # fmt: skip


# beside messages, or a prompt and an answer by TRL's names, "not used: NAME" is said of them
BESIDE = {"instruction", "question", "query", "answer", "response", "output", "input"}


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
        learnt = [turn[text] for turn in turns if turn[role] == names[1]]
        return (
            {form: turns},
            turns,
            learnt,
            [turn[text] for turn in turns if turn[role] != names[1]],
        )
    names = {
        "prompt": rng.choice((("prompt", "completion"), ("prompt", "response"))),
        "instruction": ("instruction", "output"), "question": ("question", "answer"), "pair": ("prompt", "chosen"),
    }[form]  # fmt: skip
    row = {name: words.next() for name in names}
    learnt, others = [row[names[1]]], [row[names[0]]]
    if form == "pair":
        row["rejected"] = words.next()
        learnt.append(row["rejected"])
    if form == "instruction" and rng.random() < 0.5:
        row["input"] = words.next()
        others.append(row["input"])
    return row, [], learnt, others


def read(found: Conversation | Pair | Plain) -> tuple[set[str], str]:
    """The texts that are trained on, and everything that is there."""
    if isinstance(found, Plain):
        text = "".join(found.pieces)
        return {text}, text
    if isinstance(found, Pair):
        parts = read(found.chosen), read(found.rejected)
        return parts[0][0] | parts[1][0], parts[0][1] + parts[1][1]
    turns = found.messages[-found.answer :] if found.answer else found.messages
    learnt = {m["content"] for m in turns if m["role"] == "assistant" and m.get("weight") != 0}
    return learnt, json.dumps([found.messages, found.tools])


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
    row, turns, learnt, others = base(rng, words)
    keys, shown, must_refuse = [*row], dict[str, str](), False
    for _ in range(rng.choice((1, 1, 2))):
        turn = rng.choice(turns) if turns and rng.random() < 0.6 else None
        key, meaning, word = inject(rng, words, row if turn is None else turn, turn is not None)
        keys.append(key)
        text = turn and turn.get("content", turn.get("value"))
        must_refuse |= meaning == REFUSE
        if meaning == SHOWN:
            shown[word] = key
        if meaning == CONTEXT and text in learnt:
            learnt.remove(str(text))
            others.append(str(text))
    path = folder / "data.jsonl"
    path.write_text(json.dumps(row) + "\n")
    reader = Reader(Source(path))
    try:
        (found,) = reader
    except InputError as error:
        return refused(error, *keys, "no answer with a weight")
    trained, there = read(found)
    lost = [word for word in (*learnt, *others, *shown) if word not in there]
    unused = {name.lower() for name in reader.report.unused} & BESIDE
    said = [word for word in lost if shown.get(word) in unused]
    lost = [word for word in lost if word not in said]
    plain = {word for word in trained if word not in shown}
    wrong = not {*learnt} <= trained or any(word in text for word in others for text in plain)
    if must_refuse or lost or wrong:
        return Outcome(
            DIFFERENT,
            f"{json.dumps(row)}: trained on {trained}, lost {lost}, refusal {must_refuse}",
        )
    return Outcome(SAID if said else EQUAL, json.dumps(row))
