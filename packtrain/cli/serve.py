"""packtrain serve: answer clients of llama-server and OpenAI's API, and show a page to compare models."""

from importlib import import_module

from packtrain.cli import DONE, say
from packtrain.cli.event_output import Shown
from packtrain.workflows.model_server import Serve, load
from packtrain.workflows.optional_deps import check_server

__all__ = ["Serve", "run"]


def run(settings: Serve) -> int:
    """Serve until a signal. Raises InputError, DoesNotFit."""
    check_server("packtrain serve")
    app = import_module("packtrain.serving.http_app")
    listen = import_module("packtrain.serving.http_listener")
    keys = settings.keys()
    sock = listen.bound(settings.host, settings.port)
    server = load(settings, Shown())
    host, port = sock.getsockname()[:2]
    engine = server.engine
    say(
        f"{server.name}: {len(engine.slots)} slots, a context of {engine.context.cache.cells:,} tokens"
        f"\nlistening on http://{f'[{host}]' if ':' in host else host}:{port}, stop with Ctrl-C"
    )
    listen.listen(app.app(server, keys, settings.ui), engine, sock, say)
    return DONE
