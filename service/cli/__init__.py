"""FLOOR 5: the command `attend`, with a module for each subcommand. Only those that compute or serve import torch and FastAPI."""

import inspect
from typing import Annotated

try:
    import typer
except ModuleNotFoundError:  # the base install is for clients
    raise SystemExit("the command line needs the extra: pip install 'attend[serve]'") from None

from service import __version__

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
    from service.cli import check, config, demo, figure, heads, infer, keys, layers, openapi, serve, sessions

    app.command(epilog=serve.EPILOG)(serve.serve)
    app.command(epilog=demo.EPILOG)(demo.demo)
    app.command(epilog=infer.EPILOG)(infer.infer)
    app.command(epilog=heads.EPILOG)(heads.heads)
    app.command(epilog=figure.EPILOG)(figure.figure)
    app.add_typer(layers.group, name="layers")
    app.add_typer(sessions.group, name="sessions")
    app.add_typer(keys.group, name="keys")
    app.command(epilog=config.EPILOG)(config.config)
    app.command(epilog=check.EPILOG)(check.check)
    app.command(epilog=openapi.EPILOG)(openapi.openapi)
    groups = (app, layers.group, sessions.group, keys.group)
    for command in (command for group in groups for command in group.registered_commands):
        command.help = _paragraphs(inspect.getdoc(command.callback) or "")
    app(prog_name="attend")  # for completion, also under `python -m service`


def _paragraphs(text: str) -> str:
    """The text with one line for each paragraph: rich keeps line breaks, and the terminal has other widths than the source."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


@app.command(epilog="Example: attend version --json")
def version(as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False) -> None:
    """Print the version."""
    from service.cli.terminal import print_result

    print_result({"version": __version__}, __version__, as_json)


__all__ = ["app", "main"]
