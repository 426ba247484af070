"""packtrain serve: answer clients of llama-server and OpenAI's API, and show a page to compare models."""

from importlib import import_module

from packtrain.cli import DONE, print_message
from packtrain.cli.event_output import TerminalEvents
from packtrain.workflows.model_server import ServeSettings, load_server, split_names
from packtrain.workflows.optional_deps import check_server

__all__ = ["ServeSettings", "run"]


def run(settings: ServeSettings) -> int:
    """Serve a model over HTTP until a signal; returns 0. Raises InputError, DoesNotFit."""
    check_server("packtrain serve")
    http_app = import_module("packtrain.serving.http_app")
    http_listener = import_module("packtrain.serving.http_listener")
    api_keys = settings.keys()
    sockets = http_listener.bind_sockets(split_names(settings.host), settings.port)
    server = load_server(settings, TerminalEvents())
    engine, urls = server.engine, ", ".join(map(http_listener.listening_socket.url_of, sockets))
    print_message(
        f"{server.name}: {len(engine.slots)} slots, a context of {engine.context.cache.num_cells:,} tokens"
        f"\nlistening on {urls}, stop with Ctrl-C"
    )
    app = http_app.app(server, api_keys, settings.ui)
    http_listener.listen(app, engine, sockets, print_message)
    return DONE
