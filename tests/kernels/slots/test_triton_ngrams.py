"""Drafts from n-grams: the kernel against its reference, on a GPU or in the interpreter."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
pytest.importorskip("triton", reason="Triton is not installed: scripts/tools/try_interpreter.sh")

from support.ngrams import settled_step

from minisgl.kernels.slots import ngram_kernel, ngrams

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CPU = torch.device("cpu")


@pytest.mark.parametrize(("longest", "block"), [(40, 4096), (40, 16), (5000, 4096)])
@pytest.mark.parametrize("run", [1, 4])
@pytest.mark.parametrize("num_singles", [0, 3])
def test_the_kernel_finds_the_drafts_of_the_reference(
    run: int, num_singles: int, longest: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ngram_kernel, "_PLACES_AT_ONCE", block)
    ours, theirs = (settled_step(run, num_singles, longest, device) for device in (DEVICE, CPU))
    ngram_kernel.draft_ngrams(*ours, ngrams.LEAST_MATCH, ngrams.MOST_MATCH)
    ngrams.draft_ngrams(*theirs)
    scratch = theirs[1].scratch_slot
    assert torch.equal(ours[1].drafts[:scratch].cpu(), theirs[1].drafts[:scratch])
    for slot, last in enumerate(theirs[1].lengths[:scratch].tolist()):
        assert torch.equal(ours[0][slot, : last + 1].cpu(), theirs[0][slot, : last + 1])
    found = theirs[1].drafts[:scratch]
    assert (found >= 0).any() and (found < 0).any()
