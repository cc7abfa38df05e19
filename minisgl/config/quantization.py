"""How the inputs of products with FP8 and INT8 weights are rounded."""

from __future__ import annotations

from enum import StrEnum


class Activations(StrEnum):
    """What share a scale when the inputs of a product are rounded to FP8 or INT8."""

    NONE = "none"  # they are not rounded
    TOKEN = "token"  # the columns of a row
    GROUP = "group"  # the columns of a row that meet one block of weights
    STATIC = "static"  # everything: the scale is the checkpoint's
