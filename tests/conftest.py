"""Normalizes the environment of the tests and of the programs that they start.

Ctrl-C works also where the shell runs the tests in the background and has them ignore it. Programs
ask their own terminal for its size, since pytest-xdist exports the size of another one. Hypothesis
has no deadline: no test fails because its machine was busy.

torch has one thread: with models this small a second one only waits, and takes a core for it.
"""

import os
import signal

import hypothesis

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)

os.environ["OMP_NUM_THREADS"] = "1"  # torch is imported later

hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")
