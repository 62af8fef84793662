"""FLOOR 5: the command `attend`. Each command is a file of its own; torch and fastapi are loaded only by those that need them."""

try:
    import typer
except ModuleNotFoundError:  # the base install is for clients
    raise SystemExit("the command line needs the extra: pip install 'attend[serve]'") from None

from service import __version__

app = typer.Typer(no_args_is_help=True, add_completion=True, pretty_exceptions_enable=False, rich_markup_mode="rich")


def main() -> None:
    """The entry point."""
    from service.cli import bench, check, config, demo, figure, heads, infer, keys, layers, openapi, serve

    for command in (serve, demo, infer, heads, figure, layers, keys, config, check, bench, openapi):
        command.install(app)
    app()


@app.command(epilog="Example: attend version")
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


__all__ = ["app", "main"]
