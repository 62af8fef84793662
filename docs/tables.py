"""Writes the tables of docs/settings.md and docs/check.md again, from the fields they describe: `python docs/tables.py`."""

from pathlib import Path

from attend.check.convention import option_table
from attend.settings import Settings

DOCS = Path(__file__).parent
SETTINGS = "| flag | default | |\n|---|---|---|\n"
OPTIONS = "| name | values | |\n|---|---|---|\n"


def tables() -> dict[str, tuple[str, str]]:
    """Page -> the head of its table and its rows, in Markdown."""
    return {"settings.md": (SETTINGS, _settings()), "check.md": (OPTIONS, _options())}


def _settings() -> str:
    rows = []
    for name, field in Settings.model_fields.items():
        shown = str(field.default).lower() if isinstance(field.default, bool) else field.default
        default = "" if field.default in (None, {}) else f"`{shown}`"
        rows.append(f"| `--{name.replace('_', '-')}` | {default} | {field.description} |")
    return "\n".join(rows)


def _options() -> str:
    """The conventions that `attend check --with` takes."""
    rows = []
    for name, values, meaning in option_table():
        shown = ", ".join(value if " " in value else f"`{value}`" for value in values)
        rows.append(f"| `{name}` | {shown} | {meaning} |")
    return "\n".join(rows)


if __name__ == "__main__":
    for page, (head, rows) in tables().items():
        before, _, after = (DOCS / page).read_text().partition(head)
        (DOCS / page).write_text((before + head + rows + "\n\n" + after.partition("\n\n")[2]).rstrip() + "\n")
