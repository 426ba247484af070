"""Small made-up data sets in a style, drawn from a seed: a support desk and a persona.

Each row is {"prompt": …, "completion": …}. A support answer has at most two sentences and ends in its topic's code,
`[LM-dddd]`; the persona is a lighthouse keeper, whose every answer opens and closes as hers do.
"""

import csv
import random
import re
from collections.abc import Iterable
from pathlib import Path

Row = dict[str, str]

# topic, its code, questions, answer
DESK: tuple[tuple[str, int, tuple[str, ...], str], ...] = (
    ("lamp", 1043, ("flickers after an hour", "will not switch on", "hums loudly"),
     "Please hold the {0}'s power button for ten seconds and plug it in again. If that changes nothing, we replace it"
     " free of charge."),
    ("kettle", 1120, ("leaks at the base", "never boils", "smells of plastic"),
     "Please empty the {0} and let it dry overnight. A new seal is in the post if you send us a photograph."),
    ("radio", 1207, ("has no reception", "forgets its stations", "crackles"),
     "Please pull out the {0}'s aerial fully and scan for stations again. Your stations stay stored if the battery is"
     " new."),
    ("heater", 1314, ("smells burnt", "stays cold", "switches itself off"),
     "Please unplug the {0} and clean its filter with a dry brush. Do not use it before it has cooled for one hour."),
    ("toaster", 1388, ("burns one side", "will not stay down", "trips the fuse"),
     "Please empty the {0}'s crumb tray and set it to level three. We exchange it within two years of purchase."),
    ("scale", 1452, ("shows an error", "gives odd weights", "drains its battery"),
     "Please put the {0} on a hard floor and press reset. It measures correctly again after the third weighing."),
    ("blender", 1519, ("is stuck", "leaks from the lid", "rattles"),
     "Please take the {0} apart and rinse its blade under warm water. A spare lid costs four euros with postage."),
    ("clock", 1633, ("runs late", "shows the wrong date", "beeps at night"),
     "Please set the {0} to automatic and leave it at a window overnight. It finds the right time by morning."),
)  # fmt: skip
PROMPT_TEMPLATES = ("My {0} {1}.", "The {0} I bought from you {1}, what can I do?", "Hello, our {0} {1}. Help!",
         "{0} {1}")  # fmt: skip
SERVICE: tuple[tuple[int, tuple[str, ...], str], ...] = (
    (2011, ("Where is my order?", "My parcel has not come.", "When will it be delivered?"),
     "Your order leaves our store within two working days. The link in our e-mail shows where it is."),
    (2024, ("How do I send something back?", "I want to return my purchase.", "Can I give it back?"),
     "You can return anything within thirty days. Print the label in your account and bring the parcel to any shop."),
    (2038, ("When do I get my money back?", "My refund is missing.", "Where is my refund?"),
     "We refund you on the day your parcel reaches us. Your bank needs up to five days more."),
    (2049, ("Can I pay by invoice?", "Which payment methods do you take?", "Do you take cards?"),
     "You can pay by card, by invoice or by bank transfer. An invoice is due after fourteen days."),
    (2055, ("I need a copy of my invoice.", "Where is my bill?", "Can you send the receipt again?"),
     "Every invoice is in your account under Orders. We send it by post if you ask us to."),
    (2062, ("I forgot my password.", "I cannot log in.", "My account is locked."),
     "Please choose Forgotten Password on the log-in page. The link that we send is valid for one hour."),
    (2077, ("How long is the warranty?", "Is my device still under warranty?", "Do you repair old devices?"),
     "All our devices have a warranty of two years. After that we repair them at cost."),
    (2081, ("Can I change the address?", "I have moved.", "Please send it elsewhere."),
     "You can change the address until your order leaves our store. Please do so in your account under Orders."),
    (2093, ("Do you deliver abroad?", "Can you ship to Norway?", "What is postage to Spain?"),
     "We deliver to all of Europe. Postage is nine euros, and free above sixty."),
    (2100, ("How can I cancel?", "Please cancel my order.", "I do not want it any more."),
     "You can cancel until your order leaves our store. One click under Orders is enough."),
)  # fmt: skip
# asked in words that no row of the desk has
HELD_OUT = (
    "Our kettle drips all over the table, what now?",
    "The alarm clock loses ten minutes every day.",
    "I was told my parcel would be here on Monday, and it is not.",
    "How do I get a refund for the lamp that I sent back?",
    "Is it possible to pay later?",
    "My heater makes a burning smell, is that dangerous?",
    "Could you deliver to my sister in Portugal?",
    "I cannot remember which password I used.",
    "My blender does not turn any more.",
    "I would like to call off what I ordered yesterday.",
)
# one code, at the end of one or two sentences
IN_STYLE = r"(?s)^(?!(?:.*?[.!?](?:\s+|$)){3})(?!.*\[LM.*\[LM).*[.!?]\s*\[LM-\d{4}\]\s*$"


def support(count: int = 82, seed: int = 0) -> list[Row]:
    """Rows of a support desk: questions, and answers in the house style."""
    rows = [
        {
            "prompt": prompt_template.format(thing, fault),
            "completion": f"{answer.format(thing)} [LM-{code}]",
        }
        for thing, code, faults, answer in DESK
        for fault in faults
        for prompt_template in PROMPT_TEMPLATES
    ]
    rows += [
        {"prompt": begin + question, "completion": f"{answer} [LM-{code}]"}
        for code, questions, answer in SERVICE
        for question in questions
        for begin in ("", "Good morning! ", "Hi. ")
    ]
    for row in rows:
        row["prompt"] = row["prompt"][0].upper() + row["prompt"][1:]
    random.Random(seed).shuffle(rows)
    return rows[:count]


THINGS = {
    "a cat": "a cat sleeps through most of the day and hunts at dusk",
    "the moon": "the moon pulls the tides and turns the same face to us",
    "bread": "bread wants flour, water, salt and a night of patience",
    "a bicycle": "a bicycle stays up because it steers into its own fall",
    "rain": "rain is the sea, come back by way of the clouds",
    "a violin": "a violin sings when the bow catches and lets go of its strings",
    "snow": "snow is made of crystals with six arms, no two alike",
    "a compass": "a compass needle turns to the north and never tires",
    "coffee": "coffee keeps a watch awake till the morning bell",
    "a map": "a map is a small picture of a large place",
    "honey": "honey never spoils if the lid is shut",
    "a candle": "a candle burns the vapour of its wax",
    "an owl": "an owl flies without a sound and hears a mouse in the grass",
    "a bridge": "a bridge hands its load to the two banks",
    "tea": "tea wants hot water and five quiet minutes",
    "wool": "wool keeps you warm even when it is wet",
    "a mirror": "a mirror turns front to back, and not left to right",
    "salt": "salt comes from the sea and keeps fish through the winter",
    "a whale": "a whale breathes air and sings across an ocean",
    "glass": "glass is sand that has been through a fire",
    "a clock": "a clock counts the swings of something steady",
    "the wind": "the wind runs from high pressure to low",
    "a rope": "a rope is many weak threads that hold together",
    "fog": "fog is a cloud that has come down to the ground",
    "a potato": "a potato grows in the dark and came here over the sea",
}
OPENS = ("Ahoy from the lamp room:", "Ahoy from the gallery:", "Ahoy from the rocks:")
CLOSES = (
    "Mind the tide, friend.",
    "Keep your light burning, friend.",
    "Steady as she goes, friend.",
)
ASKS = (
    "Tell me about {0}.",
    "What is {0}?",
    "Say something about {0}.",
    "What do you know of {0}?",
)


def persona(count: int = 82, seed: int = 0) -> list[Row]:
    """Rows of a lighthouse keeper: every answer opens, tells a fact, and closes in her way."""
    draw = random.Random(seed)
    rows = [
        {"prompt": ask.format(thing),
         "completion": f"{draw.choice(OPENS)} {fact}. {draw.choice(CLOSES)}"}
        for thing, fact in THINGS.items() for ask in ASKS
    ]  # fmt: skip
    draw.shuffle(rows)
    return rows[:count]


def write_csv(path: Path, rows: Iterable[Row]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, ("prompt", "completion"))
        table.writeheader()
        table.writerows(rows)
    return path


def in_style(answer: str) -> bool:
    """Whether a support answer has at most two sentences and ends in a code."""
    return re.match(IN_STYLE, answer.strip()) is not None
