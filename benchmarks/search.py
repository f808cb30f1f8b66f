"""Text search next to tantivy and bm25s: one thread, one corpus, the same ten best rows.

    python -m benchmarks.search [--documents 100000] [--segments 1]

Peers that are not installed are left out. A query starts from its text: parsing, reading postings
from memory that earlier queries have filled, scoring. The corpus is synthetic: words by Zipf's law,
lengths log-normal, as in the goals: at most 3 × tantivy for short queries, 1 × with a stop word.
Every measured query is compared with exhaustive scoring first.
"""

import argparse
import os
import time
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa

from benchmarks.harness import Case, Result, measure
from reef.engine.read.caches import ByteCache
from reef.engine.search.bm25 import Hits, Statistics, exhaustive, top_k
from reef.engine.search.text_sources import PostingRead, TextSource, collect
from reef.formats.text_index import TextDirectory, TextIndexBuilder
from reef.formats.tokenize import Analyzer, TextOptions

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


def run(documents: int = 100_000, segments: int = 1, rounds: int = 5) -> list[Result]:
    """Measure all kinds of queries, and print how long the indexes took."""
    texts = corpus(documents)
    reef_index = _timed("reef", texts, lambda: ReefIndex(texts, segments))
    tokens = sum(source.directory.tokens for source in reef_index.sources)
    print(f"{tokens:,} tokens, index {reef_index.bytes:,} bytes of {sum(map(len, texts)):,}")
    works: dict[str, Search] = {"reef": reef_index.search}
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
        case = Case("text", name, turns, calls=QUERIES, rounds=rounds, size=size, goals=goals)
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
    asked = parser.parse_args()
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"):
        os.environ.setdefault(variable, "1")
    pa.set_cpu_count(1)
    for result in run(asked.documents, asked.segments):
        times = ", ".join(
            f"{engine} {figures.cpu_seconds * 1e3:.3f} ms (p50 {figures.p50 * 1e3:.3f})"
            for engine, figures in result.figures.items()
        )
        ratios = {peer: round(ratio[2], 2) for peer, ratio in result.ratios.items()}
        print(f"{result.name}, {result.size}: {times}; ratios of CPU {ratios}")


if __name__ == "__main__":
    main()
