"""Small SVG charts, drawn without a plotting library: bars of ratios, lines of growth."""

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

WIDTH, LEFT, RIGHT, ROW = 800, 310, 110, 26
COLORS = ("#0b6e99", "#d9730d", "#0f7b6c", "#6940a5", "#ad1a72", "#64473a")
Place = Callable[[float, float], tuple[float, float]]
FONT = 'font-family="sans-serif" font-size="12"'


def bars(title: str, values: Sequence[tuple[str, float, float]]) -> str:
    """Return horizontal bars of (name, ratio, goal); a line marks where each goal is reached.

    Each bar is relative to its goal: what ends left of the line is met.
    """
    shares = [(name, ratio / goal, ratio, goal) for name, ratio, goal in values]
    most = max(1.25, *(share for _, share, _, _ in shares))
    wide = WIDTH - LEFT - RIGHT
    goal_x = LEFT + wide / most
    lines = []
    for number, (name, share, ratio, goal) in enumerate(shares):
        y = 40 + ROW * number
        color = COLORS[2] if share <= 1 else COLORS[1]
        lines += [
            _text(LEFT - 8, y + 14, name, "end"),
            f'<rect x="{LEFT}" y="{y + 3}" width="{wide * share / most:.1f}" height="15" '
            f'fill="{color}"/>',
            _text(LEFT + wide * share / most + 5, y + 14, f"{ratio:.3g} (goal {goal:.3g})"),
        ]
    height = 50 + ROW * len(shares)
    lines.append(
        f'<line x1="{goal_x:.1f}" y1="32" x2="{goal_x:.1f}" y2="{height - 8}" stroke="#444" '
        f'stroke-dasharray="4 3"/>'
    )
    return _svg(title, height, lines)


def growth(title: str, series: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Return lines of (rows, microseconds) on logarithmic axes."""
    points = [point for line in series.values() for point in line]
    xs, ys = [x for x, _ in points], [max(y, 1e-3) for _, y in points]
    low = 10 ** math.floor(math.log10(min(ys)))
    high = max(10 * low, 10 ** math.ceil(math.log10(max(ys))))
    left, top, wide, tall = 70, 40, WIDTH - 70 - 230, 240

    def place(x: float, y: float) -> tuple[float, float]:
        across = math.log(x / min(xs)) / max(1e-9, math.log(max(xs) / min(xs)))
        up = math.log(max(y, 1e-3) / low) / math.log(high / low)
        return left + wide * across, top + tall * (1 - up)

    lines = _axes((left, top, wide, tall), (low, high), sorted(set(xs)), place)
    for number, (name, line) in enumerate(series.items()):
        color = COLORS[number // 2 % len(COLORS)]
        dash = ' stroke-dasharray="5 4"' if number % 2 else ""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in line))
        y = top + 8 + 18 * number
        lines += [
            f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"{dash}/>',
            f'<line x1="{left + wide + 14}" y1="{y - 4}" x2="{left + wide + 38}" y2="{y - 4}" '
            f'stroke="{color}" stroke-width="2"{dash}/>',
            _text(left + wide + 44, y, name),
        ]
    return _svg(title, top + tall + 40, lines)


def _axes(
    box: tuple[int, int, int, int], bounds: tuple[float, float], xs: list[float], place: Place
) -> list[str]:
    left, top, wide, tall = box
    lines = [
        f'<rect x="{left}" y="{top}" width="{wide}" height="{tall}" fill="none" stroke="#999"/>'
    ]
    low, high = bounds
    tick = low
    while tick <= high * 1.001:
        _, y = place(xs[0], tick)
        label = f"{tick:g} µs" if tick < 1000 else f"{tick / 1000:g} ms"
        lines += [
            f'<line x1="{left}" y1="{y:.1f}" x2="{left + wide}" y2="{y:.1f}" stroke="#ddd"/>',
            _text(left - 6, y + 4, label, "end"),
        ]
        tick *= 10
    for x in xs:
        lines.append(_text(place(x, low)[0], top + tall + 18, f"{x:,.0f} rows", "middle"))
    return lines


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {FONT}>{escape(text)}</text>'


def _svg(title: str, height: float, lines: Sequence[str]) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" '
            f'role="img" aria-label="{escape(title)}">',
            f'<rect width="{WIDTH}" height="{height:.0f}" fill="white"/>',
            f'<text x="12" y="22" font-weight="bold" {FONT}>{escape(title)}</text>',
            *lines,
            "</svg>\n",
        ]
    )
