"""TIER 5: the command `attend`. Only the subcommands that compute or serve import torch and FastAPI.

serve.py                            `attend serve`: checks the settings, opens the socket
processes.py, server.py             one server, or a supervisor and workers; the server of one process
signals.py, logs.py                 what signals do to it, and its log
request_file.py, metric_tables.py   `attend infer`, `heads` and `figure`: one request in a file
model_heads.py                      `attend heads` of a folder: the effect of each head on the answer of a model
check.py, server_check.py           `attend check`: an attention implementation, or the service, against the reference
capture.py                          `attend capture`: a model of transformers, with the inputs of its layers
model_folder.py                     the model and tokenizer in a folder or in a cache, for `heads` and `capture`
layers.py, keys.py                  groups of commands
families.py                         `attend families`: the families of models, their formulas and kernels
demo.py, describe.py                `attend demo`; `attend config`, `openapi` and `version`
terminal.py                         flags, messages and exit codes that commands share
clients.py                          the service that a command uses: a running server, or one that it starts
"""

import sys
from typing import Annotated

try:
    import typer
except ModuleNotFoundError:  # the base install is for clients
    raise SystemExit("the command line needs the extra: pip install 'attend-service[serve]'") from None

from attend.version import __version__

HELP = """Multi-head attention as a service: run a server, send requests, show heads, check implementations.

Exit codes: 0 success; 1 the command failed, or found a difference; 2 wrong usage; 3 attend check
agrees, but did not try all cases; 130 interrupted."""
EPILOG = """\b
Examples:
  attend demo
  attend serve --port 8000
  attend --install-completion"""
MAX_COLUMNS = 120  # of the help
INTERRUPTED = 130  # exit code after Ctrl-C: 128 + SIGINT

app = typer.Typer(
    help=HELP,
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # tables of rich cut the longer flags in a terminal of 80 columns
    context_settings={"max_content_width": MAX_COLUMNS},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None: ...


def main() -> None:
    """The entry point. Ctrl-C ends it without a traceback, also while modules are imported."""
    try:
        _add_commands()
        app(prog_name="attend")  # for completion, also under `python -m attend`
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _add_commands() -> None:
    from attend.cli import capture, check, demo, describe, families, keys, layers, request_file, serve

    app.command(epilog=serve.EPILOG)(serve.serve)
    app.command(epilog=demo.EPILOG)(demo.demo)
    app.command(epilog=request_file.INFER_EPILOG)(request_file.infer)
    app.command(epilog=request_file.HEADS_EPILOG)(request_file.heads)
    app.command(epilog=request_file.FIGURE_EPILOG)(request_file.figure)
    app.command(epilog=capture.EPILOG)(capture.capture)
    app.add_typer(layers.group, name="layers")
    app.command(epilog=families.EPILOG)(families.families)
    app.add_typer(keys.group, name="keys")
    app.command(epilog=describe.CONFIG_EPILOG)(describe.config)
    app.command(epilog=check.EPILOG)(check.check)
    app.command(epilog=describe.OPENAPI_EPILOG)(describe.openapi)
    app.command(epilog="\b\nExample:\n  attend version --json")(describe.version)


__all__ = ["app", "main"]
