"""Prints training conversations of the demo model: `python scripts/demo/demo_data.py [SKILL]`.

SKILL is one of demo_model/skills.py, 'recall' or 'system'; without it, all skills are drawn with
their training weights. `--evaluation` prints the questions of the held-out evaluation instead.
"""

from __future__ import annotations

import argparse
import random

from demo_model.conversation import Dialogue, conversation, instructed, remembering
from demo_model.data import NOISE
from demo_model.evaluation import MANNERS, cases
from demo_model.skills import SKILLS, draw
from demo_model.world import World


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("skill", nargs="?", choices=[*SKILLS, "recall", "system"])
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--evaluation", action="store_true")
    options = parser.parse_args()
    if options.evaluation:
        for case in cases():
            if options.skill in (None, case.skill):
                print(f"{case.split} {case.skill}: {case.messages[-1]['content']} → {case.answer}")
        return
    world = World(random.Random(options.seed), noise=NOISE)
    for _ in range(options.count):
        for message in make(world, options.skill).messages():
            print(f"{message['role']:>9}: {message['content']}")
        print()


def make(world: World, skill: str | None) -> Dialogue:
    match skill:
        case None:
            return conversation(world)
        case "recall":
            return remembering(world, 200)
        case "system":
            return instructed(world, world.pick(MANNERS), 2)
        case _:
            return Dialogue([draw(world, skill)])


if __name__ == "__main__":
    main()
