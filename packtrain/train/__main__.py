"""The child of `budget.in_child`: a search on standard input, pickled, its answer on standard output."""

import pickle
import signal
import sys

from packtrain.train.search import search


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever asked ends this process
    asked = pickle.load(sys.stdin.buffer)
    sys.stdout.buffer.write(pickle.dumps(search(*asked)))


if __name__ == "__main__":
    main()
