"""python -m packtrain: the command line."""

import sys

from packtrain.cli import command

if __name__ == "__main__":
    sys.exit(command())
