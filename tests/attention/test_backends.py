"""Which attention backends are available, and in which order they are preferred."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.attention_packages import (
    FLASH,
    module,
)
from torch import Tensor

from minisgl.attention import backends, declaration, flash_backend, flashinfer_backend
from minisgl.attention.backends import (
    BACKENDS,
    available_backends,
    make_attention,
    make_captured_attention,
)
from minisgl.attention.base import (
    Attention,
    AttentionCall,
    BatchSlots,
    DecodeBatch,
    ForwardBatch,
    PrefillBatch,
)
from minisgl.attention.state import PagedKV
from minisgl.attention.torch_backend import TorchAttention
from minisgl.config import ATTENTION_BACKENDS, AttentionSpec
from minisgl.kernels.elementwise.reference import NormRope
from minisgl.kernels.rows import Rows
from minisgl.kernels.segments import Segments


def page_multiple() -> int:
    """Of the flash-attn that is installed."""
    flash = BACKENDS["fa"]
    return flash.facts_with(flash.facts, set(layers(128, 2))).page_multiple


@pytest.mark.parametrize(
    ("installed", "multiple"),
    [
        (("fa2",), 256),
        (("fa3",), 1),
        (("fa4",), 1),
        (("fa2", "fa3"), 1),
        (("fa2", "fa3", "fa4"), 1),
    ],
    ids=str,
)
def test_the_newest_installed_flash_attn_is_used(
    packages: Callable[..., None], installed: tuple[str, ...], multiple: int
) -> None:
    packages(*installed)
    attention = flash_backend.load_newest()
    assert attention.generation.number == int(installed[-1][-1])
    assert page_multiple() == multiple


def test_the_preview_of_flash_attn_4_is_not_used(packages: Callable[..., None]) -> None:
    packages("fa2", "fa4")

    def flash_attn_varlen_func(q: Tensor, k: Tensor, v: Tensor, page_table: Tensor) -> None: ...

    sys.modules["flash_attn.cute"].flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    assert page_multiple() == 256


def test_without_flash_attn_the_error_names_the_packages(packages: Callable[..., None]) -> None:
    with pytest.raises(ImportError, match=r"flash-attn-4.*flash_attn_3.*flash-attn"):
        make_attention("fa", "fa")


def test_an_unknown_backend_name_is_refused() -> None:
    with pytest.raises(ValueError, match="no attention backend"):
        make_attention("slow", "slow")


@pytest.mark.parametrize("name", ["fi", "trtllm"])
def test_flashinfer_without_a_layer_shape_is_refused(
    packages: Callable[..., None], name: str
) -> None:
    with pytest.raises(ValueError, match=name):
        make_attention(name, name)


def pretend_installed(monkeypatch: pytest.MonkeyPatch, is_installed: Callable[[str], bool]) -> None:
    for file in (declaration, flash_backend, flashinfer_backend):
        monkeypatch.setattr(file, "is_installed", is_installed)


@pytest.fixture
def everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretends that all packages and nvcc are installed."""
    pretend_installed(monkeypatch, lambda module: True)
    monkeypatch.setattr(flashinfer_backend, "_finds_nvcc", lambda: True)
    for name, make in (("flashinfer", lambda: module("flashinfer")), *FLASH.values()):
        monkeypatch.setitem(sys.modules, name, make())
    monkeypatch.setitem(sys.modules, "triton", module("triton"))


def layers(head_dim: int, group: int, **extra: Any) -> tuple[AttentionSpec, ...]:
    spec = AttentionSpec(
        num_heads=2 * group, num_kv_heads=2, head_dim=head_dim, scale=head_dim**-0.5, **extra
    )
    return (spec, spec)


def test_the_backends_available_on_hopper_are_listed_in_order(everything: None) -> None:
    found = available_backends((9, 0), layers(128, 2))
    assert found.best_first("prefill") == ("fi", "trtllm", "triton", "torch", "fa")
    assert found.best_first("decode") == ("triton", "trtllm", "fi", "torch", "fa")
    assert found.missing == {}


def test_the_backends_available_on_ampere_are_listed_in_order(everything: None) -> None:
    found = available_backends((8, 0), layers(128, 4))
    assert found.best_first("prefill") == ("fi", "triton", "torch", "fa")
    assert found.best_first("decode") == ("triton", "fi", "torch", "fa")
    assert found.missing == {"trtllm": "trtllm's kernels are for Hopper and Blackwell"}


def test_odd_head_dims_and_group_sizes_exclude_backends(everything: None) -> None:
    found = available_backends((9, 0), layers(96, 7))
    assert found.best_first("prefill") == found.best_first("decode") == ("triton", "torch", "fa")
    found = available_backends((7, 5), layers(128, 1))
    assert (
        found.best_first("prefill") == found.best_first("decode") == ("torch",)
        and "8.0" in found.missing["fi"]
    )


SINKS, VALUES = "attention sinks", "values of another width"


@pytest.mark.parametrize(
    ("extra", "refused"),
    [
        ({"window": 4096}, {}),
        ({"softcap": 50.0}, {"trtllm": "soft caps"}),
        ({"sinks": True}, dict.fromkeys(("fa", "fi", "trtllm"), SINKS)),
        (
            {"softcap": 50.0, "sinks": True, "value_dim": 64},
            {"fa": f"{SINKS} and no {VALUES}", "fi": SINKS}
            | {"trtllm": f"soft caps and no {SINKS} and no {VALUES}"},
        ),
    ],
)
def test_backends_refuse_unsupported_attention_specs(
    everything: None, extra: dict[str, Any], refused: dict[str, str]
) -> None:
    """It is enough that one layer asks for it."""
    mixed = layers(128, 2) + layers(128, 2, **extra)
    found = available_backends((9, 0), mixed)
    assert found.missing == {name: f"{name} computes no {what}" for name, what in refused.items()}
    assert not {*found.best_first("prefill")} & refused.keys()
    assert available_backends(None, mixed).best_first("decode") == ("torch",)


def latents(**extra: Any) -> tuple[AttentionSpec, ...]:
    spec = AttentionSpec(
        num_heads=20, num_kv_heads=1, head_dim=576, scale=0.1, value_dim=512, v_in_k=True
    )
    return (dataclasses.replace(spec, **extra),)


@pytest.mark.parametrize(("num_heads", "most"), [(20, 72_089), (128, 11_264)])
def test_flashinfer_prefills_over_latents(everything: None, num_heads: int, most: int) -> None:
    """Without a cache in FP8, and steps of as many tokens as a plan has room for."""
    found = available_backends((9, 0), latents(num_heads=num_heads))
    assert found.best_first("prefill") == ("fi", "triton", "torch")
    assert found.best_first("decode") == ("triton", "fi", "torch")
    facts = {each.name: each for each in found.backends}
    assert facts["fi"].fp8_rank is None and facts["triton"].fp8_rank == 1
    assert facts["fi"].most_prompt_tokens == most
    plain = {each.name: each for each in available_backends((9, 0), layers(128, 2)).backends}
    assert plain["fi"] == BACKENDS["fi"].facts


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"head_dim": 320, "value_dim": 256}, "latents of 512 numbers with 64 behind them only"),
        ({"window": 100}, "no sliding windows and no soft caps over latents"),
        ({"value_dim": 128, "v_in_k": False, "head_dim": 192}, "no values of another width"),
    ],
)
def test_flashinfer_refuses_other_latents(
    everything: None, extra: dict[str, Any], reason: str
) -> None:
    found = available_backends((9, 0), latents(**extra))
    assert reason in found.missing["fi"] and "fi" not in found.best_first("prefill")


def test_a_backend_that_computes_none_of_the_extras_names_them_in_order(
    everything: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = dataclasses.replace(
        BACKENDS["torch"], facts=dataclasses.replace(BACKENDS["torch"].facts, extras=())
    )
    monkeypatch.setitem(BACKENDS, "torch", plain)
    found = available_backends(None, layers(128, 2, window=9, softcap=50.0, sinks=True))
    assert found.best_first("decode") == ()
    words = "sliding windows and no soft caps and no attention sinks"
    assert found.missing["torch"] == f"torch computes no {words}"


@pytest.mark.parametrize(
    "field",
    [each for each in dataclasses.fields(AttentionSpec) if each.default is not dataclasses.MISSING],
    ids=lambda each: each.name,
)
def test_a_backend_declares_each_property_beyond_plain_attention_or_refuses_it(
    everything: None, monkeypatch: pytest.MonkeyPatch, field: dataclasses.Field[Any]
) -> None:
    facts = dataclasses.replace(BACKENDS["torch"].facts, extras=())
    monkeypatch.setitem(BACKENDS, "torch", dataclasses.replace(BACKENDS["torch"], facts=facts))
    layer, _ = layers(128, 2, **{field.name: True if field.default is False else 9})
    (extra,) = layer.extras()
    assert available_backends(None, {layer}).missing["torch"] == f"torch computes no {extra}"


@dataclasses.dataclass
class Noting:
    """Attends to nothing."""

    calls: list[AttentionCall] = dataclasses.field(default_factory=list)
    fuses_norm_rope = True

    def decode(self, call: AttentionCall, batch: DecodeBatch | PrefillBatch) -> Tensor:
        self.calls.append(call)
        return call.q

    prefill = decode


def test_both_backends_of_a_step_get_the_call_of_the_layer_with_their_rows() -> None:
    q, kv = torch.randn(5, 2, 8), PagedKV(*torch.zeros(2, 3, 4, 1, 8))
    spec, _ = layers(8, 2, window=3, sinks=True)
    call, numbers = AttentionCall(q, kv, spec, torch.zeros(2)), torch.zeros(5, dtype=torch.int64)
    table = torch.ones((2, 1), dtype=torch.int32)
    rows = Rows.of(numbers, numbers)
    batch = ForwardBatch(
        *(numbers, rows, rows, numbers),
        DecodeBatch(table, torch.ones(2, dtype=torch.int32), 1),
        PrefillBatch.of(table[:1], (0,), (3,)),
        BatchSlots(numbers, Segments(numbers, numbers, numbers)),
    )
    backends = Noting(), Noting()
    assert torch.equal(Attention(*backends)(call, batch), q)
    for noted, part in zip(backends, (q[2:], q[:2]), strict=True):
        [got] = noted.calls
        assert torch.equal(got.q, part) and dataclasses.replace(got, q=q) == call


@pytest.mark.parametrize("is_shifted", [False, True])
def test_a_fused_backend_is_not_asked_to_rotate_by_other_numbers_than_positions(
    is_shifted: bool,
) -> None:
    positions, nothing = torch.tensor([2, 0]), torch.zeros(0, dtype=torch.int64)
    rows = Rows.of(torch.tensor([0, 1]), positions)
    if is_shifted:
        rows = dataclasses.replace(rows, rope=positions + 1)
    table = torch.tensor([[1], [2]], dtype=torch.int32)
    batch = ForwardBatch(
        *(positions, rows, rows, torch.tensor([6, 8])),
        DecodeBatch(table, torch.tensor([3, 1], dtype=torch.int32), 3),
        PrefillBatch.of(table[:0], (), ()),
        BatchSlots(rows.slots, Segments(nothing, nothing, nothing)),
    )
    (spec, _), qkv = layers(8, 1), torch.randn(2, 6 * 8)
    angles = torch.arange(5.0)[:, None] * torch.tensor([1.0, 0.5, 0.2, 0.1])
    norm_rope = NormRope(torch.cat((angles.cos(), angles.sin()), dim=1))
    kv, backend = PagedKV(*torch.zeros(2, 3, 4, 2, 8)), Noting()
    Attention(backend, backend)(AttentionCall(qkv, kv, spec, norm_rope=norm_rope), batch)
    [call] = backend.calls
    if not is_shifted:
        assert call.norm_rope is norm_rope and call.q is qkv and not kv.k.any()
        return
    assert call.norm_rope is None
    turns = torch.complex(angles.cos(), angles.sin())[positions + 1, None]
    first, second = qkv.view(2, 6, 8).chunk(2, dim=2)
    turned = torch.view_as_real(torch.complex(first, second)[:, :4] * turns).transpose(2, 3)
    turned = turned.flatten(2)
    torch.testing.assert_close(call.q, turned[:, :2])
    torch.testing.assert_close(kv.k.flatten(0, 1)[[6, 8]], turned[:, 2:])


def test_flashinfer_plans_for_layers_with_different_heads(everything: None) -> None:
    assert available_backends((9, 0), layers(128, 2) + layers(256, 4)).missing == {}
    found = available_backends((9, 0), layers(256, 2) + layers(512, 4))
    assert found.best_first("prefill") == found.best_first("decode") == ("triton", "torch")
    assert "head_dim 512" in found.missing["fi"]


@pytest.mark.parametrize("compute_capability", [(8, 9), (9, 0), (12, 0)])
def test_every_order_of_preference_lists_all_backends_and_last_the_one_that_never_ran(
    everything: None, compute_capability: tuple[int, int]
) -> None:
    found = available_backends(compute_capability, layers(128, 2))
    for order in map(found.best_first, ("prefill", "decode")):
        assert {*order} | found.missing.keys() == {*ATTENTION_BACKENDS} and order[-1] == "fa"


def test_without_a_gpu_nothing_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} was imported")

    monkeypatch.setattr(importlib, "import_module", refuse)
    found = available_backends(None, layers(128, 2))
    assert found.best_first("prefill") == found.best_first("decode") == ("torch",)
    assert found.missing["fi"] == "fi needs a GPU" and len(found.missing) == 4


def test_each_missing_backend_has_a_reason(
    everything: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flashinfer_backend, "_finds_nvcc", lambda: False)
    installed = {"flashinfer", "triton", "flash_attn"}
    pretend_installed(monkeypatch, installed.__contains__)
    assert "nvcc" in available_backends((9, 0), layers(128, 2)).missing["fi"]
    installed.add("flashinfer_jit_cache")  # kernels that come compiled
    assert "fi" in available_backends((9, 0), layers(128, 2)).best_first("prefill")

    for name, _ in FLASH.values():
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    found = available_backends((9, 0), layers(128, 2))
    assert found.best_first("prefill") == found.best_first("decode") == ("triton", "torch")
    assert found.missing["fa"].startswith("flash-attn does not import: no generation")
    assert found.missing["fi"].startswith("flashinfer-python does not import: ")

    installed.clear()
    found = available_backends((9, 0), layers(128, 2))
    assert found.best_first("prefill") == found.best_first("decode") == ("torch",)
    assert found.missing == {
        "fa": "flash-attn is not installed",
        "fi": "flashinfer-python is not installed",
        "trtllm": "flashinfer-python is not installed",
        "triton": "triton is not installed",
    }


def test_the_names_that_the_option_takes_are_those_of_the_declared_backends() -> None:
    assert tuple(BACKENDS) == ATTENTION_BACKENDS
    for name, backend in BACKENDS.items():
        assert backend.facts.name == name


@pytest.mark.parametrize("phase", ["prefill_rank", "decode_rank"])
def test_no_two_backends_have_the_same_rank(phase: str) -> None:
    ranks = [getattr(backend.facts, phase) for backend in BACKENDS.values()]
    assert len({*ranks}) == len(ranks)


def test_a_captured_step_prefills_by_a_backend_that_finds_chunks_on_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = TorchAttention()
    triton = dataclasses.replace(BACKENDS["triton"], make=lambda shape: made)
    monkeypatch.setitem(backends.BACKENDS, "triton", triton)
    attention = make_attention("torch", "torch")
    captured = make_captured_attention(attention, "torch", None)
    assert captured == Attention(made, attention.decode_backend)
    attention = make_attention("triton", "torch")
    assert make_captured_attention(attention, "triton", None) is attention


@pytest.mark.parametrize(("installed", "multiple"), [(("fa2",), 256), (("fa2", "fa3"), 1)], ids=str)
def test_the_page_multiple_is_that_of_the_installed_flash_attn(
    monkeypatch: pytest.MonkeyPatch,
    packages: Callable[..., None],
    installed: tuple[str, ...],
    multiple: int,
) -> None:
    packages(*installed)
    pretend_installed(monkeypatch, lambda module: module == "flash_attn")
    found = {b.name: b.page_multiple for b in available_backends((9, 0), layers(128, 2)).backends}
    assert found.pop("fa") == multiple and {*found.values()} == {1}
    for layer in layers(20, 2):  # it cannot run
        found = available_backends((9, 0), [layer])
        assert all(backend.page_multiple == 1 for backend in found.backends)
