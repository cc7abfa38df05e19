"""The same model as transformers computes it.

Its weights stay in host memory, in the dtype of the checkpoint. Those of one layer at a time go to
the device, in the dtype in which it is to compute: so float32 needs the room of one layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from minisgl.config import Activations
from minisgl.config.machine import memory_bytes
from minisgl.errors import UnsupportedModelError
from minisgl.models.adopted.architectures import RENAMED
from minisgl.models.config_reader import CONFIG_FILE, QUANTIZATION_FIELDS, read_json
from minisgl.models.formats import QuantizedFormat
from minisgl.models.hub import safetensors_files
from minisgl.verify.answers import Stretch
from minisgl.verify.plain import plain_weights

FP8_MAX, INT8_MAX = torch.finfo(torch.float8_e4m3fn).max, 127
_MAX_ROWS = 2048  # of a forward pass, padding included


@dataclass(frozen=True, slots=True)
class Scores:
    """What a stretch should be."""

    logprobs: Tensor  # [positions, tokens], of the stretch's own tokens
    best: Tensor  # [positions], the logprob of the likeliest token
    best_ids: Tensor  # [positions]


@dataclass(frozen=True, slots=True)
class Fp8:
    """What minisgl rounds to FP8, or INT8, besides the weights that a checkpoint has in it."""

    inputs: Activations = Activations.NONE  # of linear maps
    group: int = 0  # columns that share a scale by Activations.GROUP
    weights: bool = False
    integers: bool = False  # inputs are rounded to INT8

    def hook(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Round the inputs and the weights of a module before it computes."""
        if self.weights:
            for name, weight in module._parameters.items():
                if weight is not None and weight.dim() > 1:
                    module._parameters[name] = nn.Parameter(_rounded(weight), requires_grad=False)
        if self.inputs == Activations.NONE or not args:
            return args
        size = args[0].shape[-1]
        by_group = self.inputs == Activations.GROUP and size % self.group == 0
        rows = args[0].unflatten(-1, (-1, self.group if by_group else size))
        return (_rounded(rows, self.integers).flatten(-2), *args[1:])


def _rounded(rows: Tensor, integers: bool = False) -> Tensor:
    """To FP8 or INT8, each row with a scale of its own."""
    most = INT8_MAX if integers else FP8_MAX
    scale = rows.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / most
    steps = rows / scale
    steps = steps.round() if integers else steps.to(torch.float8_e4m3fn).float()
    return (steps * scale).to(rows.dtype)


class Reference:
    """A checkpoint in transformers."""

    def __init__(self, folder: Path, dtype: torch.dtype, scheme: QuantizedFormat | None) -> None:
        """Read the weights into host memory. scheme: how they are stored. Raises
        UnsupportedModelError where this machine has no room for them."""
        num_bytes = sum(file.stat().st_size for file in safetensors_files(folder))
        if num_bytes > memory_bytes():
            raise UnsupportedModelError(
                f"the weights take {num_bytes / 1e9:.0f} GB of host memory, and this machine has "
                f"{memory_bytes() / 1e9:.0f} GB"
            )
        self.dtype = dtype
        self.model = _read(folder, dtype, scheme)

    @torch.no_grad()
    def scores(
        self,
        stretches: Sequence[Stretch],
        dtype: torch.dtype,
        device: torch.device,
        fp8: Fp8 = Fp8(),
    ) -> list[Scores]:
        """What the stretches should be, computed in `dtype`."""
        sequences = sorted({stretch.sequence for stretch in stretches}, key=len)
        found: dict[int, Scores] = {}
        with _visiting(self.model, self.dtype, dtype, device, fp8):
            while sequences:
                batch = [sequences.pop()]
                while sequences and (len(batch) + 1) * len(batch[0]) <= _MAX_ROWS:
                    batch.append(sequences.pop())
                # Tokens behind the end change nothing before it.
                ids = torch.zeros(len(batch), len(batch[0]), dtype=torch.int64)
                for row, sequence in enumerate(batch):
                    ids[row, : len(sequence)] = torch.tensor(sequence)
                logits = self.model(input_ids=ids.to(device), use_cache=False).logits
                for index, stretch in enumerate(stretches):
                    if stretch.sequence in batch:
                        found[index] = _scores(logits[batch.index(stretch.sequence)], stretch)
        return [found[index] for index in range(len(stretches))]


def _scores(logits: Tensor, stretch: Stretch) -> Scores:
    rows = logits[stretch.first : stretch.first + len(stretch.ids)].float().log_softmax(-1)
    best, best_ids = rows.max(-1)
    ids = torch.tensor(stretch.ids, device=rows.device)
    return Scores(rows.gather(1, ids).cpu(), best.cpu(), best_ids.cpu())


def _read(folder: Path, dtype: torch.dtype, scheme: QuantizedFormat | None) -> Any:
    import transformers

    [name] = read_json(folder / CONFIG_FILE)["architectures"]
    architecture = getattr(transformers, RENAMED.get(name, name))
    config = architecture.config_class.from_pretrained(folder, local_files_only=True)
    state: dict[str, Tensor] | None = None
    source: str | None = str(folder)
    if getattr(config, "quantization_config", {}).get("quant_method") == "mxfp4":
        config.quantization_config["dequantize"] = True  # transformers can
    elif scheme is not None and scheme.signs:
        source, state = None, plain_weights(folder, dtype)
        for name in QUANTIZATION_FIELDS:
            config.__dict__.pop(name, None)
    model = architecture.from_pretrained(
        source,
        config=config,
        state_dict=state,
        dtype=dtype,
        attn_implementation="eager",
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
    ).eval()
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    return model


@contextlib.contextmanager
def _visiting(
    model: nn.Module, of: torch.dtype, dtype: torch.dtype, device: torch.device, fp8: Fp8
) -> Iterator[None]:
    """Let each module compute on `device`, and what is of the dtype `of` in `dtype`."""
    kept: dict[nn.Module, list[tuple[dict[str, Any], str, Tensor]]] = {}
    layers = _layers(model)

    def moved(tensor: Tensor) -> Tensor:
        there = tensor.to(device, dtype if tensor.dtype == of else tensor.dtype)
        is_weight = isinstance(tensor, nn.Parameter)
        return nn.Parameter(there, requires_grad=False) if is_weight else there

    def come(module: nn.Module, *_: Any) -> None:
        stores: list[dict[str, Any]] = [
            store
            for part in (module.modules() if module in layers else (module,))
            for store in (part._parameters, part._buffers)
        ]
        kept[module] = [
            (store, name, tensor)
            for store in stores
            for name, tensor in store.items()
            if tensor is not None
        ]
        for store, name, tensor in kept[module]:
            store[name] = moved(tensor)

    def go(module: nn.Module, *_: Any) -> None:
        for store, name, tensor in kept.pop(module, ()):
            store[name] = tensor

    inside = {part for layer in layers for part in layer.modules() if part is not layer}
    handles = [
        module.register_forward_pre_hook(fp8.hook) for module in inside if _multiplies(module)
    ]
    for module in model.modules():
        if module not in inside:
            handles.append(module.register_forward_pre_hook(come))
            handles.append(module.register_forward_hook(go, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _multiplies(module: nn.Module) -> bool:
    """Whether a module has matrices that may be in FP8: a linear map, or experts."""
    weights = [*module.parameters(recurse=False)]
    return isinstance(module, nn.Linear) or any(weight.dim() == 3 for weight in weights)


def _layers(model: nn.Module) -> set[nn.Module]:
    """The modules of the list that has most of the weights; not those of a list within."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    sizes = {each: sum(weight.numel() for weight in each.parameters()) for each in lists}
    return {*max(lists, key=lambda each: sizes[each], default=())}
