"""Has kernels computed as on a GPU where Triton's interpreter runs them."""

from importlib.util import find_spec

import pytest
import torch
from support import interpreter


@pytest.fixture(autouse=True)
def _mended_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec("triton") and not torch.cuda.is_available():
        interpreter.mend(monkeypatch.setattr)
