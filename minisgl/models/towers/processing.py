"""The process in which images become what a tower takes (images/processor.py)."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from minisgl.errors import InvalidRequestError, UnsupportedModelError
from minisgl.images.checkpoint import CheckpointProcessor
from minisgl.images.decoding import decode
from minisgl.images.limits import TooManyImagesError
from minisgl.images.picture import BFLOAT16
from minisgl.images.processor import Answer, Array, Known, Made, Refused, Task
from minisgl.subprocesses import MEMORY_BYTES, TIME_IS_UP, serve_tasks

MAX_REASON_CHARS = 300
WAIT_FACTOR = 6  # so much longer an image may take where processors are busy
TASKS = msgspec.msgpack.Decoder(Task)


def serve(folder: str, seconds: float) -> NoReturn:
    """Run the process: answer tasks until its parent has gone."""
    tasks, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries may print
    # A pool of threads would not survive the fork, nor keep to the limit of memory.
    torch.set_num_threads(1)
    loaded = load(Path(folder))

    def ended(number: int) -> bytes:
        if number in TIME_IS_UP:
            return _encoded(
                Refused(f"takes longer than {seconds:g} s to process; send a smaller one.")
            )
        return _encoded(Refused("cannot be decoded; send it in another format."))

    serve_tasks(
        tasks,
        answers,
        lambda task: answer(loaded, task),
        lambda number: None if number == signal.SIGKILL else ended(number),
        {signal.ITIMER_PROF: seconds, signal.ITIMER_REAL: WAIT_FACTOR * seconds},
    )


def load(folder: Path) -> CheckpointProcessor | Refused:
    """The processor, and all that it loads when it is used."""
    try:
        return CheckpointProcessor(folder)
    except UnsupportedModelError as error:
        reason = str(error)
    except Exception as error:  # broken files, and packages that are missing, raise many types
        reason = _about_torchvision(error) or str(error) or type(error).__name__
    return Refused(reason[:MAX_REASON_CHARS], is_model=True)


def _about_torchvision(error: BaseException | None) -> str | None:
    """What an error says of torchvision, which transformers uses wherever it is installed."""
    while error is not None and "torchvision" not in str(error).lower():
        error = error.__cause__ or error.__context__
    if error is None:
        return None
    if importlib.util.find_spec("torchvision") is None:
        return "its processor needs the package torchvision, which is not installed."
    return "torchvision is of another release than torch, and cannot be used; install that of it."


def answer(loaded: CheckpointProcessor | Refused, task: bytes) -> bytes:
    """What the process answers to a task."""
    return _encoded(_answer(loaded, TASKS.decode(task)))


def _answer(loaded: CheckpointProcessor | Refused, task: Task) -> Answer:
    if isinstance(loaded, Refused):
        return loaded
    if not task.data:
        return Known(loaded.placeholder)
    try:
        image, num_pixels = decode(task.data, task.max_pixels, is_low=task.is_low)
        made = loaded.process(image, is_only=task.is_only)
    except InvalidRequestError as error:
        is_rest = isinstance(error, TooManyImagesError)
        return Refused(str(error.args[0]).removeprefix("an image "), is_rest=is_rest)
    except Exception as error:  # of code of transformers, for a shape that the model does not take
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):  # torch says it
            most = f"{MEMORY_BYTES >> 20} MiB of memory"
            return Refused(f"takes more than {most} to process; send a smaller one.")
        return Refused(f"is refused by the model's processor: {str(error)[:MAX_REASON_CHARS]}")
    inputs = {name: _plain(_rounded(value, task.dtype)) for name, value in made.inputs.items()}
    return Made(inputs, made.token_ids, _plain(made.is_row), made.grid, num_pixels)


def _encoded(answer: Answer) -> bytes:
    return msgspec.msgpack.encode(answer)


def _rounded(array: NDArray[Any], dtype: str) -> NDArray[Any]:
    """The array; of numbers that are no integers, in the dtype to which the tower would round them:
    so half as many bytes are on their way."""
    if array.dtype.kind != "f" or dtype == "float32":
        return array
    values = torch.from_numpy(np.ascontiguousarray(array)).to(getattr(torch, dtype))
    return values.view(torch.int16).numpy().view(BFLOAT16 if dtype == "bfloat16" else dtype)


def _plain(array: NDArray[Any]) -> Array:
    array = np.ascontiguousarray(array)
    return Array(array.dtype.str, array.shape, array.reshape(-1).view(np.uint8).data)
