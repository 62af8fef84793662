"""`attend bench`: what a server does per second, where the time goes, and how near that is to the same work without a server."""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated
from urllib.parse import urlsplit

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import track
from rich.table import Table

from service.cli.child import NotStarted
from service.cli.exits import complain, reported
from service.cli.flags import AsJson
from service.cli.load import MEDIA, PHASES
from service.cli.measurements import BODY_SIZES, CASES, KB, MB, Row, measure_growth, measure_health, measure_throughput, relate
from service.cli.overhead import measure_client
from service.cli.stage import Stage, find_stage

SIZES = ",".join(CASES)
WIDTH = 200  # of a table at most, whatever the terminal's: a figure that is cut short is none
EPILOG = """Examples: attend bench --sizes small --connections 1,32

attend bench --url http://127.0.0.1:8000 --forms json --json

attend bench --growth --health --client --markdown"""
Url = Annotated[str | None, typer.Option(help="A running server; one is started if not given.", show_default=False)]
Sizes = Annotated[str, typer.Option(help="Of the tensors, comma-separated.")]
Forms = Annotated[str | None, typer.Option(help=f"Of body and reply, among {','.join(MEDIA)}; all of them, but base64 not for --growth.")]
Connections = Annotated[str | None, typer.Option(help="Comma-separated; 1,32 for small, 1,4 for mid, 1 for large if not given.")]
Seconds = Annotated[float, typer.Option(min=0.01, help="For each row.")]
Growth = Annotated[bool, typer.Option("--growth", help="Instead: time per byte and peak memory for bodies from 1 KB to 100 MB.")]
Largest = Annotated[float, typer.Option(min=0.001, help="Largest body of --growth, in MB.")]
Health = Annotated[bool, typer.Option("--health", help="Instead: how long GET /health/live takes while 8 MB JSON bodies are served.")]
Client = Annotated[bool, typer.Option("--client", help="Instead: a call through service.client beside the same bytes through bare httpx.")]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print the table as the README has it.")]
TIMES = (("p50 ms", "p50_ms", 1), ("p99 ms", "p99_ms", 1))
SPLIT = tuple((f"{phase} ms", f"{phase}_ms", 1) for phase in PHASES)
COLUMNS: dict[str, Sequence[tuple[str, str, int]]] = {  # header, key, unit
    "throughput": (
        *(("size", "size", 1), ("form", "form", 1), ("connections", "connections", 1), ("req/s", "rate", 1)),
        *(*TIMES, *SPLIT, ("floor/s", "floor", 1), ("of floor", "of_floor", 1), ("bad", "bad", 1)),
    ),
    "growth": (
        *(("form", "form", 1), ("body kB", "bytes", KB), ("shape", "shape", 1), ("p50 ms", "p50_ms", 1), ("ns/byte", "ns_per_byte", 1)),
        *(("of 1 MB's", "to_1mb", 1), *SPLIT, ("peak MB", "peak_bytes", MB), ("of body", "peak_to_body", 1), ("bad", "bad", 1)),
    ),
    "health": (
        *(("checks", "requests", 1), *TIMES, ("max ms", "max_ms", 1), ("bad", "bad", 1), ("body MB", "load_bytes", MB)),
        *(("connections", "load_connections", 1), ("bodies/s", "load_rate", 1), ("bad bodies", "load_bad", 1)),
    ),
    "client": (
        *(("size", "size", 1), ("requests", "requests", 1), ("httpx ms", "httpx_ms", 1), ("client ms", "client_ms", 1)),
        *(("added ms", "added_ms", 1), ("of httpx", "to_httpx", 1)),
    ),
}


def install(app: typer.Typer) -> None:
    """Adds the command."""
    app.command(epilog=EPILOG)(bench)


def bench(
    url: Url = None,
    sizes: Sizes = SIZES,
    forms: Forms = None,
    connections: Connections = None,
    seconds: Seconds = 4.0,
    growth: Growth = False,
    largest: Largest = 100.0,
    health: Health = False,
    client: Client = False,
    as_json: AsJson = False,
    markdown: Markdown = False,
) -> None:
    """Measure throughput, latency, where the time goes, and the floor: the same work in one process without HTTP.

    decode, queue, compute and encode are means in milliseconds, as the server tells them. Exit code 1 where a reply was bad.
    """
    if url is not None and urlsplit(url).scheme != "http":
        raise typer.BadParameter(f"expected http://…, got {url}", param_hint="--url")
    cases = [CASES[name] for name in _listed("--sizes", sizes, CASES)]
    chosen = _listed("--forms", forms or ",".join(MEDIA), MEDIA)
    counts = [int(text) for text in _listed("--connections", connections, map(str, range(1, 1025)))]
    bodies = [size for size in BODY_SIZES if size <= largest * MB]
    rows: dict[str, list[Row]] = {}
    with reported("bench"), _started():
        stage = find_stage(url)
        if growth:
            plain = [form for form in chosen if forms or form != "base64"]
            rows["growth"] = relate(_tracked(measure_growth(stage.opened, plain, bodies, seconds), len(plain) * len(bodies)))
        if health:
            rows["health"] = _tracked(measure_health(stage.opened, seconds), 1)
        if client:
            rows["client"] = _tracked(measure_client(stage.opened, cases, seconds), len(cases))
        if not rows:
            total = len(chosen) * sum(len(counts or case.connections) for case in cases)
            with stage.bench() as floor:
                measured = measure_throughput(stage.opened, cases, chosen, counts, seconds, floor, stage.device)
                rows["throughput"] = _tracked(measured, total)
    _show(rows, stage, as_json, markdown)
    _end(rows)


def _listed(flag: str, text: str | None, known: Iterable[str]) -> list[str]:
    """The names between the commas; none where nothing was said."""
    names, known = [] if text is None else [name.strip() for name in text.split(",")], list(known)
    for name in names:
        if name not in known:
            expected = ", ".join(known) if len(known) < 10 else f"numbers from {known[0]} to {known[-1]}"
            raise typer.BadParameter(f"expected some of {expected}, got {name!r}", param_hint=flag)
    return names


@contextmanager
def _started() -> Iterator[None]:
    """Ends the command where the server it needs does not start."""
    try:
        yield
    except NotStarted as error:
        complain("bench", str(error))
        raise typer.Exit(1) from None


def _tracked(rows: Iterator[Row], total: int) -> list[Row]:
    """All rows. The bar moves between them alone, so that drawing it is not measured."""
    console = Console(stderr=True)
    return list(track(rows, "measuring", total, console=console, transient=True, auto_refresh=False, disable=not console.is_terminal))


def _show(rows: dict[str, list[Row]], stage: Stage, as_json: bool, markdown: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"about": stage.about(), **rows}))
        return
    console = Console(highlight=False, width=WIDTH)
    console.print(str(stage), soft_wrap=True, markup=False)
    for kind, measured in rows.items():
        titles = [title for title, _, _ in COLUMNS[kind]]
        lines = [[_cell(row, key, unit) for _, key, unit in COLUMNS[kind]] for row in measured]
        if markdown:
            lines = [titles, ["---"] * len(titles), *lines]
            typer.echo("\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines))
            continue
        table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
        for title in titles:
            table.add_column(title.replace(" ", "\n"), no_wrap=True, justify="left" if title in ("size", "form") else "right")
        for row, line in zip(measured, lines, strict=True):
            table.add_row(*line, style="bold red" if _bad(row) else None)
        console.print(table)


def _cell(row: Row, key: str, unit: int) -> str:
    value = row[key]
    if value is None or isinstance(value, str):
        return value or "-"
    if isinstance(value, list):
        return "x".join(map(str, value))
    if isinstance(value, int) and unit == 1:
        return f"**{value:,}**" if key.endswith("bad") and value else f"{value:,}"
    value /= unit
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value >= 1 else f"{value:.3f}"


def _bad(row: Row) -> int:
    return int(row["bad"]) + int(row.get("load_bad", 0))


def _end(rows: dict[str, list[Row]]) -> None:
    """Exit code 1, and what the first reply said, where a reply was bad."""
    bad = [row for measured in rows.values() for row in measured if _bad(row)]
    if bad:
        requests = sum(row["requests"] + row.get("load_requests", 0) for measured in rows.values() for row in measured)
        complain("bench", f"{sum(map(_bad, bad))} of {requests} requests were not answered as they should be; the first one:")
        typer.echo(f"  {bad[0]['failure'] or bad[0]['load_failure']}", err=True)
        raise typer.Exit(1)
