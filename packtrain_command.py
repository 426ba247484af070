"""The command `packtrain`, outside the package: Ctrl-C while the package is still being imported ends it quietly."""

import signal


def main() -> int:
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    from packtrain.cli import command

    signal.signal(signal.SIGINT, before)
    return command()
