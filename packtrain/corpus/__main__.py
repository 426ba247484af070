"""python -m packtrain.corpus: what the child of prepare does.

A line of JSON on stdin says what to build and where; each line on stdout is ["say", sentence] or ["error", sentence].
"""

import json
import sys
from pathlib import Path

from packtrain.corpus.build import build
from packtrain.corpus.documents import Text
from packtrain.errors import InputError


def main() -> None:
    def send(kind: str, sentence: str) -> None:
        print(json.dumps([kind, sentence]), flush=True)

    request = json.loads(sys.stdin.readline())
    folder, vocab = Path(request.pop("folder")), request.pop("vocab")
    text = Text(data=Path(request.pop("data")), vocab=Path(vocab) if vocab else None, **request)
    try:
        build(text, folder, lambda sentence: send("say", sentence))
    except InputError as error:
        send("error", str(error))
    except OSError as error:
        send("error", f"{error.filename or folder}: {(error.strerror or str(error)).lower()}")


if __name__ == "__main__":
    main()
