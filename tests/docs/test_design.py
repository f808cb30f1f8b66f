"""docs/design matches the code: references resolve, generated parts are up to date."""

import importlib
import re
from itertools import combinations, pairwise, product
from pathlib import Path

import pytest

from tests.docs import examples, hazard_table, picture, reference

ROOT = Path(__file__).parents[2]
DESIGN = ROOT / "docs" / "design"
MAP = [DESIGN / f"{name}.md" for name in ("architecture", "protocols", "hazards", "glossary")]
REFERENCE = re.compile(r"`(reef(?:\.\w+)*)(?::([\w.]+))?`")
SECTION = re.compile(r"\bprotocols? (?:sections? |§)(\d+)")
STEP = re.compile(r"\bprotocols? (?:section |§)(\d+), step (\d+)")
DOCUMENT = re.compile(r"(?<![\w{}./*-])(?:[\w-]+/)*[\w-]+\.md\b")
DECISION = re.compile(r"\b(?:ADR |adr/)(\d{4})\b")
OUTSIDE = re.compile(
    r"\bthe\s+seed's|\bhanded\s+down\b|\bissue\s+#?\d+|\bthe\s+design('s|\s+(gives|says|asks))",
    re.IGNORECASE,
)
WALKS = ["put", "get", "scan", "fold", "Compaction", "Sweep", "Bulk load", "Spark read"]


def ids(path):
    """Name a file as readers do."""
    return str(path.relative_to(ROOT))


def section_numbers():
    """Return the numbers of the sections of the protocols."""
    page = (DESIGN / "protocols.md").read_text()
    return set(re.findall(r"^## (\d+)\. ", page, re.MULTILINE))


def text_files():
    """Return every module, page and configuration file of the repository."""
    folders = ("src", "tests", "docs", "benchmarks", "examples")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    return sorted(p for p in [*found, *ROOT.glob("*")] if p.suffix in {".py", ".md", ".toml"})


def resolve(module, attribute):
    """Return the target of a reference; raise if there is none."""
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError:  # `reef.open`: an attribute of a package
        parent, _, attribute = module.rpartition(".")
        found = importlib.import_module(parent)
    for name in attribute.split(".") if attribute else []:
        found = getattr(found, name)
    return found


@pytest.mark.parametrize("page", MAP, ids=ids)
def test_references_to_code_resolve(page):
    """`reef.x.y` is a module or a name, `reef.x.y:f` a function, class or method in it."""
    references = set(REFERENCE.findall(page.read_text()))
    assert references or page.stem in {"hazards", "glossary"}
    broken = []
    for module, attribute in sorted(references):
        try:
            resolve(module, attribute)
        except (AttributeError, ImportError) as error:
            broken.append(f"{module}:{attribute} ({error})")
    assert not broken, "\n".join(broken)


def test_a_reference_to_nothing_is_noticed():
    """A module that has moved, and a function that was renamed."""
    with pytest.raises(ImportError):
        resolve("reef.engine.gone.away", "")
    with pytest.raises(AttributeError):
        resolve("reef.manifest.edits", "fold_up")
    with pytest.raises(AttributeError):
        resolve("reef.engine.log", "Log.empty")


def test_every_operation_is_walked_through():
    """Each walk names at least three places in the code."""
    page = (DESIGN / "architecture.md").read_text()
    for title in WALKS:
        walk = page.split(f"\n## {title}\n")[1].split("\n## ")[0]
        assert len([1 for _, name in REFERENCE.findall(walk) if name]) >= 3, title


def test_every_section_of_the_protocols_names_its_modules():
    """In one line at its end, where a reader of the code and of the page meet."""
    page = (DESIGN / "protocols.md").read_text()
    for section in re.split(r"^## (?=\d+\. )", page, flags=re.MULTILINE)[1:]:
        body = section.split("\n## ")[0].rstrip()
        assert body.splitlines()[-1].startswith("Modules: `reef."), body.splitlines()[0]


def test_sections_that_are_referred_to_exist():
    """ "protocols §3" in a comment leads somewhere, and so does "§3" on the pages of the map."""
    known = section_numbers()
    assert known == {str(number) for number in range(1, 12)}
    for path in text_files():
        text = path.read_text()
        found = set(SECTION.findall(text))
        if path in MAP:
            found |= set(re.findall(r"§(\d+)", text))
        assert found <= known, ids(path)


def test_steps_that_are_referred_to_exist():
    """ "protocols §2, step 4" is a row of that section."""
    page = (DESIGN / "protocols.md").read_text()
    sections = dict(re.findall(r"^## (\d+)\. (.*?)(?=^## )", page, re.MULTILINE | re.DOTALL))
    for path in text_files():
        for section, step in STEP.findall(path.read_text()):
            assert f"\n| {step}. " in sections[section], f"{ids(path)}: §{section}, step {step}"


def test_documents_that_the_source_names_exist():
    """A page or a decision that a module, a test or a benchmark refers to is in the repository."""
    pages = [path for path in text_files() if path.suffix == ".md"]
    decisions = {path.name[:4] for path in pages if path.parent.name == "adr"}
    for path in text_files():
        if path.suffix == ".py":
            text = path.read_text()
            missing = [name for name in DOCUMENT.findall(text) if not _is_page(name, pages)]
            assert not missing, ids(path)
            assert set(DECISION.findall(text)) <= decisions, ids(path)


def _is_page(name, pages):
    return any(f"/{ids(page)}".endswith(f"/{name}") for page in pages)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("see docs/format/wal.md.", ["docs/format/wal.md"]),
        ('ROOT / "docs" / "benchmarks.md"', ["benchmarks.md"]),
        ('f"{name}.md", "*.md", docs/**/*.md, x/{y}.md', []),
    ],
)
def test_which_texts_name_a_document(text, named):
    """Names that are put together at run time are left out."""
    assert DOCUMENT.findall(text) == named


def test_nothing_refers_to_texts_outside_the_repository():
    """Neither a module nor a test nor a page: a reader has nothing but the repository."""
    found = [
        f"{ids(path)}: {match[0]!r}"
        for path in text_files()
        if path != Path(__file__)
        for match in OUTSIDE.finditer(path.read_text())
    ]
    assert not found


# --- hazards --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tested():
    """Return the files of tests by hazard."""
    return hazard_table.tests_by_hazard(hazard_table.test_files())


def test_the_table_of_hazards_is_up_to_date(tested):
    """`make docs` would change nothing."""
    page = hazard_table.PAGE.read_text()
    assert hazard_table.rewritten(page, tested) == page, "run `make docs`"


def test_every_hazard_that_is_named_has_a_row(tested):
    """Whether source or tests name it; and no hazard has two."""
    rows = [row.number for row in hazard_table.rows_of(hazard_table.PAGE.read_text())]
    assert len(rows) == len(set(rows))
    assert hazard_table.named_in(ROOT / "src") | set(tested) <= set(rows)


def test_every_hazard_that_the_source_names_has_a_test(tested):
    """A protection without a test is a comment; nor does the first table have planned ones."""
    assert hazard_table.named_in(ROOT / "src") <= set(tested)
    rows = hazard_table.rows_of(hazard_table.PAGE.read_text())
    planned = {row.number for row in rows if row.text[1].startswith("Planned")}
    assert not planned & set(tested), "say what protects from it now"


def test_a_row_moves_when_a_test_names_its_hazard(tmp_path):
    """The second table is for hazards without a test; the rest of the page stays as it is."""
    page = (
        "# x\n<!-- hazards: tested -->\n<!-- /hazards: tested -->\nbetween\n"
        "<!-- hazards: open -->\n| id | hazard | protection | tests |\n|---|---|---|---|\n"
        "| H2 | b | c | |\n| H1 | d | e | old |\n<!-- /hazards: open -->\nend\n"
    )
    test = hazard_table.ROOT / "tests" / "unit" / "test_x.py"
    changed = hazard_table.rewritten(page, {2: [test]})
    assert "| H2 | b | c | [unit/x](../../tests/unit/test_x.py) |" in changed.split("between")[0]
    assert "| H1 | d | e |  |" in changed.split("between")[1]
    assert changed.endswith("end\n")
    assert hazard_table.rewritten(changed, {2: [test]}) == changed
    assert "| H2 |" in hazard_table.rewritten(changed, {}).split("between")[1]


def test_tests_name_hazards_by_name_or_docstring(tmp_path):
    """Comments, helpers and longer words do not count."""
    path = tmp_path / "test_some.py"
    path.write_text(
        '"""H1."""\n\n\ndef test_H2_x():\n    """A."""\n\n\ndef test_y():\n    """H3, AH4."""\n\n\n'
        'def helper():\n    """H5."""\n    # H6\n'
    )
    assert hazard_table.tests_by_hazard([path]) == {2: [path], 3: [path]}


# --- the picture ----------------------------------------------------------------------


def test_the_picture_is_drawn_from_its_source():
    """`make docs` would change nothing."""
    assert picture.PICTURE.read_text() == picture.draw(picture.load()), "run `make docs`"


def test_texts_fit_into_their_boxes_and_boxes_apart():
    """What cannot be seen by a test of bytes: no text is cut off, no box covers another."""
    found = picture.load()
    for box in found["box"]:
        for text, size, _, base in picture.texts(box):
            assert picture.width_of(text, size) <= box["size"][0], text
            assert box["at"][1] < base < box["at"][1] + box["size"][1], text
    solid = [box for box in found["box"] if box["kind"] != "area"]
    for one, other in combinations(solid, 2):
        apart = [
            one["at"][axis] + one["size"][axis] <= other["at"][axis]
            or other["at"][axis] + other["size"][axis] <= one["at"][axis]
            for axis in (0, 1)
        ]
        assert any(apart), (one["title"], other["title"])


def test_labels_cover_neither_boxes_nor_lines_nor_each_other():
    """Nor do they leave the picture."""
    found = picture.load()
    labels = [_place_of_label(arrow) for arrow in found["arrow"] if "label" in arrow]
    solid = [_place_of_box(box) for box in found["box"] if box["kind"] != "area"]
    lines = [
        (str(ends), *map(min, *ends), *map(max, *ends))
        for arrow in found["arrow"]
        for ends in pairwise(arrow["points"])
    ]
    for label, other in product(labels, [*labels, *solid, *lines]):
        assert label == other or not _overlap(label, other), (label[0], other[0])
    assert all(label[3] <= found["width"] for label in labels)


def _place_of_label(arrow):
    """Return the name of a label, and its left, top, right and bottom."""
    (x, y), size = arrow["label_at"], picture.TEXT_PX
    return arrow["label"], x, y - size, x + picture.width_of(arrow["label"], size), y + 3


def _place_of_box(box):
    (x, y), (width, height) = box["at"], box["size"]
    return box["title"], x, y, x + width, y + height


def _overlap(one, other):
    across = one[1] <= other[3] and other[1] <= one[3]
    return across and one[2] <= other[4] and other[2] <= one[4]


# --- the glossary ---------------------------------------------------------------------


def test_the_glossary_defines_each_word_once():
    """Except for the two that are qualified by their module."""
    page = (DESIGN / "glossary.md").read_text()
    words = re.findall(r"^\| (\*\*.+?) \|", page, re.MULTILINE)
    assert len(words) > 80
    assert len(words) == len(set(words))


# --- generated pages ------------------------------------------------------------------


@pytest.mark.parametrize("page", sorted(reference.pages()), ids=ids)
def test_the_reference_is_up_to_date(page):
    """Settings and API are those of the code: `make docs` would change nothing."""
    assert page.read_text() == reference.pages()[page], "run `python -m tests.docs.reference`"


@pytest.mark.parametrize("page", examples.pages(), ids=ids)
def test_pages_show_the_code_that_runs(page):
    """The blocks of a guide are the source of its program: `make docs` would change nothing."""
    assert page.read_text() == examples.rewritten(page.read_text()), (
        "run `python -m tests.docs.examples`"
    )


def test_the_reference_has_every_setting_with_its_reason():
    """A new setting is on the page, and most say why they are as they are."""
    from dataclasses import fields

    from reef import config

    page = (ROOT / "docs" / "reference" / "settings.md").read_text()
    for group in reference.GROUPS:
        section = page.split(f"## {group}\n")[1].split("\n## ")[0]
        listed = re.findall(r"^\| `(\w+)`", section, re.MULTILINE)
        assert listed == [field.name for field in fields(getattr(config, group))]


def test_the_map_is_linked():
    """From the README, from CONTRIBUTING, and among its pages."""
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        for linked in MAP:
            assert f"docs/design/{linked.name}" in page.read_text(), page.name
    for page in MAP:
        others = [other.name for other in MAP if other != page]
        assert any(f"]({name})" in page.read_text() for name in others)
