"""How the weights of a quantised model are stored, and what its products compute with them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

BLOCK = 128  # rows and columns of a matrix that share a scale, where scales are of blocks


class Storage(StrEnum):
    """Who writes the weights, and so by which names and in which layout."""

    FP8 = "fp8"  # quant_method fp8: Qwen, DeepSeek, AutoFP8
    COMPRESSED = "compressed-tensors"
    AWQ = "awq"
    GPTQ = "gptq"
    GPTQ_V2 = "gptq_v2"
    MXFP4 = "mxfp4"  # gpt-oss: experts alone
    FLOAT = "float"  # no one: minisgl quantises while it loads


class Activations(StrEnum):
    """What share a scale when the inputs of a product are rounded to FP8."""

    NONE = "none"  # they are not rounded
    TOKEN = "token"  # the columns of a row
    GROUP = "group"  # the columns of a row that meet one block of weights
    STATIC = "static"  # everything: the scale is the checkpoint's


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantScheme:
    """How the linear maps of a model's layers are quantised. Embedding, head, router and norms are
    not."""

    bits: int  # 8: e4m3 numbers; 4: integers, or of MXFP4 e2m1 numbers
    storage: Storage
    # What shares a scale of weights: tensor, channel (a row), block (BLOCK²), or group (of a row).
    strategy: str
    activations: Activations = Activations.NONE
    group_size: int = 0  # weights in a group
    symmetric: bool = True  # False: groups have zero points

    @property
    def only_experts(self) -> bool:
        """Whether no other linear maps are quantised."""
        return self.storage == Storage.MXFP4

    def matrix_bytes(self, n: int, k: int) -> int:
        """The bytes of a matrix of n rows and k columns, with its scales and zero points."""
        if self.storage == Storage.MXFP4:
            return n * k // 2 + 2 * n * k // self.group_size
        if self.bits == 4:
            scales = n * k // self.group_size
            return n * k // 2 + 2 * scales + (0 if self.symmetric else scales)
        if self.strategy == "block":
            return n * k + 4 * -(-n // BLOCK) * -(-k // BLOCK)
        return n * k + 4 * n

    def __str__(self) -> str:
        """A description for people."""
        if self.storage == Storage.MXFP4:
            return f"MXFP4 experts in blocks of {self.group_size}"
        if self.bits == 4:
            zeros = "" if self.symmetric else " with zero points"
            return f"INT4 in groups of {self.group_size}{zeros} ({self.storage})"
        scales = {
            "tensor": "one scale per matrix",
            "channel": "one scale per row",
            "block": f"blocks of {BLOCK}x{BLOCK}",
        }[self.strategy]
        inputs = {
            Activations.NONE: "inputs as they are",
            Activations.TOKEN: "inputs rounded per token",
            Activations.GROUP: f"inputs rounded per token and {BLOCK} columns",
            Activations.STATIC: "inputs rounded with the checkpoint's scale",
        }[self.activations]
        return f"FP8 with {scales}, {inputs}"


# What --quantization fp8 makes of a checkpoint that is not quantised.
FP8_WHILE_LOADING = QuantScheme(
    bits=8, storage=Storage.FLOAT, strategy="channel", activations=Activations.TOKEN
)
