"""The names of column types, as schemas store them, and back.

bool  int8 … int64  uint8 … uint64  float32  float64  string  binary  date
time[us]                     s, ms, us or ns of a day
timestamp[us]                timestamp[us, UTC]
decimal(12, 2)
vector<float32, 64>          a fixed number of floats, none of them null
list<int64>
map<string, int64>           the keys are not null, and not nested
struct<"x": int64, "y": list<string>>      names are JSON strings

`parse_type` also takes what people write: Arrow's names, such as time64[us] or decimal128(12, 2),
and names of fields without quotes.
"""

import json
import re
from functools import lru_cache

import pyarrow as pa

from reef.errors import InvalidInputError

SIMPLE = {
    "bool": pa.bool_(),
    **{
        f"{sign}int{bits}": getattr(pa, f"{sign}int{bits}")()
        for sign in ("", "u")
        for bits in (8, 16, 32, 64)
    },
    "float32": pa.float32(),
    "float64": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "time[s]": pa.time32("s"),
    "time[ms]": pa.time32("ms"),
    "time[us]": pa.time64("us"),
    "time[ns]": pa.time64("ns"),
}
NAMES = {arrow: name for name, arrow in SIMPLE.items()}
FLOATS = (pa.float32(), pa.float64())
NESTING_MAX = 16
TIMESTAMP = re.compile(r"timestamp\[(s|ms|us|ns)(?:, (.+))?\]")
DECIMAL = re.compile(r"decimal\((\d+), (\d+)\)")
VECTOR = re.compile(r"vector<(float32|float64), (\d+)>")
NESTED = re.compile(r"(list|map|struct)<(.*)>", re.DOTALL)
PART = re.compile(r'"(?:[^"\\]|\\.)*"|[<(\[]|[>)\]]|, |[^"<>()\[\],]+|.', re.DOTALL)


def type_name(data_type: pa.DataType) -> str:
    """Return the name of a column type, or raise if Reef has none."""
    if data_type in NAMES:
        return NAMES[data_type]
    types = pa.types
    if types.is_timestamp(data_type):
        zone = f", {data_type.tz}" if data_type.tz else ""
        return f"timestamp[{data_type.unit}{zone}]"
    if types.is_decimal128(data_type):
        return f"decimal({data_type.precision}, {data_type.scale})"
    if types.is_fixed_size_list(data_type) and data_type.value_type in FLOATS:
        return f"vector<{NAMES[data_type.value_type]}, {data_type.list_size}>"
    return _nested_name(data_type)


def _nested_name(data_type: pa.DataType) -> str:
    types = pa.types
    if types.is_list(data_type):
        return f"list<{type_name(data_type.value_type)}>"
    if types.is_map(data_type):
        return f"map<{type_name(data_type.key_type)}, {type_name(data_type.item_type)}>"
    if types.is_struct(data_type):
        fields = (f"{_quoted(field.name)}: {type_name(field.type)}" for field in data_type)
        return f"struct<{', '.join(fields)}>"
    raise InvalidInputError(
        f"{data_type} is not a column type", hint="See the list of types in the docs"
    )


@lru_cache(maxsize=1024)
def arrow_type(name: str) -> pa.DataType:
    """Return the Arrow type for a name that `type_name` gave."""
    if name in SIMPLE:
        return SIMPLE[name]
    if match := TIMESTAMP.fullmatch(name):
        return pa.timestamp(match[1], match[2])
    if match := DECIMAL.fullmatch(name):
        return pa.decimal128(int(match[1]), int(match[2]))
    if match := VECTOR.fullmatch(name):
        return pa.list_(SIMPLE[match[1]], int(match[2]))
    if match := NESTED.fullmatch(name):
        return _nested_type(name, match[1], _split(match[2]))
    raise _unknown(name)


def _nested_type(name: str, kind: str, parts: list[str]) -> pa.DataType:
    if kind == "list" and len(parts) == 1:
        return pa.list_(arrow_type(parts[0]))
    if kind == "map" and len(parts) == 2:
        return pa.map_(*map(arrow_type, parts))
    if kind == "struct":
        return pa.struct([_struct_field(name, part) for part in parts])
    raise _unknown(name)


def _struct_field(name: str, part: str) -> pa.Field:
    try:
        field, end = json.JSONDecoder().raw_decode(part)
    except ValueError:
        raise _unknown(name) from None
    if not isinstance(field, str) or not part.startswith(": ", end):
        raise _unknown(name)
    return pa.field(field, arrow_type(part[end + 2 :]))


ALIASES = {
    "boolean": "bool",
    "float": "float32",
    "double": "float64",
    "utf8": "string",
    "large_string": "string",
    "large_binary": "binary",
    "date32": "date",
    "date32[day]": "date",
    "time": "time[us]",
    "time32[s]": "time[s]",
    "time32[ms]": "time[ms]",
    "time64[us]": "time[us]",
    "time64[ns]": "time[ns]",
}
AS_WRITTEN = (
    (re.compile(r"timestamp"), "timestamp[us]"),
    (re.compile(r"timestamp\[(s|ms|us|ns), *(?:tz=)?([^ ].*)\]"), r"timestamp[\1, \2]"),
    (re.compile(r"decimal(?:128)?\((\d+), *(\d+)\)"), r"decimal(\1, \2)"),
    (re.compile(r"(?:vector|fixed_size_list)<(?:float|float32), *(\d+)>"), r"vector<float32, \1>"),
    (re.compile(r"(?:vector|fixed_size_list)<(?:double|float64), *(\d+)>"), r"vector<float64, \1>"),
    (re.compile(r"fixed_size_list<\w+: float>\[(\d+)\]"), r"vector<float32, \1>"),
    (re.compile(r"fixed_size_list<\w+: double>\[(\d+)\]"), r"vector<float64, \1>"),
)
ITEM = re.compile(r"(?:item|element): *(.*)", re.DOTALL)
FIELD = re.compile(r"([^\s:<>\"]+) *: *(.*)", re.DOTALL)


def parse_type(text: str) -> pa.DataType:
    """Return the type for a name as people write it: Reef's name, or Arrow's."""
    try:
        return arrow_type(_canonical(text.strip()))
    except InvalidInputError:
        raise _unknown(text) from None


def _canonical(text: str) -> str:
    """Return Reef's name for one of Arrow's; any other text as it is."""
    for pattern, name in AS_WRITTEN:
        if pattern.fullmatch(text):
            return pattern.sub(name, text)
    match = NESTED.fullmatch(text)
    if match is None:
        return ALIASES.get(text, text)
    parts = [part.strip() for part in _split(match[2], (",", ", "))]
    if match[1] == "struct":
        parts = [_canonical_field(part) for part in parts]
    else:
        parts = [_canonical(item[1] if (item := ITEM.fullmatch(part)) else part) for part in parts]
    return f"{match[1]}<{', '.join(parts)}>"


def _canonical_field(part: str) -> str:
    match = FIELD.fullmatch(part)
    if match is not None:
        return f"{_quoted(match[1])}: {_canonical(match[2])}"
    name, end = _decoded(part)
    return f"{_quoted(name)}: {_canonical(part[end:].lstrip(': '))}" if end else part


def _decoded(part: str) -> tuple[str, int]:
    """Return the quoted name that some text begins with, and its length; 0 if there is none."""
    try:
        name, end = json.JSONDecoder().raw_decode(part)
    except ValueError:
        return "", 0
    return (name, end) if isinstance(name, str) else ("", 0)


def _split(text: str, commas: tuple[str, ...] = (", ",)) -> list[str]:
    """Return the parts between commas that are not within brackets or quotes."""
    parts, depth = [""], 0
    for match in PART.finditer(text):
        piece = match[0]
        depth += (piece in "<([") - (piece in ">)]")
        if piece in commas and not depth:
            parts.append("")
        else:
            parts[-1] += piece
    return parts


def _quoted(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)


def _unknown(name: str) -> InvalidInputError:
    return InvalidInputError(f"{name[:200]!r} is not the name of a column type")
