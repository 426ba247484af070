"""Steps of DPO and IPO by TRL, as goldens of tests/test_preference.py.

    python -m benchmarks.preference_peer TRL_PYTHON

TRL_PYTHON is a Python with trl, transformers, gguf and torch. Both sides get the same random model and the same tokens;
full training, plain SGD. Written are, of each step, loss, margin and accuracy, and the sums of squares by which each
tensor has changed at the end.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.preferred import preference_base, preference_samples

STEPS = 3
GOLDEN = Path(__file__).parent.parent / "tests/goldens/preference.json"
LOSSES = {"dpo": ("sigmoid", 0.05), "ipo": ("ipo", 0.001)}  # and the learning rate

PEER = """
import json, sys, tempfile
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

folder, pairs, losses, steps = json.loads(sys.argv[1])
used = {id for pair in pairs for ids in pair.values() for id in ids}
free = next(id for id in range(1, 1000) if id not in used)  # no gradient reaches the row of the padding token
words = Tokenizer(models.WordLevel({"a": 0, "b": free}, unk_token="a"))
words = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="b", eos_token="b")
DPOTrainer._prepare_dataset = lambda self, dataset, *given: dataset
read = AutoModelForCausalLM.from_pretrained(folder, gguf_file="base.gguf", dtype=torch.float32)

def load():
    model = type(read)(read.config)
    model.load_state_dict(read.state_dict())
    return model

found = {}
for name, (kind, rate) in losses.items():
    config = DPOConfig(output_dir=tempfile.mkdtemp(), loss_type=kind, beta=0.1, report_to=[], use_cpu=True, bf16=False,
                       disable_dropout=True, gradient_checkpointing=False)
    model = load()
    trainer = DPOTrainer(model, load(), args=config, train_dataset=Dataset.from_list(pairs), processing_class=words)
    inputs = trainer.data_collator(pairs)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    records = []
    for step in range(steps):
        model.zero_grad()
        loss = trainer.compute_loss(model, inputs)
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= rate * p.grad
        metrics = {key: values[-1] for key, values in trainer._metrics["train"].items() if key.startswith("rewards")}
        records.append({"loss": loss.item(), **metrics})
    moved = {n: float((p.detach() - before[n]).double().square().sum()) for n, p in model.named_parameters()}
    found[name] = {"rate": rate, "steps": records, "moved": moved}
print(json.dumps(found))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("python", help="a Python with trl, transformers, gguf and torch")
    python = parser.parse_args().python
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        preference_base(folder / "base.gguf")
        pairs = preference_samples(folder)
        peer_args = json.dumps([name, pairs, LOSSES, STEPS])
        run = subprocess.run(
            [python, "-c", PEER, peer_args], capture_output=True, text=True, check=False
        )
        if run.returncode:
            sys.exit(run.stderr)
        peer_results = json.loads(run.stdout.splitlines()[-1])
    GOLDEN.write_text(json.dumps(peer_results, indent=1) + "\n")
    print(json.dumps(peer_results["dpo"]["steps"], indent=1))


if __name__ == "__main__":
    main()
