"""What Python itself does beside the steps."""

from __future__ import annotations

import gc
import sys

from minisgl.interpreter import favour_steps


def test_the_collector_scans_less_and_threads_let_go_of_the_lock_within_a_step() -> None:
    before = sys.getswitchinterval()
    try:
        favour_steps()
        assert gc.get_freeze_count() > 1000 and sys.getswitchinterval() < 0.001
    finally:
        sys.setswitchinterval(before)
        gc.unfreeze()
