"""Search the documentation of Python's standard library by words, by meaning, and by both.

    python examples/search.py [URL]

The corpus is what is installed: the docstrings of some modules. The "embeddings" are hashes of
letter triples: no model, yet `serialise` is near `serialize`. A real program calls its model in
`embed`, and nothing else changes.
"""

import importlib
import inspect
import re
import sys
import tempfile
import zlib
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

import reef
from reef.jobs import ingest

MODULES = (
    "argparse array ast asyncio base64 bisect bz2 calendar collections configparser contextlib "
    "copy csv dataclasses datetime decimal difflib email.message enum fileinput fractions "
    "functools glob gzip hashlib heapq hmac html http.client inspect io itertools json logging "
    "lzma math mimetypes multiprocessing operator os pathlib pickle queue random re sched "
    "secrets select shelve shlex shutil signal socket sqlite3 ssl statistics string struct "
    "subprocess tarfile tempfile textwrap threading time tokenize traceback types unittest "
    "urllib.parse urllib.request uuid weakref xml.etree.ElementTree zipfile zlib"
)
DIMENSIONS = 256
BEGINNING = 120
DOCS = pa.schema(
    [
        ("id", pa.string()),
        ("module", pa.string()),
        ("kind", pa.string()),
        ("body", pa.string()),
        ("embedding", pa.list_(pa.float32(), DIMENSIONS)),
    ]
)


def corpus() -> Iterator[dict[str, str]]:
    """Yield the functions, classes and methods of the modules that have a docstring."""
    for module_name in MODULES.split():
        module = importlib.import_module(module_name)
        for name, value in vars(module).items():
            if name.startswith("_") or not callable(value):
                continue
            yield from _documented(module_name, f"{module_name}.{name}", value)
            for method, function in vars(value).items() if inspect.isclass(value) else ():
                if not method.startswith("_"):
                    yield from _documented(module_name, f"{module_name}.{name}.{method}", function)


def _documented(module: str, name: str, value: object) -> Iterator[dict[str, str]]:
    body = getattr(value, "__doc__", None)
    if isinstance(body, str) and len(body) > 20:
        kind = "class" if inspect.isclass(value) else "function"
        yield {"id": name, "module": module, "kind": kind, "body": f"{name}\n{body}"}


def embed(texts: Sequence[str]) -> np.ndarray:
    """Return a unit vector per text: the letter triples of its beginning, hashed."""
    vectors = np.zeros((len(texts), DIMENSIONS), np.float32)
    for row, text in enumerate(texts):
        words = re.findall("[a-z]{3,}", text[:BEGINNING].lower())
        for triple in {word[at : at + 3] for word in words for at in range(len(word) - 2)}:
            code = zlib.crc32(triple.encode())
            vectors[row, code % DIMENSIONS] += 1 if code & 0x10000 else -1
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.maximum(lengths, 1e-9)


def load(db: reef.Database) -> int:
    """Create the table with its indexes, and load the corpus; return the number of rows."""
    db.create(
        "docs",
        DOCS,
        indexes=[
            reef.text_index("body", language="english", positions=True),
            reef.vector_index("embedding", metric="cosine"),
            reef.filter_index("module"),
            reef.filter_index("kind"),
        ],
    )
    rows = list({row["id"]: row for row in corpus()}.values())
    table = pa.Table.from_pylist(sorted(rows, key=lambda row: row["id"]))
    vectors = pa.array(embed(table["body"].to_pylist()).tolist(), DOCS.field("embedding").type)
    ingest(db, "docs", table.append_column("embedding", vectors).cast(DOCS))
    return len(rows)


def by_words(reader: reef.Reader) -> list[str]:
    """Rank by BM25: words are stemmed, so that `compressing` finds `compressed`."""
    found = reader.search(text=("body", "compressing files"), k=5, columns=["module"])
    return found["id"].to_pylist()


def by_phrase(reader: reef.Reader) -> list[str]:
    """Require a phrase, in functions only."""
    found = reader.search(text=("body", '"regular expression" match'), where="kind = 'function'")
    return found["id"].to_pylist()


def by_meaning(reader: reef.Reader, question: str) -> list[str]:
    """Rank by the distance of embeddings."""
    found = reader.search(vector=("embedding", embed([question])[0]), k=5, columns=[])
    return found["id"].to_pylist()


def by_both(reader: reef.Reader, question: str) -> pa.Table:
    """Fuse both rankings; words count twice as much as embeddings."""
    return reader.search(
        text=("body", question),
        vector=("embedding", embed([question])[0]),
        weights={"text": 2, "vector": 1},
        where="module IN ('json', 'pickle', 'shelve', 'csv')",
        k=5,
        columns=["kind"],
    )


def main(url: str) -> None:
    """Load the corpus, and search it."""
    db = reef.open(url)
    print(f"{load(db):,} documents")
    with db.writer("docs") as writer, db.reader("docs") as reader:
        print("words:", *by_words(reader))
        print("phrase:", *by_phrase(reader)[:5])
        print("meaning:", *by_meaning(reader, "serialising an object as JSON"))
        for row in by_both(reader, "serialize objects to a JSON file").to_pylist():
            print(f"both: {row['_score']:.4f} {row['id']} ({row['kind']})")
        note = {"body": "Zanzibar is not in any docstring"}
        writer.put("notes.zanzibar", note | {"embedding": embed([note["body"]])[0].tolist()})
        found = writer.search(text=("body", "zanzibar"), columns=[])
        print("just written:", *found["id"].to_pylist())
        writer.delete("notes.zanzibar")
        print("deleted:", len(writer.search(text=("body", "zanzibar"))), "rows")
        print(writer.search(text=("body", "compress"), explain=True))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(folder)
