"""What Python itself does beside the steps."""

from __future__ import annotations

import gc
import sys

_MOST_WAIT_S = 0.0005  # by default ten times as long, which is a step


def favour_steps() -> None:
    """Keep Python from holding up the steps of an engine that has started, for the whole process:
    the garbage collector scans no long-lived objects, and a thread beside the event loop, such as
    one that reads an adapter, lets go of the lock soon."""
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(_MOST_WAIT_S)
