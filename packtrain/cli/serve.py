"""packtrain serve: answer clients of llama-server and OpenAI's API, and show a page to compare models."""

from importlib import import_module

from packtrain.cli import DONE, print_message
from packtrain.cli.event_output import TerminalEvents
from packtrain.workflows.model_server import ServeSettings, load_server
from packtrain.workflows.optional_deps import check_server

__all__ = ["ServeSettings", "run"]


def run(settings: ServeSettings) -> int:
    """Serve until a signal. Raises InputError, DoesNotFit."""
    check_server("packtrain serve")
    http_app = import_module("packtrain.serving.http_app")
    http_listener = import_module("packtrain.serving.http_listener")
    api_keys = settings.keys()
    sock = http_listener.bind_socket(settings.host, settings.port)
    server = load_server(settings, TerminalEvents())
    engine, url = server.engine, http_listener.listening_socket.url_of(sock)
    print_message(
        f"{server.name}: {len(engine.slots)} slots, a context of {engine.context.cache.num_cells:,} tokens"
        f"\nlistening on {url}, stop with Ctrl-C"
    )
    http_listener.listen(http_app.app(server, api_keys, settings.ui), engine, sock, print_message)
    return DONE
