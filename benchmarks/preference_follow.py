"""Does a tuned model do what it was shown to prefer?

    python -m benchmarks.preference_follow BASE DATA TEXT WORK [FLAG …]

The preference is made up: of GSM8K's answers (DATA, jsonl of question and answer) the first sentence alone over all of
it. Tunes BASE with the flags, or with SETTINGS, then asks HELD questions that it has not seen, greedily. An answer
follows if the model ends it by itself, within LINE words and without a line break. TEXT is one whose perplexity shows
what was forgotten. Files go to WORK. The chat template is plain text, with the end-of-text token after an answer: a
base model has never seen the markers of turns, and cannot end an answer with one.
"""

import json
import re
import shlex
import sys
from pathlib import Path

from benchmarks.watched import run_packtrain
from packtrain.common.events import Events
from packtrain.workflows.chat_session import ChatSession, ChatSettings

SETTINGS = "--loss dpo --sft-weight 1 --beta 0.3 --lr 5e-5 --iters 24 --lora-rank 8"
DEFAULT_FLAGS = "--batch-size 2 --ctx 192 --val-split 0 --no-tensorboard --overwrite --seed 1"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "Question: {{ message['content'] }}\nAnswer:{% else %} {{ message['content'] }}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)
NUM_HELDOUT, NUM_TRAIN = 60, 400
LINE, MAX_TOKENS = 40, 64  # words of an answer that follows; most tokens that are generated
CALCULATION = re.compile("<<.*?>>")
PERPLEXITY = re.compile(r"perplexity ([\d.]+)")


def pairs(data: Path) -> list[dict[str, str]]:
    """Of questions that both answers of which are different."""
    records = []
    for line in data.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        solution = CALCULATION.sub("", record["answer"])
        first_line = solution.split("\n")[0]
        if (
            first_line != solution
            and 4 < len(first_line.split()) < LINE
            and len(record["question"].split()) < 60
        ):
            records.append(
                {"prompt": record["question"], "chosen": first_line, "rejected": solution}
            )
    return records


def follows(text: str, is_complete: bool) -> bool:
    return is_complete and "\n" not in text.strip() and 0 < len(text.split()) <= LINE


def greedy_answers(model: Path, template: Path, prompts: list[str]) -> list[tuple[str, bool]]:
    """The likeliest answers, and whether the model ended them."""
    chat_settings = ChatSettings(
        model, temp=0.0, ctx=512, n_predict=MAX_TOKENS, chat_template=str(template)
    )
    talk, replies = ChatSession(chat_settings, Events()), []
    for prompt in prompts:
        talk.clear()
        done = talk.answer(prompt)
        replies.append((done.text, done.ended == "end"))
    return replies


def main() -> None:
    base, data, text, work, *flags = sys.argv[1:]
    every, folder = pairs(Path(data)), Path(work)
    folder.mkdir(parents=True, exist_ok=True)
    train_pairs, heldout_pairs = every[:NUM_TRAIN], every[-NUM_HELDOUT:]
    file, tuned = folder / "pairs.jsonl", folder / "preferred.gguf"
    file.write_text("\n".join(map(json.dumps, train_pairs)), encoding="utf-8")
    template = folder / "plain.jinja"
    template.write_text(TEMPLATE, encoding="utf-8")
    tuning_flags = flags or shlex.split(SETTINGS)
    finetune_args = (
        "--data",
        file,
        "-o",
        tuned,
        "--chat-template",
        template,
        *DEFAULT_FLAGS.split(),
        *tuning_flags,
    )
    done = run_packtrain("finetune", base, *finetune_args)
    if done.code:
        sys.exit(done.said)
    print(f"{' '.join(tuning_flags)}: {done.seconds:.0f} s", flush=True)
    for model in (Path(base), tuned):
        replies = greedy_answers(model, template, [pair["prompt"] for pair in heldout_pairs])
        count = sum(follows(*reply) for reply in replies)
        (folder / f"{model.stem}.json").write_text(json.dumps(replies, indent=1), encoding="utf-8")
        measured = PERPLEXITY.search(run_packtrain("eval", model, "--data", text).out)
        perplexity = measured[1] if measured else "?"
        print(
            f"{model.name}: {count} of {NUM_HELDOUT} answers follow, perplexity {perplexity}",
            flush=True,
        )


if __name__ == "__main__":
    main()
