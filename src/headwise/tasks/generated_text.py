"""A text where there is none: short scenes whose people and things come back, so that there is
something to look up. Standard library only."""

# ruff: noqa: SIM905 (words are easier to read as one text)
from __future__ import annotations

import random

PEOPLE = "anna ben clara david emma felix greta henry ida jonas kate leo mia noah olga paul".split()
THINGS = (
    "lamp book coin drum flute glove kite ladle mirror needle orange pearl quilt rope shell violin"
).split()
PLACES = "attic barn cellar garden harbor kitchen library market orchard tower".split()
COLOURS = "amber black blue green grey red white yellow".split()


def generated_text(length: int, seed: int = 0) -> str:
    """Scenes of a few people who take coloured things to places, and what follows from it: who has
    what, where it is.

    >>> generated_text(40)[:20] == generated_text(60)[:20]
    True
    """
    rng = random.Random(seed)
    scenes: list[str] = []
    size = 0
    while size < length:
        scenes.append(_scene(rng))
        size += len(scenes[-1])
    return "".join(scenes)[:length]


def _scene(rng: random.Random) -> str:
    # Each person of a scene holds one coloured thing in one place: the facts that later sentences
    # repeat.
    people, things = rng.sample(PEOPLE, 3), rng.sample(THINGS, 3)
    held = {
        person: (rng.choice(COLOURS), thing, rng.choice(PLACES))
        for person, thing in zip(people, things, strict=True)
    }
    lines = [
        f"{person} took the {colour} {thing} to the {place}."
        for person, (colour, thing, place) in held.items()
    ]
    # Later sentences either move a person, which changes the place, or state one of the facts.
    for person in rng.choices(people, k=4):
        colour, thing, place = held[person]
        if rng.random() < 0.3:
            place = rng.choice(PLACES)
            held[person] = colour, thing, place
            lines.append(f"then {person} went to the {place}.")
        else:
            facts = (
                f"{person} has the {colour} {thing}.",
                f"the {thing} of {person} is in the {place}.",
                f"the {thing} is {colour}.",
            )
            lines.append(rng.choice(facts))
    return " ".join(lines) + "\n"
