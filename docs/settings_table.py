"""Writes the table of docs/settings.md again, from the fields of `Settings`: `python docs/settings_table.py`."""

from pathlib import Path

from service.settings import Settings

PAGE = Path(__file__).parent / "settings.md"
HEAD = "| flag | default | |\n|---|---|---|\n"


def settings_table() -> str:
    """All settings as a Markdown table."""
    rows = []
    for name, field in Settings.model_fields.items():
        shown = str(field.default).lower() if isinstance(field.default, bool) else field.default
        default = "" if field.default in (None, {}) else f"`{shown}`"
        rows.append(f"| `--{name.replace('_', '-')}` | {default} | {field.description} |")
    return HEAD + "\n".join(rows)


if __name__ == "__main__":
    before, _, after = PAGE.read_text().partition(HEAD)
    PAGE.write_text(before + settings_table() + "\n\n" + after.partition("\n\n")[2])
