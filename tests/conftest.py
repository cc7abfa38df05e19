"""What the programs that tests start find in their surroundings.

They heed Ctrl-C, also where a shell runs the tests in the background, and has them and all that
they start ignore it. They ask their own terminal for its size: pytest-xdist tells its workers the
size of another one. And no test fails because its machine was busy.
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
