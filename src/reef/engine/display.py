"""How handles and statistics are displayed: counts, sizes, and tables for notebooks.

All text is HTML-escaped, since names of columns and directories come from users.
"""

from collections.abc import Mapping
from html import escape

import pyarrow as pa

COLUMNS_SHOWN = 40


UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")


CELL = "text-align: left; padding: 2px 10px"


def human_bytes(count: int) -> str:
    """Format a number of bytes: 512 B, 9.7 KiB, 1.0 GiB."""
    if count < 1024:
        return f"{count} B"
    step = next((n for n in range(1, len(UNITS)) if count / 1024**n < 1023.95), len(UNITS))
    return f"{count / 1024**step:,.1f} {UNITS[step - 1]}"


def human_count(count: int, one: str, many: str | None = None) -> str:
    """Format a count with its noun: 1 row, 2,500 rows."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def columns_line(schema: pa.Schema) -> str:
    """Format the columns and their types as one line."""
    shown = [f"{field.name}: {field.type}" for field in list(schema)[:COLUMNS_SHOWN]]
    return ", ".join(shown) + _and_more(len(schema))


def html_table(
    title: str, facts: Mapping[str, object], schema: pa.Schema | None = None, key: str = ""
) -> str:
    """Format properties, and columns with their types, as an HTML table."""
    rows = [_row(name, str(value)) for name, value in facts.items()]
    if schema is not None:
        rows.append(f'<tr><th colspan="2" style="{CELL}">columns{_and_more(len(schema))}</th></tr>')
        rows += [
            _row(field.name, f"{field.type}, key" if field.name == key else str(field.type))
            for field in list(schema)[:COLUMNS_SHOWN]
        ]
    caption = f'<caption style="{CELL}"><b>{escape(title)}</b></caption>'
    return f"<table>{caption}{''.join(rows)}</table>"


def _row(name: str, value: str) -> str:
    return f'<tr><td style="{CELL}">{escape(name)}</td><td style="{CELL}">{escape(value)}</td></tr>'


def _and_more(count: int) -> str:
    return f", and {count - COLUMNS_SHOWN} more" if count > COLUMNS_SHOWN else ""
