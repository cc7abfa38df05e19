"""`minisgl models`: the architectures that run, and those that are known not to."""

from __future__ import annotations

import textwrap

from minisgl.models.adopted.architectures import ADOPTED, REFUSED, TOWERS

_WIDTH = 98


def models() -> int:
    """List the architectures that run, by the code that runs them, and those that do not.

    The architecture of a model is in its config.json.
    """
    # Imports torch, which `minisgl --help` does without.
    from minisgl.models.registry import FAMILIES

    _print("With minisgl's own code (--model-impl native)", sorted(FAMILIES))
    print()
    _print("With transformers' code and minisgl's kernels (--model-impl adopted)", sorted(ADOPTED))
    print()
    _print("The text part of models with towers for images", sorted(TOWERS))
    print("\nNot supported:")
    for name, reason in sorted(REFUSED.items()):
        print(f"  {name}: {reason}")
    print(
        "\nOther causal decoders of transformers: --model-impl adopted runs them if a proof at the "
        "start\nfinds the numbers of transformers, and otherwise says what differs."
    )
    return 0


def _print(title: str, names: list[str]) -> None:
    print(f"{title}:")
    text = " ".join(names)
    print(textwrap.fill(text, _WIDTH, initial_indent="  ", subsequent_indent="  "))
