"""FLOOR 5: the command `attend`. Only the subcommands that compute or serve import torch and FastAPI.

serve.py                            `attend serve`: checks the settings, opens the socket
processes.py, server.py, logs.py    one server, or a supervisor and workers; the server of one process; its log
request_file.py, metric_tables.py   `attend infer`, `heads` and `figure`: one request in a file
check.py, server_check.py           `attend check`: an attention implementation, or the service, against the reference
layers.py, sessions.py, keys.py     groups of commands
demo.py, describe.py                `attend demo`; `attend config`, `openapi` and `version`
terminal.py                         flags, messages and exit codes that commands share
clients.py                          the service that a command uses: a running server, or one that it starts
"""

import inspect

try:
    import typer
except ModuleNotFoundError:  # the base install is for clients
    raise SystemExit("the command line needs the extra: pip install 'attend[serve]'") from None

HELP = """Multi-head attention as a service: run a server, send requests, show heads, check implementations.

Exit codes: 0 success; 1 refused, failed or wrong; 2 wrong usage."""
EPILOG = """Examples: attend demo

attend serve --port 8000

attend --install-completion"""

app = typer.Typer(
    help=HELP, epilog=EPILOG, no_args_is_help=True, add_completion=True, pretty_exceptions_enable=False, rich_markup_mode="rich"
)


def main() -> None:
    """The entry point."""
    from service.cli import check, demo, describe, keys, layers, request_file, serve, sessions

    app.command(epilog=serve.EPILOG)(serve.serve)
    app.command(epilog=demo.EPILOG)(demo.demo)
    app.command(epilog=request_file.INFER_EPILOG)(request_file.infer)
    app.command(epilog=request_file.HEADS_EPILOG)(request_file.heads)
    app.command(epilog=request_file.FIGURE_EPILOG)(request_file.figure)
    app.add_typer(layers.group, name="layers")
    app.add_typer(sessions.group, name="sessions")
    app.add_typer(keys.group, name="keys")
    app.command(epilog=describe.CONFIG_EPILOG)(describe.config)
    app.command(epilog=check.EPILOG)(check.check)
    app.command(epilog=describe.OPENAPI_EPILOG)(describe.openapi)
    app.command(epilog="Example: attend version --json")(describe.version)
    groups = (app, layers.group, sessions.group, keys.group)
    for command in (command for group in groups for command in group.registered_commands):
        command.help = _paragraphs(inspect.getdoc(command.callback) or "")
    app(prog_name="attend")  # for completion, also under `python -m service`


def _paragraphs(text: str) -> str:
    """The text with one line for each paragraph: rich keeps line breaks, and the terminal has other widths than the source."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


__all__ = ["app", "main"]
