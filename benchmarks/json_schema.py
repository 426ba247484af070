"""JSON schemas of other projects: packtrain refuses a schema by name, or each answer that it writes is valid.

    pip install jsonschema
    python -m benchmarks.json_schema JSON-Schema-Test-Suite [--llama test-json-schema-to-grammar.cpp] [--optional]

Reads the tests of draft 2020-12 in a checkout of json-schema-org/JSON-Schema-Test-Suite, and the schemas in the
tests of llama.cpp's converter. A toy model without sense writes 20 answers to each schema. Prints a line per file, and
each schema that is wrong, that has an answer without end, or that is refused without a keyword's name. Exit code 1 if
one is wrong: an answer is not valid, or the grammar takes an instance that the suite calls invalid. A grammar may be
stricter than its schema: the last column has the share of the suite's valid instances that the grammars take.

The optional tests of ECMA-262 and of formats that packtrain does not check assert more than jsonschema does.
"""

import argparse
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import referencing
from referencing.jsonschema import DRAFT202012

from benchmarks.variants.schemas import takes_any_order
from packtrain.common.errors import InputError
from packtrain.inference.grammar import Grammar
from packtrain.inference.grammar.schema import FORMATS
from tests.test_grammar import TOKENIZER
from tests.test_schema_answers import END, PIECES, wandering

# half of the answers have few characters, so that names and elements come twice
FEW_TOKENS = np.array([not t or t in [bytes([c]) for c in b'"{}[]:,a16\\u0.e-'] for t in PIECES])
UNICODE_CLASS = re.compile(r"\\\\p\{Letter\}")  # which Python's patterns spell otherwise
REMOTE_ADDRESS = "http://localhost:1234/"  # of the suite's folder `remotes`
REFUSED, UNNAMED, RIGHT, ENDLESS, WRONG = "refused", "unnamed", "right", "endless", "wrong"
SCHEMA_LITERAL = re.compile(
    r'test\(\{\s*(?:SUCCESS|FAILURE),\s*"([^"]*)",\s*(?:R"""\((.*?)\)"""|"(\{\})")', re.S
)


@dataclass
class Case:
    """A schema, with instances and whether each is valid."""

    name: str
    schema_text: str
    instances: list[tuple[Any, bool]] = field(default_factory=list)


def parse_json(text: str) -> Any:
    """Numbers stay exact: 0.07 is a multiple of 0.01."""
    return json.loads(text, parse_float=Decimal)


def suite_cases(path: Path) -> list[Case]:
    return [
        Case(
            group["description"],
            json.dumps(group["schema"]),
            [(test["data"], test["valid"]) for test in group["tests"]],
        )
        for group in json.loads(path.read_text())
    ]


def llama_cases(path: Path) -> list[Case]:
    matches = SCHEMA_LITERAL.findall(path.read_text())
    return [Case(name, raw or braces) for name, raw, braces in matches]


def is_integer(checker: Any, value: Any) -> bool:
    if isinstance(value, Decimal):
        return value == value.to_integral_value()
    return isinstance(value, int) and not isinstance(value, bool)


def check_multiple(validator: Any, divisor: Any, value: Any, schema: Any) -> Iterator[Any]:
    """multipleOf without rounding, also of numbers with large exponents."""
    if not validator.is_type(value, "number") or not value:
        return
    number, step = (Decimal(x).normalize().as_tuple() for x in (value, divisor))
    digits, step_digits = (int("".join(map(str, x.digits))) for x in (number, step))
    exponent = int(number.exponent) - int(step.exponent)
    if (
        digits * pow(10, exponent, step_digits) % step_digits
        if exponent >= 0
        else exponent < -400 or digits % (step_digits * 10**-exponent)
    ):
        yield jsonschema.ValidationError(f"{value} is not a multiple of {divisor}")


def validator_class(schema: Any) -> Any:
    """Return the validator of a schema's draft, with exact numbers; draft 7's for lists of items without a draft."""
    draft = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    if isinstance(schema.get("items"), list):
        draft = jsonschema.Draft7Validator
    types = draft.TYPE_CHECKER.redefine("integer", is_integer)
    return jsonschema.validators.extend(draft, {"multipleOf": check_multiple}, type_checker=types)


def remote_schemas(folder: Path) -> Any:
    """Return the schemas that the suite names by address."""
    resources = [
        (
            REMOTE_ADDRESS + path.relative_to(folder).as_posix(),
            referencing.Resource.from_contents(
                json.loads(path.read_text()),
                default_specification=DRAFT202012,
            ),
        )
        for path in sorted(folder.rglob("*.json"))
    ]
    return referencing.Registry().with_resources(resources)


def write_answer(grammar: Grammar, rng: random.Random, max_tokens: int) -> bytes | None:
    """Return an answer of random tokens; None if it has no end within `max_tokens`."""
    choose, text, is_narrow = wandering(rng), b"", rng.random() < 0.5
    for position in range(max_tokens):
        mask = grammar.allowed(TOKENIZER.vocab_size)
        assert mask is not None
        if is_narrow and (mask & FEW_TOKENS).any():
            mask = mask & FEW_TOKENS
        if (id := choose(mask, position)) == END:
            return text
        grammar.accept(id)
        text += PIECES[id]
        if grammar.over:
            return text
    return None


def keywords_in(schema: Any) -> set[str]:
    """Return all keys of a schema, its parts and its literals."""
    if isinstance(schema, list):
        return set().union(*map(keywords_in, schema))
    return schema.keys() | keywords_in([*schema.values()]) if isinstance(schema, dict) else set()


def judge(
    case: Case, num_answers: int, max_tokens: int, registry: Any
) -> tuple[str, str, list[bool]]:
    """Return the verdict on a schema, its reason, and which of its valid instances the grammar takes."""
    schema = parse_json(case.schema_text)
    try:
        grammar = Grammar.from_schema(TOKENIZER, case.schema_text)
    except InputError as error:
        is_named = any(
            re.search(rf"(?<!\w){re.escape(k)}(?!\w)", str(error)) for k in keywords_in(schema)
        )
        return REFUSED if is_named else UNNAMED, str(error), []
    formats = jsonschema.Draft202012Validator.FORMAT_CHECKER
    formats.checkers = {k: v for k, v in formats.checkers.items() if k in FORMATS}
    schema_of_pattern = parse_json(UNICODE_CLASS.sub(lambda _: r"[^\\W\\d_]", case.schema_text))
    validator = validator_class(schema)(
        schema_of_pattern, registry=registry, format_checker=formats
    )
    acceptances = [
        (value, valid, takes_any_order(grammar, value)) for value, valid in case.instances
    ]
    accepted_instances = [is_accepted for _, valid, is_accepted in acceptances if valid]
    for value, valid, is_accepted in acceptances:
        if is_accepted and not valid:
            return WRONG, f"takes {json.dumps(value)}", accepted_instances
    verdict, reason = RIGHT, ""
    for seed in range(num_answers):
        text = write_answer(grammar.copy(), random.Random(seed), max_tokens)
        if text is None:
            verdict, reason = ENDLESS, f"no end after {max_tokens} tokens"
            continue
        try:
            messages = [error.message for error in validator.iter_errors(parse_json(text.decode()))]
        except (ValueError, re.error) as error:
            messages = [str(error)]
        if messages:
            return (
                WRONG,
                f"writes {text.decode(errors='replace')}: {messages[0]}",
                accepted_instances,
            )
    return verdict, reason, accepted_instances


def main() -> int:
    parser = argparse.ArgumentParser(description="answers by the schemas of other projects")
    parser.add_argument("suite", type=Path)
    parser.add_argument("--llama", type=Path)
    parser.add_argument("--optional", action="store_true", help="also the suite's optional tests")
    parser.add_argument("--only", default="", help="files whose names have this part")
    parser.add_argument("--answers", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=600)
    args = parser.parse_args()
    folder = args.suite / "tests" / "draft2020-12"
    paths = sorted(folder.rglob("*.json") if args.optional else folder.glob("*.json"))
    files = [
        (path.relative_to(folder).with_suffix("").as_posix(), suite_cases(path)) for path in paths
    ]
    files += [("llama.cpp", llama_cases(args.llama))] if args.llama else []
    registry, total = remote_schemas(args.suite / "remotes"), Counter[str]()
    columns = RIGHT, REFUSED, UNNAMED, ENDLESS, WRONG
    print(f"{'':36}" + "".join(f"{x:>9}" for x in columns) + "  valid instances taken")
    for file_name, cases in files:
        if args.only not in file_name:
            continue
        verdicts, all_accepted = Counter[str](), list[bool]()
        for case in cases:
            verdict, reason, accepted_instances = judge(
                case, args.answers, args.max_tokens, registry
            )
            verdicts[verdict] += 1
            all_accepted += accepted_instances
            if verdict in (WRONG, UNNAMED, ENDLESS):
                print(f"  {verdict}: {case.name}: {case.schema_text[:600]}\n      {reason[:300]}")
            elif verdict == REFUSED:
                print(f"  refused: {case.name}: {reason[:200]}", file=sys.stderr)
        counts = "".join(f"{verdicts[x]:9}" for x in columns)
        print(f"{file_name:36}{counts}  {sum(all_accepted)} of {len(all_accepted)}", flush=True)
        total += verdicts + Counter(accepted=sum(all_accepted), instances=len(all_accepted))
    counts = "".join(f"{total[x]:9}" for x in columns)
    print(f"{'all':36}{counts}  {total['accepted']} of {total['instances']}")
    return int(bool(total[WRONG]))


if __name__ == "__main__":
    sys.exit(main())
