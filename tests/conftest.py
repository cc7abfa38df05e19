"""Normalizes the environment of the programs that tests start.

Ctrl-C works also where the shell runs the tests in the background and has them ignore it. Programs
ask their own terminal for its size, since pytest-xdist exports the size of another one. Hypothesis
has no deadline: no test fails because its machine was busy.
"""

import os
import signal

import hypothesis

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)

hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")
