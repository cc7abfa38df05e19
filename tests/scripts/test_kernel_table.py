"""The table of compiled kernels: what it says, what a change of it is called, and that no kernel of
the package is missing."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch
from kernel_table import (
    KEPT,
    Compiled,
    Key,
    changes,
    code_digest,
    figures_of,
    format_table,
    launched_kernels,
    new_spills,
    parse_table,
)
from pretended_gpu import GPU, MetaAsGPU, PretendedLanes

NORM = Key("minisgl.norm", "bf16 rows=2 #12", "sm_90")
HEADS = Key("minisgl.heads", "bf16 #34", "sm_80")
PLAIN = Compiled(registers=64, spilled=0, shared=128, code="abc")
SPILLED = Compiled(registers=255, spilled=24, shared=128, code="def")


def test_a_table_is_read_as_it_was_written() -> None:
    table = {NORM: PLAIN, HEADS: SPILLED}
    assert parse_table(format_table(table, "3.7.1")) == (table, "3.7.1")


def test_a_table_has_a_line_for_each_kernel_in_one_order() -> None:
    one = format_table({NORM: PLAIN, HEADS: SPILLED}, "3.7.1")
    assert one == format_table({HEADS: SPILLED, NORM: PLAIN}, "3.7.1")
    assert "minisgl.heads sm_80 255 24 128 def bf16 #34\n" in one


def test_equal_tables_have_no_changes() -> None:
    assert changes({NORM: PLAIN}, {NORM: PLAIN}) == []


def test_a_change_says_what_changed() -> None:
    assert changes({NORM: PLAIN, HEADS: PLAIN}, {NORM: SPILLED, HEADS: PLAIN}) == [
        "minisgl.norm sm_90 bf16 rows=2 #12: registers 64 -> 255, spilled 0 -> 24, "
        "machine code differs"
    ]


def test_other_machine_code_with_the_same_figures_is_a_change() -> None:
    other = Compiled(registers=64, spilled=0, shared=128, code="abd")
    assert changes({NORM: PLAIN}, {NORM: other}) == [f"{NORM}: machine code differs"]


def test_kernels_that_come_and_go_are_changes() -> None:
    assert changes({NORM: PLAIN}, {HEADS: SPILLED}) == [
        f"{HEADS}: new, registers 255, spilled 24, shared 128",
        f"{NORM}: gone",
    ]


def test_a_kernel_that_spills_more_or_is_new_and_spills_is_told() -> None:
    assert new_spills({NORM: PLAIN}, {NORM: SPILLED}, ()) == [f"{NORM}: spilled 0 -> 24"]
    assert new_spills({}, {NORM: SPILLED}, ()) == [f"{NORM}: spilled 0 -> 24"]


def test_spills_that_were_there_or_are_allowed_by_name_are_not_new() -> None:
    assert new_spills({NORM: SPILLED}, {NORM: SPILLED}, ()) == []
    assert new_spills({NORM: SPILLED}, {NORM: PLAIN}, ()) == []
    assert new_spills({}, {NORM: SPILLED}, ["norm"]) == []
    assert new_spills({}, {NORM: SPILLED}, ["heads"]) != []


def test_the_figures_are_those_of_the_compilers_log() -> None:
    log = """ptxas info    : Compiling entry function 'norm' for 'sm_90a'
ptxas info    : Function properties for norm
    16 bytes stack frame, 8 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 16 bytes cumulative stack size
"""
    assert figures_of(log) == (40, 24)


# -- machine code ----------------------------------------------------------------------------------

_LOADED, _DEBUG = 6, 0  # flags of sections


def elf(*sections: tuple[str, int, bytes]) -> bytes:
    """A file with these sections: (name, flags, content)."""
    names = b"\0" + b"".join(name.encode() + b"\0" for name, _, _ in sections) + b"names\0"
    contents = [content for _, _, content in sections] + [names]
    all_names = [name for name, _, _ in sections] + ["names"]
    all_flags = [flags for _, flags, _ in sections] + [_DEBUG]
    body, headers = b"", bytes(64)
    for name, flags, content in zip(all_names, all_flags, contents, strict=True):
        kind = 3 if name == "names" else 1
        at = names.index(b"\0" + name.encode() + b"\0") + 1
        headers += struct.pack(
            "<IIQQQQIIQQ", at, kind, flags, 0, 64 + len(body), len(content), 0, 0, 1, 0
        )
        body += content
    start, count = 64 + len(body), len(contents) + 1
    header = bytes(40) + struct.pack("<Q", start) + bytes(10)
    return header + struct.pack("<HHH", 64, count, count - 1) + body + headers


def test_the_digest_is_that_of_what_is_loaded_onto_the_device() -> None:
    code, constants, debug = (
        (".text.norm", _LOADED, b"code"),
        (".nv.constant4", _LOADED, b"one"),
        (".debug_frame", _DEBUG, b"line 7"),
    )
    whole = code_digest(elf(code, constants, debug))
    assert code_digest(elf(code, constants, (".debug_frame", _DEBUG, b"line 812"))) == whole
    assert code_digest(elf((".text.norm", _LOADED, b"edoc"), constants, debug)) != whole
    assert code_digest(elf(code, (".nv.constant4", _LOADED, b"two"), debug)) != whole


# -- the kernels of the package --------------------------------------------------------------------

_KERNELS = """
import triton

@triton.jit
def helper(x):
    return x

@triton.jit(do_not_specialize=["x"])
def shown(x):
    helper(x)

def launch(x):
    shown[(1,)](x)

@triton.jit
def hidden(x):
    helper(x)
"""
_LAUNCH = """
def launch(x):
    from package.kernels import hidden as kernel

    kernel[(1,)](x)
    x.views[0](x)
"""


def test_kernels_are_found_by_their_launches(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "kernels.py").write_text(_KERNELS)
    assert launched_kernels(package) == {"package.kernels.shown"}
    (package / "launch.py").write_text(_LAUNCH)
    assert launched_kernels(package) == {"package.kernels.shown", "package.kernels.hidden"}


def test_every_kernel_that_the_package_launches_is_kept() -> None:
    table, _ = parse_table(KEPT.read_text(encoding="utf-8"))
    assert {key.kernel for key in table} == launched_kernels()


def test_the_kept_table_is_as_it_is_written() -> None:
    text = KEPT.read_text(encoding="utf-8")
    assert format_table(*parse_table(text)) == text


# -- the pretended GPU -----------------------------------------------------------------------------


def test_tensors_of_the_pretended_gpu_say_that_they_are_there() -> None:
    with MetaAsGPU():
        x = torch.empty(4, 8, device=GPU)
        with GPU:
            y = torch.zeros(4, 8)
        moved = torch.ones(4, 8).to(GPU, non_blocking=True)
        assert x.device == y.device == moved.device == (x + y).device == GPU
        assert x.is_cuda and not torch.ones(4).is_cuda
        assert x[2:].data_ptr() == 2 * 8 * 4  # by which Triton knows what is aligned
        with pytest.raises(RuntimeError, match="meta"):
            x.tolist()


def test_pretended_lanes_upload_to_the_pretended_gpu() -> None:
    with MetaAsGPU():
        first, second = PretendedLanes(GPU).upload([[1, 2], [3]])
        assert first.device == second.device == GPU
        assert (len(first), len(second)) == (2, 1)
