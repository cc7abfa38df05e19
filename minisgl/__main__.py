"""`python -m minisgl` is the command `minisgl`."""

import sys

from minisgl_cli.main import main

if __name__ == "__main__":
    sys.exit(main())
