"""`python -m minisgl` is the command `minisgl`."""

import sys

if __name__ == "__main__":  # and not in the process of a rank, which imports this module too
    from minisgl_cli.start import main

    sys.exit(main())
