"""What launch_order.py reads in Triton's IR, and what breaks the rule of overlapping launches."""

from __future__ import annotations

import pytest
from launch_order import NONE, Launched, Span, Uses, broken, uses_of

WAIT = '%w = tt.elementwise_inline_asm "griddepcontrol.wait; // dummy $0" {pure = false} -> i32'
TRIGGER = '%t = tt.elementwise_inline_asm "griddepcontrol.launch_dependents; // dummy $0" {} -> i32'


def uses(*lines: str) -> Uses:
    """Of a kernel whose arguments are %a (0), %b (1), %c (2) and a number."""
    head = (
        "  tt.func public @kernel(%a: !tt.ptr<f32>, %b: !tt.ptr<f32>, %c: !tt.ptr<i32>, %n: i32) {"
    )
    return uses_of("\n".join(["module {", head, *lines, "    tt.return", "  }", "}"]))


def places(*numbers: int) -> frozenset[int]:
    return frozenset(numbers)


def test_addresses_are_followed_to_arguments_and_what_is_loaded_is_not() -> None:
    found = uses(
        "%0 = tt.splat %a : !tt.ptr<f32> -> tensor<8x!tt.ptr<f32>> loc(#loc1)",
        "%index = tt.load %c : !tt.ptr<i32>",
        "%1 = tt.addptr %0, %index : tensor<8x!tt.ptr<f32>>, tensor<8xi32>",
        "%2 = tt.load %1, %mask, %other : tensor<8x!tt.ptr<f32>>",
        WAIT,
        TRIGGER,
        "%3 = tt.load %b : !tt.ptr<f32>",
        "tt.store %b, %2 : !tt.ptr<f32>",
    )
    assert found == Uses(places(0, 2), NONE, places(1), is_early=False)


def test_a_trigger_before_the_wait_is_early() -> None:
    assert uses(TRIGGER, WAIT).is_early
    assert not uses(WAIT, TRIGGER).is_early


def test_a_kernel_that_does_not_wait_does_nothing_early() -> None:
    found = uses("%0 = tt.load %a : !tt.ptr<f32>", "tt.store %b, %0 : !tt.ptr<f32>")
    assert found == Uses(NONE, NONE, places(1), is_early=False)


def test_atomics_write() -> None:
    found = uses("%0 = tt.atomic_rmw add, acq_rel, gpu, %c, %n, %true : (!tt.ptr<i32>)", WAIT)
    assert found.written_early == found.written == places(2)


@pytest.mark.parametrize("waits_first", [False, True])
def test_a_block_has_waited_if_all_that_jump_there_have(waits_first: bool) -> None:
    found = uses(
        *[WAIT] * waits_first,
        "cf.cond_br %p, ^bb1, ^bb2(%a : !tt.ptr<f32>) loc(#loc1)",
        "^bb1:  // pred: ^bb0",
        WAIT,
        "cf.br ^bb3(%b : !tt.ptr<f32>)",
        "^bb2(%x: !tt.ptr<f32>):  // pred: ^bb0",
        "%0 = tt.load %x : !tt.ptr<f32>",
        "cf.br ^bb3(%a : !tt.ptr<f32>)",
        "^bb3(%y: !tt.ptr<f32>):  // 2 preds: ^bb1, ^bb2",
        "tt.store %y, %0 : !tt.ptr<f32>",
    )
    early = (NONE, NONE) if waits_first else (places(0), places(0, 1))
    assert found == Uses(*early, places(0, 1), is_early=False)


def test_a_wait_in_a_branch_does_not_count_behind_it() -> None:
    found = uses(
        "%r = scf.if %p -> (!tt.ptr<f32>) {",
        WAIT,
        "%0 = tt.load %a : !tt.ptr<f32>",
        "scf.yield %a : !tt.ptr<f32>",
        "} else {",
        "%1 = tt.load %b : !tt.ptr<f32>",
        "scf.yield %b : !tt.ptr<f32>",
        "} loc(#loc1)",
        "tt.store %r, %2 : !tt.ptr<f32>",
    )
    assert found == Uses(places(1), places(0, 1), places(0, 1), is_early=False)


def test_loops_and_reductions_pass_addresses_on() -> None:
    found = uses(
        WAIT,
        '%s = "tt.reduce"(%v) <{axis = 0 : i32}> ({',
        "^bb0(%l: f32, %r: f32):",
        "%sum = arith.addf %l, %r : f32",
        "tt.reduce.return %sum : f32",
        "}) : (tensor<8xf32>) -> f32",
        "%last:2 = scf.for %i = %c0 to %n step %c1 iter_args(%at = %a, %x = %s) -> (t) {",
        "tt.store %at, %x : !tt.ptr<f32>",
        "%next = tt.addptr %b, %i : !tt.ptr<f32>, i32",
        "scf.yield %next, %x : !tt.ptr<f32>, f32",
        "}",
        "tt.atomic_cas %last#0, %x, %x : !tt.ptr<f32>",
    )
    assert found == Uses(NONE, NONE, places(0, 1), is_early=False)


# -- the order of launches -------------------------------------------------------------------------

X, Y = Span(0, 0, 64), Span(0, 64, 128)
WRITER, EARLY, READER = 0, 1, 2
KERNELS = [
    ("writer", Uses(NONE, NONE, places(0), is_early=False)),
    ("early", Uses(NONE, NONE, places(0), is_early=True)),
    ("reader", Uses(places(1), NONE, places(0), is_early=False)),
]
OTHER = Launched(WRITER, (Y,))


@pytest.mark.parametrize(
    ("before", "is_right"),
    [
        ([Launched(WRITER, (X,)), OTHER], True),
        ([Launched(WRITER, (X,))], False),
        ([Launched(WRITER, (X,)), Launched(EARLY, (Y,))], False),
        ([Launched(WRITER, (X,)), OTHER, Launched(EARLY, (Y,)), Launched(EARLY, (Y,))], True),
        ([Launched(EARLY, (X,)), OTHER], True),
        ([Launched(WRITER, (X,)), Launched(None, (Y,))], True),
        ([Launched(None, (Y, X))], False),
        ([Launched(WRITER, (Span(1, 0, 64),))], True),
        ([Launched(WRITER, (Span(0, 60, 70),))], False),
        ([Launched(WRITER, (None,))], True),
    ],
)
def test_what_is_read_early_is_older_than_the_last_late_launch(
    before: list[Launched], is_right: bool
) -> None:
    found = broken([*before, Launched(READER, (None, X))], KERNELS)
    assert (found == []) == is_right
    assert all(line.startswith("reader reads its argument 1, by ") for line in found)


def test_a_kernel_writes_nothing_early() -> None:
    kernels = [("kernel", Uses(NONE, places(0), places(0), is_early=False))]
    order = [Launched(0, (X,))] * 2
    assert broken(order, kernels) == ["kernel writes its argument 0 before its wait"]
