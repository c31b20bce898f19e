"""The tasks of tiny-ouro: how problems are made, held out for evaluation, and checked."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass

_NAMES = """
    Ada Ann Ben Bob Cal Dan Dot Eli Eva Eve Fay Gus Guy Hal Ian Ida Ivy Jan Jay Jim Joe Jon Kay
    Ken Kim Lee Leo Liz Lou Mae Max Meg Mia Ned Nan Pam Pat Ray Rex Rob Ron Roy Sam Sid Sue Tim
    Tom Una Val Vic Will Zoe
"""

_WORDS = """
    apple arm bag ball bear bed bell bird boat book bowl box bread brick bus cake car cat chair
    clock cloud coat coin cow cup desk dog door duck ear egg eye farm fire fish flag flower foot
    fork frog gate glass goat gold grape grass hand hat hill horse house ice ink iron island jam
    key king kite knife lake lamp leaf lemon lion map milk mirror moon mouse nail nest night nose
    nut ocean onion owl paper park pear pen piano pig plate pond queen rain ring river road rock
    roof rope rose salt sand sea seed ship shoe silk snow soap sock spoon star stone sun table
    tent tiger train tree truck valley vase wall water wheel wind window wolf wood yard zebra
"""

NAMES, WORDS = _NAMES.split(), _WORDS.split()

FACTS = {
    "capital": {
        "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Germany": "Berlin",
        "Japan": "Tokyo", "China": "Beijing", "Russia": "Moscow", "Egypt": "Cairo",
        "Kenya": "Nairobi", "Peru": "Lima", "Cuba": "Havana", "Norway": "Oslo",
        "Sweden": "Stockholm", "Finland": "Helsinki", "Greece": "Athens", "Austria": "Vienna",
        "Poland": "Warsaw", "Portugal": "Lisbon", "Ireland": "Dublin", "Canada": "Ottawa",
        "Iceland": "Reykjavik", "Hungary": "Budapest", "India": "New Delhi",
        "Thailand": "Bangkok", "Vietnam": "Hanoi", "Chile": "Santiago", "Denmark": "Copenhagen",
    },
    "opposite": {
        "hot": "cold", "big": "small", "fast": "slow", "up": "down", "left": "right",
        "day": "night", "open": "closed", "wet": "dry", "old": "young", "hard": "soft",
        "light": "dark", "early": "late", "full": "empty", "happy": "sad", "high": "low",
        "rich": "poor", "strong": "weak", "thick": "thin", "loud": "quiet", "first": "last",
    },
    "young": {
        "cow": "calf", "dog": "puppy", "cat": "kitten", "sheep": "lamb", "horse": "foal",
        "goat": "kid", "pig": "piglet", "duck": "duckling", "hen": "chick", "bear": "cub",
        "deer": "fawn", "swan": "cygnet", "frog": "tadpole", "owl": "owlet",
    },
    "colour": {
        "grass": "green", "snow": "white", "coal": "black", "blood": "red", "a lemon": "yellow",
        "the sky": "blue", "a carrot": "orange", "chocolate": "brown", "an elephant": "grey",
        "a flamingo": "pink", "a plum": "purple",
    },
}  # fmt: skip

# Phrasings of one fact: (plain, chat). Plain ones end where the answer follows directly.
PHRASES = {
    "capital": [
        ("The capital of {} is", "What is the capital of {}?"),
        ("{} has its capital in", "Which city is the capital of {}?"),
        ("Capital of {}:", "Name the capital of {}."),
    ],
    "opposite": [
        ("The opposite of {} is", "What is the opposite of {}?"),
        ("Not {} but", "Which word means the opposite of {}?"),
        ("Opposite of {}:", "Name the opposite of {}."),
    ],
    "young": [
        ("The young of a {} is a", "What is the young of a {} called?"),
        ("A young {} is called a", "What do you call a young {}?"),
        ("Young of a {}:", "Name the young of a {}."),
    ],
    "colour": [
        ("The colour of {} is", "What is the colour of {}?"),
        ("In colour, {} is", "Which colour is {}?"),
        ("Colour of {}:", "Name the colour of {}."),
    ],
}
SHORT = {"young": "young of a {}"}

TASKS = (
    "add", "subtract", "count", "lookup-1", "lookup-2", "lookup-3", "reverse", "sort", "facts",
)  # fmt: skip
# How often training draws each task: lookups are the hardest to learn.
TRAIN_WEIGHTS = (4, 4, 5, 3, 7, 8, 1.5, 2, 3)
EVAL_COUNTS, EVAL_SEED = (140, 130, 130, 70, 130, 130, 70, 80, 120), 7
CHOICE_SEED = 9  # the problems on which training chooses the exit threshold
PROMPTS_COUNTS, PROMPTS_SEED = (8, 7, 8, 5, 7, 7, 5, 6, 7), 11

HELD_OUT = 20  # one problem in so many belongs to evaluation and is never trained on
MAX_TOKENS = 32


@dataclass(frozen=True)
class Problem:
    """One problem. ``key`` names it whatever its wording; ``plain`` continues with the answer."""

    task: str
    key: str
    plain: str
    chat: str
    answer: str

    @property
    def held_out(self) -> bool:
        """Whether the problem belongs to the evaluation split."""
        return zlib.crc32(self.key.encode()) % HELD_OUT == 0


def make(task: str, rng: random.Random, level: float = 1.0) -> Problem:
    """Draw a problem of ``task`` from either split; sizes go up to ``level`` (0 easy, 1 full)."""
    if task in ("add", "subtract"):
        return _arithmetic(task, rng, level)
    if task == "count":
        return _count(rng, level)
    if task.startswith("lookup-"):
        return _lookup(int(task[-1]), rng, level)
    if task in ("reverse", "sort"):
        return _words(task, rng)
    return _facts(rng)


def draw(task: str, rng: random.Random, held_out: bool, level: float = 1.0) -> Problem:
    """Draw a problem of ``task`` from the training or the evaluation split."""
    while True:
        problem = make(task, rng, level)
        if problem.held_out == held_out:
            return problem


def is_correct(text: str, answer: str) -> bool:
    """Whether a model's text is the answer, spaces at either end aside."""
    return text.strip() == answer


def _number(rng: random.Random, level: float) -> int:
    digits = rng.randint(1, 2 + round(2 * level))
    return rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)


def _arithmetic(task: str, rng: random.Random, level: float) -> Problem:
    a, b = _number(rng, level), _number(rng, level)
    if task == "subtract" and a < b:
        a, b = b, a
    sign, answer = ("+", a + b) if task == "add" else ("-", a - b)
    plain = f"{a} {sign} {b} ="
    chat = rng.choice(("What is {}?", "Compute {}.")).format(f"{a} {sign} {b}")
    return Problem(task, f"{a}{sign}{b}", plain, chat, str(answer))


def _count(rng: random.Random, level: float) -> Problem:
    step = rng.randint(2, 9 + round(90 * level))
    start = rng.randrange(0, 1000)
    down = start >= 4 * step and rng.random() < 0.5
    terms = [start + (-step if down else step) * i for i in range(1, 5)]
    way = "down" if down else "up"
    text = f"ount {way} from {start} by {step}"
    answer = " ".join(map(str, terms))
    return Problem("count", f"{way} {start} {step}", f"C{text}:", f"C{text}, four numbers.", answer)


def _lookup(stride: int, rng: random.Random, level: float) -> Problem:
    # The people form one ring of calls, so a walk from anyone never ends.
    n = rng.randint(4, 5 + round(3 * level))
    ring = rng.sample(NAMES, n)
    calls = [f"{a} calls {b}." for a, b in zip(ring, ring[1:] + ring[:1], strict=True)]
    rng.shuffle(calls)
    facts = " ".join(calls)
    start = rng.randrange(n)
    answer = " ".join(ring[(start + stride * i) % n] for i in (1, 2, 3))
    ask = f"From {ring[start]}, {stride} at a time"
    chat = f"{facts} {ask}, who comes up?"
    return Problem(f"lookup-{stride}", f"{facts} {ask}", f"{facts} {ask}:", chat, answer)


def _words(task: str, rng: random.Random) -> Problem:
    words = rng.sample(WORDS, rng.randint(3, 6))
    answer = " ".join(sorted(words) if task == "sort" else words[::-1])
    listed = " ".join(words)
    verb = task.capitalize()
    return Problem(
        task, f"{task} {listed}", f"{verb}: {listed} =", f"{verb} these words: {listed}", answer
    )


def _facts(rng: random.Random) -> Problem:
    kinds = [rng.choice(tuple(FACTS)) for _ in range(rng.choice((1, 2, 3)))]
    things = [rng.choice(tuple(FACTS[kind])) for kind in kinds]
    answer = ", ".join(FACTS[kind][thing] for kind, thing in zip(kinds, things, strict=True))
    if len(kinds) == 1:
        number = rng.randrange(len(PHRASES[kinds[0]]))
        plain, chat = (phrase.format(things[0]) for phrase in PHRASES[kinds[0]][number])
        return Problem("facts", plain, plain, chat, answer)
    asked = ", ".join(
        SHORT.get(kind, kind + " of {}").format(thing)
        for kind, thing in zip(kinds, things, strict=True)
    )
    return Problem("facts", asked, f"Answer {asked}:", f"Answer each: {asked}", answer)


def record(problem: Problem, chat: bool, number: int) -> dict:
    """The problem as an input record of ``ouro-batch run``, its answer in ``metadata``."""
    asked = (
        {"messages": [{"role": "user", "content": problem.chat}]}
        if chat
        else {"prompt": problem.plain}
    )
    name = f"{problem.task}-{number:03d}"
    metadata = {"task": problem.task, "answer": problem.answer}
    return {"id": name, **asked, "max_tokens": MAX_TOKENS, "metadata": metadata}


def held_out_records(counts: tuple[int, ...], seed: int) -> list[dict]:
    """``counts[i]`` held-out problems of each task, all different, plain and chat in turn."""
    rng = random.Random(seed)
    records, seen = [], set()
    for task, count in zip(TASKS, counts, strict=True):
        number = tries = 0
        while number < count:
            problem = draw(task, rng, held_out=True)
            asked = problem.chat if number % 2 else problem.plain
            tries += 1
            # The few single facts run out: after many tries a repeat is better than none.
            if asked in seen and tries < 100 * count:
                continue
            seen.add(asked)
            records.append(record(problem, chat=bool(number % 2), number=number))
            number += 1
    return records
