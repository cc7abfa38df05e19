"""Prints training conversations of the demo model: `python scripts/demo/demo_data.py [SKILL]`.

SKILL is one of demo_model/skills.py, 'recall' or 'system'; without it, all skills are drawn with
their training weights. `--evaluation` prints the questions of the held-out evaluation instead.
"""

from __future__ import annotations

import argparse
import random

from demo_model.conversation import conversation
from demo_model.data import NOISE
from demo_model.evaluation import GROUPS, cases, conversation_of
from demo_model.world import World


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("skill", nargs="?", choices=GROUPS)
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
    for index in range(options.count):
        skill = options.skill
        made = conversation(world) if skill is None else conversation_of(world, skill, index)
        for message in made.messages():
            print(f"{message['role']:>9}: {message['content']}")
        print()


if __name__ == "__main__":
    main()
