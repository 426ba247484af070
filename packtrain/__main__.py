"""python -m packtrain: the command line."""

import sys

from packtrain_command import main

if __name__ == "__main__":
    sys.exit(main())
