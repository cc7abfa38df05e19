"""The choice of cuBLASLt algorithms, with a fake library; gpu/ tests the real one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from minisgl.kernels.linear.cublaslt import (
    MAX_ROWS,
    CublasLt,
    CublasLtError,
    Products,
    load_products,
)

N = K = 4096
BROKEN, REFUSED = 3, 4


class FakeLibrary:
    """Algorithm i is the fastest where there are 10 · i rows, or nearest to it."""

    def __init__(self, algorithms: list[int]) -> None:
        self.algorithms = algorithms
        self.used: list[int] = []
        self.clock_ms = 0.0

    def layouts(self, m: int, n: int, k: int) -> tuple[int, int, int]:
        return m, n, k

    def proposals(self, of: Any) -> list[int]:
        return self.algorithms

    def accepts(self, of: Any, algorithm: int) -> bool:
        return algorithm != REFUSED

    def multiply(
        self, of: Any, algorithm: int, x: Tensor, weight: Tensor, y: Tensor, workspace: Tensor
    ) -> None:
        if algorithm == BROKEN:
            raise CublasLtError("It does not run.")
        assert y.shape == (len(x), len(weight)) and of == (len(x), *weight.shape)
        self.used.append(algorithm)
        self.clock_ms += 1 + abs(len(x) - 10 * algorithm)

    def time_ms(self, work: Callable[[], None]) -> float:
        began = self.clock_ms
        work()
        return self.clock_ms - began


def tuned(algorithms: list[int]) -> tuple[Products, FakeLibrary]:
    library: Any = FakeLibrary(algorithms)
    products = Products(library, torch.device("cpu"))
    products.tune([weight(), weight()])
    library.used.clear()
    return products, library


def weight(n: int = N, k: int = K) -> Tensor:
    return torch.empty(n, k, dtype=torch.bfloat16)


def rows(m: int) -> Tensor:
    """At an address that suits the library, which torch's on a CPU need not."""
    buffer = torch.zeros(m * K + 256, dtype=torch.bfloat16)
    skipped = -buffer.data_ptr() % 256 // 2
    return buffer[skipped : skipped + m * K].view(m, K)


@pytest.mark.parametrize(("m", "expected"), [(1, 1), (8, 1), (9, 2), (16, 2), (50, 6), (64, 6)])
def test_the_fastest_algorithm_tuned_for_at_least_that_many_rows_is_used(
    m: int, expected: int
) -> None:
    products, library = tuned([9, 6, 2, 1])
    out = products(rows(m), weight())
    assert out is not None and out.shape == (m, N)
    assert library.used == [expected]


@pytest.mark.parametrize(("faster", "expected"), [(1.005, 5), (1.02, 6)])
def test_of_algorithms_that_are_as_fast_the_first_proposed_is_used(
    faster: float, expected: int
) -> None:
    """So that the noise of a trial does not choose."""
    library: Any = FakeLibrary([9, 5, 6])
    milliseconds = {9: 2 * faster, 5: faster, 6: 1.0}

    def time_ms(work: Callable[[], None]) -> float:
        work()
        return milliseconds[library.used[-1]]

    library.time_ms = time_ms
    products = Products(library, torch.device("cpu"))
    products.tune([weight()])
    products(rows(8), weight())
    assert library.used[-1] == expected


def test_more_rows_are_left_to_torch() -> None:
    products, library = tuned([6])
    assert products(rows(MAX_ROWS), weight()) is not None
    assert products(rows(MAX_ROWS + 1), weight()) is None
    assert library.used == [6]


def test_an_algorithm_that_fails_is_skipped() -> None:
    products, library = tuned([BROKEN, 9])
    assert products(rows(30), weight()) is not None
    assert library.used == [9]


@pytest.mark.parametrize("algorithms", [[], [BROKEN], [REFUSED]])
def test_without_any_algorithm_the_product_is_left_to_torch(algorithms: list[int]) -> None:
    products, library = tuned(algorithms)
    assert products(rows(40), weight()) is None
    assert not library.used


def test_unsuitable_weights_and_rows_are_left_to_torch() -> None:
    products, _ = tuned([1])
    assert products(rows(8), weight()) is not None
    assert products(rows(8), weight(n=2 * N)) is None  # was not tuned for
    assert products(rows(16)[:, : K // 2], weight(k=K // 2)) is None
    assert products(rows(9).view(-1)[8 : 8 + 8 * K].view(8, K), weight()) is None
    assert products(rows(0), weight()) is None
    for shape in ((N + 4, K), (64, 64)):
        products.tune([weight(*shape)])
        assert products(torch.zeros(8, shape[1], dtype=torch.bfloat16), weight(*shape)) is None


def test_without_the_cublaslt_library_no_products_are_tuned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr("minisgl.kernels.linear.cublaslt.ctypes.CDLL", missing)
    with pytest.raises(CublasLtError, match=r"libcublasLt\.so\."):
        CublasLt(torch.bfloat16)
    assert load_products(torch.float32, torch.device("cuda")) is None  # nothing is looked for
