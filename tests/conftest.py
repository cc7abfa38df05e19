"""Tests that press Ctrl-C start programs that heed it, also where a shell runs the tests in the
background, and has them and all that they start ignore it."""

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
