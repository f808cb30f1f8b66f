"""Runs a search on a view, and reports how."""

from typing import Any

import numpy as np
import pyarrow as pa

from reef.engine.read.segments import SegmentStore
from reef.engine.read.view import View
from reef.engine.search.request import (
    DISTANCE,
    SCORE,
    Ranked,
    SearchReport,
    SearchRequest,
    fuse,
    parse_request,
)
from reef.engine.search.state import SearchState
from reef.engine.search.texts import TextRanking
from reef.engine.search.vector_search import VectorRanking
from reef.formats.versions import Versions
from reef.runtime import Runtime
from reef.stores.wrappers.base import Meter
from reef.telemetry import RequestMeter

FUSED_MIN, FUSED_FACTOR = 50, 2
"""Rows of each ranking that are fused, at least, and for each row of the result."""


def run_search(
    view: View, now_ms: int, runtime: Runtime, *, explain: bool, **arguments: Any
) -> Any:
    """Return the rows of a search; with `explain`, its report as a dict."""
    state = SearchState.of(view, now_ms, runtime)
    if not explain:
        return _run(state, parse_request(state.manifest, **arguments), SearchReport())
    watch, meter = runtime.stopwatch(), RequestMeter()
    counted = Meter(state.segments._store, meter)
    segments = SegmentStore(counted, state.segments.namespace, state.segments._cache)
    state = SearchState(state.manifest, state.tables, segments, now_ms, runtime)
    request, report = parse_request(state.manifest, **arguments), SearchReport()
    report.results = len(_run(state, request, report))
    report.requests, report.bytes = _counts(meter)
    report.milliseconds = round(1000 * watch.elapsed_s(), 3)
    return report.to_dict()


def _counts(meter: RequestMeter) -> tuple[int, int]:
    counts = meter.counts().values()
    return sum(count.requests for count in counts), sum(count.bytes for count in counts)


def _run(state: SearchState, request: SearchRequest, report: SearchReport) -> pa.Table:
    if request.text is None:
        return _vector(state, request, report, request.k).table(request, DISTANCE)
    if request.vector is None:
        return _text(state, request, report, request.k).table(request, SCORE)
    each = max(FUSED_MIN, FUSED_FACTOR * request.k)
    rankings = [_vector(state, request, report, each), _text(state, request, report, each)]
    return fuse(rankings, request.weights, request).table(request, SCORE)


def _vector(state: SearchState, request: SearchRequest, report: SearchReport, k: int) -> Ranked:
    assert request.vector is not None
    return VectorRanking(state, request, request.vector, k, report).run()


def _text(state: SearchState, request: SearchRequest, report: SearchReport, k: int) -> Ranked:
    assert request.text is not None
    if not request.text.query.terms:
        return Ranked(Versions.empty(request.schema), np.zeros(0))
    return TextRanking(state, request, request.text, report).run(k)
