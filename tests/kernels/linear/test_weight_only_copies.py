"""Products that keep quantised weights a second time, dense, for many rows: on a GPU if there is
one, or else in the interpreter."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
pytest.importorskip("triton", reason="Triton is not installed: scripts/tools/try_interpreter.sh")

from support.checkpoints import Spec, random_prompt, reference_logits, relative_error
from support.paged import PagedModel, PagedSequence
from support.quantized import FORMATS, load_plain, quantize
from support.weight_only_cases import GivenWords, random_e4m3, random_int4

from minisgl.kernels.comm.mailbox import Mailbox
from minisgl.kernels.linear import dense_product, select_product
from minisgl.kernels.linear.dense_product import DenseProduct
from minisgl.kernels.linear.weight_only import weight_only_product
from minisgl.kernels.linear.weight_only.weight_only_product import WeightOnlyProduct
from minisgl.kernels.residual import Residual
from minisgl.kernels.tuning import H200
from minisgl.models.loader import load_model
from minisgl.models.registry import read_model_config

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.float16
BOUND = 4  # rows
SIZE = 128  # n and k
KINDS = {
    "int4": partial(random_int4, group=128, symmetric=True, device=DEVICE),
    "int4, zeros": partial(random_int4, group=32, symmetric=False, device=DEVICE),
    "e4m3": partial(random_e4m3, block=None, device=DEVICE),
}


@pytest.fixture(autouse=True)
def tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of this bound, and kernels also in the interpreter."""
    found = replace(H200, weight_only_rows=16, weight_only_dense_rows=BOUND)
    for module in (select_product, dense_product, weight_only_product):
        monkeypatch.setattr(module, "runs_triton", lambda device: True)
    for module in (dense_product, weight_only_product):
        monkeypatch.setattr(module, "tuning_of", lambda device: found)
    if DEVICE.type == "cpu":
        name = "minisgl.kernels.linear.cublaslt.load_products"
        monkeypatch.setattr(name, lambda dtype, device: None)


NORM = SimpleNamespace(weight=torch.linspace(0.5, 1.5, SIZE, device=DEVICE).to(HALF), eps=1e-6)


def squared(x: Tensor) -> Tensor:
    return x.float().square().sum(1, keepdim=True)


def total(residual: Residual) -> Tensor:
    return residual.rows if residual.delta is None else residual.rows + residual.delta


# What each computes of x. A product may write over the stream.
METHODS: dict[str, Callable[[WeightOnlyProduct, Tensor], Tensor]] = {
    "call": lambda product, x: product(x),
    "of_norm": lambda product, x: product.of_norm(Residual(x.clone()), NORM)[0],
    "of_norm of a sum": lambda product, x: product.of_norm(Residual(x.clone(), delta=x), NORM)[0],
    "of_norm with squares": lambda product, x: product.of_norm(
        Residual(x.clone(), squares=squared(x)), NORM
    )[0],
    "of_kept_norm": lambda product, x: product.of_kept_norm(Residual(x.clone()), NORM)[1],
    "gated_mul_of_norm": lambda product, x: product.gated_mul_of_norm(
        Residual(x.clone()), NORM, product
    )[0],
    "gated_mul_of_norm with squares": lambda product, x: product.gated_mul_of_norm(
        Residual(x.clone(), squares=squared(x)), NORM, product
    )[0],
    "add_to": lambda product, x: total(product.add_to(x, x.clone())),
}


def product_of(kind: str, bias: Tensor | None = None) -> GivenWords:
    torch.manual_seed(0)
    words, _ = KINDS[kind](SIZE, SIZE, dtype=HALF)
    product = GivenWords(words, HALF, bias)
    select_product.share_kernels([product], HALF, DEVICE)
    return product


def rows(count: int) -> Tensor:
    return torch.randn(count, SIZE, device=DEVICE).to(HALF)


@pytest.mark.parametrize(
    ("kind", "biased"), [("int4", True), ("int4, zeros", False), ("e4m3", True)]
)
def test_every_method_computes_the_same_with_a_copy(kind: str, biased: bool) -> None:
    bias = torch.linspace(-1, 1, SIZE, device=DEVICE).to(HALF) if biased else None
    plain, product = product_of(kind, bias), product_of(kind, bias)
    select_product.prepare([product], HALF, dense_copies=True)
    for method in METHODS.values():
        for m in (BOUND, BOUND + 1, 129):
            x = rows(m)
            torch.testing.assert_close(method(product, x), method(plain, x), rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("name", METHODS)
def test_the_copy_is_for_more_rows_than_the_bound(name: str) -> None:
    method, plain, product = METHODS[name], product_of("int4"), product_of("int4")
    select_product.prepare([product], HALF, dense_copies=True)
    assert product.dense is not None
    product.dense.weight.zero_()
    for m in (0, 1, BOUND):
        x = rows(m)
        assert torch.equal(method(product, x), method(plain, x))
    x = rows(BOUND + 1)
    nothing = x if name == "add_to" else torch.zeros_like(method(plain, x))
    assert torch.equal(method(product, x), nothing)


@pytest.mark.parametrize(("m", "sender"), [(BOUND, "words"), (BOUND + 1, "copy")])
def test_rows_for_other_ranks_are_sent_by_the_kernel_of_their_weights(
    m: int, sender: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []
    for name, module in (("words", "weight_only.weight_only_gemm"), ("copy", "dense_gemm")):
        kernel = f"minisgl.kernels.linear.{module}.linear"
        monkeypatch.setattr(kernel, lambda *args, name=name, **options: sent.append(name))
    product, mailbox = product_of("int4"), cast(Mailbox, object())
    select_product.prepare([product], HALF, dense_copies=True)
    assert product.send(rows(m), mailbox) is not None
    assert sent == [sender]
    assert product.send(rows(200), mailbox) is None, "the ranks add up so many in another way"


def test_copies_share_kernels_with_the_dense_products_and_need_no_room_to_dequantise() -> None:
    product, head = product_of("int4"), DenseProduct(rows(SIZE))
    products = [product, head]
    select_product.share_kernels(products, HALF, DEVICE)
    assert product.kernels is not None and product.kernels.dequantized is not None
    assert select_product.dense_copy_bytes(products, HALF) == SIZE * SIZE * 2
    select_product.prepare(products, HALF)
    assert product.dense is None
    select_product.prepare(products, HALF, dense_copies=True)
    assert product.dense is not None and product.dense.kernels is head.kernels is not None
    assert product.kernels.dequantized is None


def test_products_without_kernels_have_no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select_product, "runs_triton", lambda device: False)
    product = product_of("int4")
    assert select_product.dense_copy_bytes([product], HALF) == 0
    select_product.prepare([product], HALF, dense_copies=True)
    assert product.dense is None


SPEC = Spec("qwen2", "Qwen2ForCausalLM", hidden_size=128, num_heads=2, num_layers=1, tied=True)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="there tests/gpu has it, with an engine")
def test_a_model_whose_steps_cross_the_bound_matches_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of more and of fewer tokens, and single ones."""
    case = quantize(SPEC, FORMATS["ct-int4"], tmp_path)
    prompt = random_prompt(SPEC, 20)
    config = read_model_config(case.folder)
    options: dict[str, Any] = {"dtype": HALF, "device": DEVICE, "load_format": "safetensors"}
    model = load_model(config, case.folder, max_seq_len=64, **options)
    model.prepare(dense_copies=True)
    assert model.dense_copy_bytes == 2 * sum(p.weight.numel() for p in case.packed.values())
    products = [p for p in model._products() if isinstance(p, WeightOnlyProduct)]
    copies = [p.dense for p in products if p.dense is not None]
    assert len(copies) == len(products) == 4

    monkeypatch.setattr("minisgl.kernels.linear.dense_tiles.should_use", lambda *args, gated: False)
    multiplied: list[int] = []
    for copy in copies:
        separate = copy.separate
        monkeypatch.setattr(
            copy, "separate", lambda x, gemm=separate: multiplied.append(len(x)) or gemm(x)
        )
    sizes = (11, 3, 5, 1)
    paged, found, at = PagedModel(model, config, page_size=16), [], 0
    sequence = PagedSequence()
    for size in sizes:
        found += paged.step(chunks=[(sequence, prompt[at : at + size])])
        at += size
    assert set(multiplied) == {11, 5}
    expected = reference_logits(load_plain(case), prompt)
    assert relative_error(torch.cat(found).float(), expected) < 1e-2
