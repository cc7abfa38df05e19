"""Triton's interpreter, mended: it computes as a GPU does, and faster.

Its own conversions to and from e4m3 round no subnormal number, and take NaN for 480; those to
bfloat16 cut off what it does not hold. It multiplies matrices of bfloat16 as if their bits were
integers. Its fused products are rounded before the sum. It keeps the type of two numbers for what
comparing them gives, which as a mask Triton 3.9 then refuses. It warns of values that a GPU passes
over, such as infinity less itself. It wraps every function of triton.language anew whenever a
kernel calls a function, looks for overflows of integers without reporting any, and derives what the
type of a value says of it, such as its shape, anew for each value.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch

_DTYPES = {
    "fp8e4nv": (torch.float8_e4m3fn, torch.uint8),  # and the dtype of its bits in numpy
    "bf16": (torch.bfloat16, torch.uint16),
    "fp16": (torch.float16, torch.float16),
    "fp32": (torch.float32, torch.float32),
}


def mend(setattr: Callable[[object, str, object], None]) -> None:
    """Replaces what the interpreter does wrong or slowly. `setattr` is that of a MonkeyPatch."""
    from triton.language import core
    from triton.runtime import interpreter

    setattr(core.block_type, "__init__", _remembering_shapes(core.block_type.__init__))
    setattr(core.tensor, "__init__", _creating_tensors())
    setattr(core, "_unwrap_if_constexpr", _unwrapping(core._unwrap_if_constexpr))
    setattr(interpreter, "_get_np_dtype", _remembering_dtypes(interpreter._get_np_dtype))
    setattr(interpreter, "_convert_float", _converting(interpreter._convert_float))
    setattr(interpreter.InterpreterBuilder, "create_fma", _create_fma)
    plain = interpreter.InterpreterBuilder.create_dot
    setattr(interpreter.InterpreterBuilder, "create_dot", _multiplying(plain))
    plain = interpreter.InterpreterBuilder.binary_op
    setattr(interpreter.InterpreterBuilder, "binary_op", _comparing(plain))
    setattr(interpreter, "_patch_lang", OncePerLaunch(interpreter._patch_lang))
    builder = interpreter.interpreter_builder
    setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
    silent = np.errstate(all="ignore")(interpreter.GridExecutor.__call__)
    setattr(interpreter.GridExecutor, "__call__", silent)


def sum_exactly(setattr: Callable[[object, str, object], None]) -> None:
    """Has the sums of a product of two tiles depend on no shape, as on tensor cores: they are
    rounded once. Those of numpy are in an order that does."""
    from triton.runtime import interpreter

    def multiply(builder: object, x: Any, y: Any, acc: Any, *others: object) -> object:
        product = np.matmul(x.data.astype(np.float64), y.data.astype(np.float64))
        return interpreter.TensorHandle(product.astype(acc.data.dtype) + acc.data, acc.dtype.scalar)

    setattr(interpreter.InterpreterBuilder, "create_dot", _multiplying(multiply))


def fma(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """x * y + z of float32 or float16 numbers, rounded once.

    The product is exact in float64. The sum is rounded to odd there: of the two float64 numbers
    next to it, the one whose last bit is 1. Rounding that to the dtype gives what rounding the
    exact sum does, since float64 has at least two bits more (Boldo and Melquiond, "Emulation of a
    FMA and correctly rounded sums", 2008).
    """
    product, addend = x.astype(np.float64) * y.astype(np.float64), z.astype(np.float64)
    total = np.asarray(product + addend)
    back = total - product
    error = (product - (total - back)) + (addend - back)  # exact, or NaN where total is not finite
    nearest_is_even = total.view(np.int64) & 1 == 0
    other = np.nextafter(total, np.copysign(np.inf, error))
    return np.where((np.abs(error) > 0) & nearest_is_even, other, total).astype(z.dtype)


def _remembering_shapes(plain: Callable[..., None]) -> Callable[..., None]:
    """Gives blocks of one shape and element type the attributes of the first, and `constants`: the
    shape and the number of elements of tensors of that type."""
    from triton.language import core

    constant = core.constexpr
    known: dict[tuple[tuple[int, ...], str], dict[str, Any]] = {}

    def create(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = getattr(shape, "values", shape)
        key = tuple([each.value if type(each) is constant else each for each in sizes])
        found = known.get((key, element_ty.name))
        if found is None:
            plain(self, element_ty, shape)
            constants = core.tuple([core.constexpr(size) for size in key])
            self.constants = constants, core.constexpr(self.numel)
            known[key, element_ty.name] = {**vars(self)}
        else:
            vars(self).update(found, element_ty=element_ty)

    return create


def _creating_tensors() -> Callable[..., None]:
    """Creates a tensor with the `constants` of its type."""
    from triton.language import core

    of_scalars = core.tuple([]), core.constexpr(1)

    def create(self: Any, handle: object, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.constants if type.is_block() else of_scalars

    return create


def _unwrapping(plain: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Takes what is no constant and holds none as it is, at once."""
    from triton.language import core

    single = {int, float, bool, type(None), core.tensor, core.dtype, core.block_type}

    def unwrap(value: Any) -> Any:
        return value if type(value) in single else plain(value)

    return unwrap


def _remembering_dtypes(plain: Callable[[Any], object]) -> Callable[[Any], object]:
    known: dict[str, object] = {}

    def find(type: Any) -> object:
        name = type.scalar.name
        if name not in known:
            known[name] = plain(type)
        return known[name]

    return find


def _create_fma(builder: object, x: Any, y: Any, z: Any) -> object:
    from triton.runtime import interpreter

    if {str(each.dtype.scalar) for each in (x, y, z)} not in ({"fp32"}, {"fp16"}):
        raise NotImplementedError("the interpreter fuses products of float32 and float16 only")
    return interpreter.TensorHandle(fma(x.data, y.data, z.data), z.dtype.scalar)


def _converting(plain: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """Converts e4m3 and bfloat16 by torch, and other types as `plain` does."""

    def convert(data: np.ndarray, source: object, target: object, rounding: object) -> np.ndarray:
        if not {"fp8e4nv", "bf16"} & {str(source), str(target)}:
            return plain(data, source, target, rounding)
        (here, _), (there, bits) = _DTYPES[str(source)], _DTYPES[str(target)]
        found = torch.from_numpy(np.ascontiguousarray(data)).view(here).to(there)
        return found.view(bits).numpy()

    return convert


def _multiplying(plain: Callable[..., object]) -> Callable[..., object]:
    """Multiplies matrices of bfloat16 as float32, which is exact, and others as `plain` does."""
    from triton import language as tl
    from triton.runtime import interpreter

    def multiply(builder: object, x: Any, y: Any, *others: object) -> object:
        x, y = (
            interpreter.TensorHandle(
                interpreter._convert_float(each.data, tl.bfloat16, tl.float32, None), tl.float32
            )
            if each.dtype.scalar == tl.bfloat16
            else each
            for each in (x, y)
        )
        return plain(builder, x, y, *others)

    return multiply


def _comparing(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Gives truth values their own type."""
    from triton import language as tl
    from triton.runtime import interpreter

    def compute(*operands: object) -> Any:
        found = plain(*operands)
        is_truth = found.data.dtype == np.bool_
        return interpreter.TensorHandle(found.data, tl.int1) if is_truth else found

    return compute


class OncePerLaunch:
    """Wraps a language module's functions when the first function that uses it is called, and
    unwraps all of them after the launch, last first. Is its own scope."""

    def __init__(self, patch: Callable[[Any], Any]) -> None:
        self._patch = patch
        self._scopes: dict[frozenset[str], Any] = {}  # of the language modules that a file uses

    def __call__(self, function: Any) -> OncePerLaunch:
        used = _language_modules(function)
        if used not in self._scopes:
            self._scopes[used] = self._patch(function)
        return self

    def restore(self) -> None:
        while self._scopes:
            self._scopes.popitem()[1].restore()


@cache
def _language_modules(function: Any) -> frozenset[str]:
    import triton.language as tl

    modules = (each for each in function.__globals__.values() if inspect.ismodule(each))
    return frozenset(each.__name__ for each in modules if each is tl or each is tl.core)
