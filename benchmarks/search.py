"""Search next to faiss, lancedb, tantivy and bm25s: one thread, one corpus, equal recall.

    python -m benchmarks --only search
    python -m benchmarks.search [--documents 100000] [--segments 1]
    python -m benchmarks.search --vectors 1000000 --dimensions 768 [--spark]

Peers that are not installed are left out. Text: a query starts from its text: parsing, reading
postings from memory that earlier queries have filled, scoring; `search()` is the same through a
reader, with the rows. The corpus is synthetic: words by Zipf's law, lengths log-normal. Vectors:
in clusters, and hashed texts; each engine probes as many lists as it needs for a recall of 0.95.
Filters: counts with a filter index, next to Arrow's mask of the column in memory.
"""

import argparse
import os
import resource
import tempfile
import time
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import reef
from benchmarks.contest import Sizes
from benchmarks.harness import Case, Result, measure
from reef.engine.read.caches import ByteCache
from reef.engine.search.bm25 import Hits, Statistics, exhaustive, top_k
from reef.engine.search.text_sources import PostingRead, TextSource, collect
from reef.formats.text_index import TextDirectory, TextIndexBuilder
from reef.formats.tokenize import Analyzer, TextOptions
from reef.jobs import build_indexes, fold, ingest
from reef.stores.memory import MemoryStore

WORDS, K = 60_000, 10
QUERIES = 200
Search = Callable[[str], object]


def corpus(documents: int) -> list[str]:
    """Return synthetic documents of some 90 words."""
    rng = np.random.default_rng(5)
    lengths = np.clip(rng.lognormal(4.3, 0.6, documents), 5, 800).astype(int)
    shares = 1 / (np.arange(1, WORDS + 1) + 2.7) ** 1.05
    cumulated = np.cumsum(shares / shares.sum())
    words = np.array([f"w{number:05d}" for number in range(WORDS)])
    tokens = np.minimum(np.searchsorted(cumulated, rng.random(lengths.sum())), WORDS - 1)
    return [" ".join(words[part]) for part in np.split(tokens, np.cumsum(lengths)[:-1])]


def queries() -> dict[str, tuple[list[str], float]]:
    """Return queries of three kinds, with the promised ratio to tantivy."""
    rng = np.random.default_rng(9)

    def drawn(low: int, high: int, count: int) -> list[str]:
        ranks = rng.integers(low, high, (QUERIES, count))
        return [" ".join(f"w{rank:05d}" for rank in query) for query in ranks]

    stopped = [f"{query} w00001" for query in drawn(50, 5_000, 3)]
    return {
        "2 rare terms": (drawn(1_000, 20_000, 2), 3.0),
        "3 mixed terms": (drawn(20, 5_000, 3), 3.0),
        "4 terms with a stop word": (stopped, 1.0),
    }


class ReefIndex:
    """Reef's text index of some segments, read from memory through its cache."""

    def __init__(self, documents: Sequence[str], segments: int) -> None:
        self.analyzer = Analyzer(TextOptions())
        self.cache = ByteCache(1 << 30)
        self._data: list[bytes] = []
        self.sources: list[TextSource] = []
        for number, part in enumerate(np.array_split(np.arange(len(documents)), segments)):
            column = pa.array(documents[part[0] : part[-1] + 1], pa.string())
            builder = TextIndexBuilder({})
            builder.add(0, column, np.ones(len(column), bool))
            parts = builder.finish()
            self._data.append(b"".join(parts.data))
            directory = TextDirectory.decode(parts.directory, f"segment {number}", 0)
            self.sources.append(TextSource(directory))

    @property
    def bytes(self) -> int:
        return sum(map(len, self._data))

    def search(self, text: str, scored: Callable[..., Hits] = top_k) -> Hits:
        query = self.analyzer.query(text)
        found = collect(self.sources, query, self._read, self.cache)
        return scored(found, query, Statistics.of(found), K)

    def check(self, text: str) -> None:
        """Raise if a search differs from exhaustive scoring in anything."""
        quick, slow = self.search(text), self.search(text, exhaustive)
        for part in ("scores", "sources", "ordinals"):
            np.testing.assert_array_equal(getattr(quick, part), getattr(slow, part))

    def _read(self, requests: Sequence[PostingRead]) -> list[memoryview]:
        return [
            memoryview(self._data[request.source])[request.offset : request.offset + request.length]
            for request in requests
        ]


def tantivy_search(documents: Sequence[str]) -> Search:
    """Index in tantivy with one thread."""
    import tantivy

    schema = tantivy.SchemaBuilder()
    schema.add_unsigned_field("id", stored=True)
    schema.add_text_field("t", stored=False, tokenizer_name="default", index_option="freq")
    index = tantivy.Index(schema.build())
    writer = index.writer(heap_size=200_000_000, num_threads=1)
    for number, text in enumerate(documents):
        writer.add_document(tantivy.Document(id=number, t=text))
    writer.commit()
    writer.wait_merging_threads()
    index.reload()
    searcher = index.searcher()
    return lambda text: searcher.search(index.parse_query(text, ["t"]), K, count=False).hits


def bm25s_search(documents: Sequence[str]) -> Search:
    """Index in bm25s."""
    import bm25s

    tokens = bm25s.tokenize(
        documents, stopwords=None, show_progress=False, token_pattern=r"\w+", lower=True
    )
    ranker = bm25s.BM25(k1=1.2, b=0.75)
    ranker.index(tokens, show_progress=False)
    return lambda text: ranker.retrieve([text.split()], k=K, show_progress=False, n_threads=0)


# --- vectors ----------------------------------------------------------------------------
DIMENSIONS, VECTOR_QUERIES, RECALL = 128, 40, 0.95


def clustered(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return vectors around a thousand centers, and queries near some of them."""
    rng = np.random.default_rng(1)
    centers = rng.normal(size=(1000, DIMENSIONS)).astype("f4")
    noise = 0.7 * rng.normal(size=(count, DIMENSIONS))
    vectors = (centers[rng.integers(0, 1000, count)] + noise).astype("f4")
    queries = vectors[rng.choice(count, VECTOR_QUERIES)]
    return vectors, (queries + 0.3 * rng.normal(size=queries.shape)).astype("f4")


def hashed_texts(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return embeddings of texts by hashed words, of overlapping topics, and queries like them."""
    rng = np.random.default_rng(1)
    signs = rng.normal(size=(30_000, DIMENSIONS)).astype("f4")
    shares = np.cumsum(1 / (np.arange(1, 30_001) + 2.7))
    topics = [rng.permutation(30_000) for _ in range(300)]

    def texts(number: int) -> np.ndarray:
        drawn = np.searchsorted(shares / shares[-1], rng.random((number, 60)))
        words = [topics[rng.integers(300)][np.minimum(row, 29_999)] for row in drawn]
        made = np.array([signs[row].sum(axis=0) for row in words])
        return (made / np.linalg.norm(made, axis=1, keepdims=True)).astype("f4")

    return texts(count), texts(VECTOR_QUERIES)


def vectors(rows: int, rounds: int) -> list[Result]:
    """Measure searches by vector, with one and with many segments."""
    results = []
    for kind, make in (("clusters", clustered), ("hashed texts", hashed_texts)):
        stored, queries = make(rows)
        squares = np.einsum("ij,ij->i", stored, stored)
        truth = [set(np.argsort(squares - 2 * (stored @ query))[:K].tolist()) for query in queries]
        peer = _faiss(stored, queries, truth)
        for segments in (1, 4, 16):
            reader = _reader(stored, segments)
            works = {"reef": lambda query, reader=reader: _ids(reader, query)} | peer
            for engine, work in works.items():
                print(f"{kind}, {segments} segments, {engine}: {_recall(work, queries, truth):.3f}")
            turns = {
                engine: (lambda turn, work=work, asked=queries: work(asked[turn % len(asked)]))
                for engine, work in works.items()
            }
            case = Case(
                "search",
                kind,
                turns,
                calls=VECTOR_QUERIES,
                rounds=rounds,
                size=f"{rows:,} × {DIMENSIONS}, {segments} segments",
                goals=dict.fromkeys(peer, 4.0) if segments == 1 else {},
            )
            results.append(measure(case))
    return results


def _reader(stored: np.ndarray, segments: int) -> reef.Reader:
    db = reef.Database(MemoryStore())
    places = np.array_split(np.random.default_rng(5).permutation(len(stored)), segments)
    parts = [
        pa.table(
            {
                "id": [f"{number:07}" for number in np.sort(some)],
                "v": pa.FixedSizeListArray.from_arrays(
                    pa.array(stored[np.sort(some)].ravel()), DIMENSIONS
                ),
            }
        )
        for some in places
    ]
    db.create("docs", parts[0].schema, indexes=[reef.vector_index("v", rows_min=100)])
    for part in parts:
        ingest(db, "docs", part)
    fold(db, "docs")
    build_indexes(db, "docs")
    return db.reader("docs")


def _ids(reader: reef.Reader, query: np.ndarray) -> list[int]:
    found = reader.search(vector=("v", query), columns=[], k=K)
    return [int(key) for key in found["id"].to_pylist()]


def _recall(work: Callable[[np.ndarray], list[int]], queries: np.ndarray, truth: list) -> float:
    found = zip(queries, truth, strict=True)
    return float(np.mean([len(near & set(work(query))) / K for query, near in found]))


def _faiss(stored: np.ndarray, queries: np.ndarray, truth: list) -> dict[str, Callable]:
    """Return a search of faiss with 8-bit codes and exact distances of the best 50."""
    try:
        import faiss
    except ImportError:
        print("faiss is not installed")
        return {}
    faiss.omp_set_num_threads(1)
    lists, coding = round(len(stored) ** 0.5), faiss.ScalarQuantizer.QT_8bit
    index = faiss.IndexIVFScalarQuantizer(
        faiss.IndexFlatL2(DIMENSIONS), DIMENSIONS, lists, coding, faiss.METRIC_L2
    )
    index.train(stored[: 64 * lists])
    index.add(stored)

    def search(query: np.ndarray) -> list[int]:
        found = index.search(query[None], 50)[1][0]
        found = found[found >= 0]
        return found[np.argsort(np.square(stored[found] - query).sum(axis=1))[:K]].tolist()

    index.nprobe = 2
    while index.nprobe < lists and _recall(search, queries, truth) < RECALL:
        index.nprobe *= 2
    return {"faiss": search}


PART_ROWS = 50_000
"""Rows that are loaded at once: 150 MB of vectors of 768 dimensions."""


def large(rows: int, dimensions: int, *, spark: bool) -> None:
    """Load many vectors into a directory, build their index, and print CPU, memory and recall."""
    rng = np.random.default_rng(1)
    centers = rng.normal(size=(1000, dimensions)).astype("f4")

    def part(first: int) -> np.ndarray:
        own = np.random.default_rng(first)
        count = min(PART_ROWS, rows - first)
        noise = 0.7 * own.standard_normal((count, dimensions), "f4")
        return centers[own.integers(0, 1000, count)] + noise

    asked = part(0)[:VECTOR_QUERIES] + 0.3 * rng.standard_normal((1, dimensions), "f4")
    schema = pa.schema([("id", pa.string()), ("v", pa.list_(pa.float32(), dimensions))])
    far = np.zeros((VECTOR_QUERIES, 0))
    with tempfile.TemporaryDirectory() as folder:
        db, load_s, begun = reef.open(folder), 0.0, time.process_time()
        db.create("docs", schema, indexes=[reef.vector_index("v")])
        for first in range(0, rows, PART_ROWS):
            some = part(first)
            keys = [f"{number:08}" for number in range(first, first + len(some))]
            column = pa.FixedSizeListArray.from_arrays(pa.array(some.ravel()), dimensions)
            begun = time.process_time()
            ingest(db, "docs", pa.table([keys, column], schema=schema))
            load_s += time.process_time() - begun
            squares = np.einsum("ij,ij->i", some, some)
            far = np.hstack([far, squares - 2 * (asked @ some.T)])
        fold(db, "docs")
        print(f"loaded in {load_s:.1f} s of CPU, at most {_peak_mb()} MB of memory")
        begun, started = time.process_time(), time.perf_counter()
        build_indexes(db, "docs", executor=_spark_executor() if spark else None)
        used, took = time.process_time() - begun, time.perf_counter() - started
        print(f"built in {took:.1f} s, {used:.1f} s of CPU here, at most {_peak_mb()} MB of memory")
        truth = [set(np.argpartition(row, K)[:K].tolist()) for row in far]
        with db.reader("docs", cache_bytes=2 << 30) as reader:
            print(f"recall {_recall(lambda query: _ids(reader, query), list(asked), truth):.3f}")
            begun = time.process_time()
            for query in asked:
                _ids(reader, query)
            used = (time.process_time() - begun) / VECTOR_QUERIES
            print(f"{used * 1e3:.2f} ms of CPU per query; the first one, explained:")
            print(reader.search(vector=("v", asked[0]), columns=[], k=K, explain=True))


def _peak_mb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def _spark_executor() -> object:
    from pyspark.sql import SparkSession

    import reef.spark

    settings = {"spark.executor.memory": "1g", "spark.python.worker.reuse": "true"}
    builder = SparkSession.builder.master("local[2]")
    for name, value in settings.items():
        builder = builder.config(name, value)
    return reef.spark.executor(builder.getOrCreate())


# --- filters ----------------------------------------------------------------------------
CONDITIONS: dict[str, Callable[[pa.Table], pa.ChunkedArray]] = {
    "country = 'C7'": lambda t: pc.equal(t["country"], "C7"),
    "price < 1": lambda t: pc.less(t["price"], 1.0),
    "price BETWEEN 20 AND 60": lambda t: pc.and_(
        pc.greater_equal(t["price"], 20.0), pc.less_equal(t["price"], 60.0)
    ),
}


def filters(rows: int, rounds: int) -> list[Result]:
    """Measure counts with a condition: with and without an index, and Arrow in memory."""
    rng = np.random.default_rng(0)
    table = pa.table(
        {
            "id": [f"{number:08}" for number in range(rows)],
            "country": [f"C{number}" for number in np.minimum(rng.zipf(1.5, rows), 9)],
            "price": np.round(rng.gamma(2, 30, rows), 2),
        }
    )
    readers = {}
    for engine, columns in (("reef", ("country", "price")), ("reef without index", ())):
        db = reef.Database(MemoryStore())
        db.create("t", table.schema, indexes=[reef.filter_index(column) for column in columns])
        ingest(db, "t", table)
        fold(db, "t")
        readers[engine] = db.reader("t")
    results = []
    for where, mask in CONDITIONS.items():
        turns: dict[str, Callable] = {
            engine: (lambda turn, reader=reader, where=where: reader.count(where))
            for engine, reader in readers.items()
        }
        turns["arrow"] = lambda turn, mask=mask: pc.sum(mask(table)).as_py()
        assert len({work(0) for work in turns.values()}) == 1, where
        size = f"{rows:,} rows"
        results.append(measure(Case("search", where, turns, calls=10, rounds=rounds, size=size)))
    return results


# --- all --------------------------------------------------------------------------------


def run(sizes: Sizes) -> list[Result]:
    """Measure searches by text and by vector, and filters."""
    texts = run_text(sizes.rows // 2, rounds=sizes.rounds)
    return [*texts, *vectors(sizes.rows, sizes.rounds), *filters(5 * sizes.rows, sizes.rounds)]


def _text_reader(texts: Sequence[str], segments: int) -> reef.Reader:
    table = pa.table({"id": [f"{number:07}" for number in range(len(texts))], "body": texts})
    db = reef.Database(MemoryStore())
    db.create("docs", table.schema, indexes=[reef.text_index("body")])
    for part in np.array_split(np.arange(len(texts)), segments):
        ingest(db, "docs", table.slice(part[0], len(part)))
    fold(db, "docs")
    return db.reader("docs")


def run_text(documents: int = 100_000, segments: int = 1, rounds: int = 5) -> list[Result]:
    """Measure all kinds of queries, and print how long the indexes took."""
    texts = corpus(documents)
    reef_index = _timed("reef", texts, lambda: ReefIndex(texts, segments))
    tokens = sum(source.directory.tokens for source in reef_index.sources)
    print(f"{tokens:,} tokens, index {reef_index.bytes:,} bytes of {sum(map(len, texts)):,}")
    reader = _text_reader(texts, segments)
    works: dict[str, Search] = {
        "reef": reef_index.search,
        "search()": lambda text: reader.search(text=("body", text), columns=[], k=K),
    }
    for name, make in (("tantivy", tantivy_search), ("bm25s", bm25s_search)):
        try:
            works[name] = _timed(name, texts, lambda make=make: make(texts))
        except ImportError:
            print(f"{name} is not installed")
    results = []
    for name, (listed, goal) in queries().items():
        for text in listed:
            reef_index.check(text)
        turns = {
            engine: (lambda turn, work=work, listed=listed: work(listed[turn % QUERIES]))
            for engine, work in works.items()
        }
        size = f"{documents:,} documents, {segments} segments"
        goals = {"tantivy": goal} if "tantivy" in works else {}
        case = Case("search", name, turns, calls=QUERIES, rounds=rounds, size=size, goals=goals)
        results.append(measure(case))
    return results


def _timed(name: str, texts: Sequence[str], build: Callable[[], object]):  # noqa: ANN202
    start = time.process_time()
    built = build()
    seconds = time.process_time() - start
    print(f"{name} builds {len(texts) / seconds:,.0f} documents/s ({seconds:.1f} s of CPU)")
    return built


def main() -> None:
    """Print milliseconds of CPU per query by engine, and ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--segments", type=int, default=1)
    parser.add_argument("--vectors", type=int, help="load so many instead, and build their index")
    parser.add_argument("--dimensions", type=int, default=768)
    parser.add_argument("--spark", action="store_true", help="build the index on Spark")
    asked = parser.parse_args()
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"):
        os.environ.setdefault(variable, "1")
    pa.set_cpu_count(1)
    if asked.vectors:
        large(asked.vectors, asked.dimensions, spark=asked.spark)
        return
    for result in run_text(asked.documents, asked.segments):
        times = ", ".join(
            f"{engine} {figures.cpu_seconds * 1e3:.3f} ms (p50 {figures.p50 * 1e3:.3f})"
            for engine, figures in result.figures.items()
        )
        ratios = {peer: round(ratio[2], 2) for peer, ratio in result.ratios.items()}
        print(f"{result.name}, {result.size}: {times}; ratios of CPU {ratios}")


if __name__ == "__main__":
    main()
