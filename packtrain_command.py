"""The command `packtrain`, outside the package: Ctrl-C while the package is still being imported ends it quietly."""

import signal


def main() -> int:
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:  # a shell's job in the background ignores it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from packtrain.cli.main import command

    signal.signal(signal.SIGINT, before)
    return command()
