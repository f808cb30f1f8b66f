"""Replay README and guides as a new user would: `make replay`.

    python -m tests.docs.replay [--record] [--only PAGE]

Clones the repository, installs it into an empty virtual environment under an empty home, and runs
everything that README, getting started and the guides show: their Python as one program for each
page, their shell commands line by line, and the programs of the guides. The output is compared with
the transcripts in tests/docs/transcripts; `--record` rewrites them. Times, sizes, ids and paths
differ from run to run and are replaced by "…" on both sides.
"""

import argparse
import difflib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.docs.examples import EMBEDDED, without_examples

ROOT = Path(__file__).parents[2]
TRANSCRIPTS = Path(__file__).parent / "transcripts"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
EXTRAS = "sql,spark,polars,raft,testing"
VARYING = [
    (r"\d+\.\d{3,}", "…"),  # before ids: the digits of a fraction would be one
    (r"/tmp/\S+", "…"),
    (r"\b[0-9A-HJKMNP-TV-Z]{26}\b", "…"),  # ids
    (r"\b[0-9a-f]{12,}\b", "…"),
    (r"\d{4}-\d\d-\d\d[T ]?[\d:.Z+]*", "…"),
    (r"'bytes': \d+", "'bytes': …"),
    (r"[\d,.]+ ?(s|ms|µs|MB|KiB|MiB|B|USD)\b", r"… \1"),
]


def pages() -> list[Path]:
    """Return the pages that a new user reads, in that order."""
    guides = sorted((ROOT / "docs" / "guide").glob("*.md"))
    return [ROOT / "README.md", ROOT / "docs" / "getting-started.md", *guides]


def commands(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield what a page runs: a title for the transcript, and the words of the command."""
    text = page.read_text()
    blocks = BLOCK.findall(without_examples(text))
    program = "\n".join(code for language, code in blocks if language == "python")
    if program:
        yield "python", ["python", "-c", program]
    for language, code in blocks:
        for line in code.splitlines() if language == "sh" else ():
            if line.strip() and not line.startswith("make test"):  # CI runs it
                yield line.partition("  #")[0].rstrip(), ["bash", "-ec", line]
    for example in dict.fromkeys(match["path"] for match in EMBEDDED.finditer(text)):
        yield f"python {example}", ["python", f"CHECKOUT/{example}"]


def replay(page: Path, place: "Place") -> str:
    """Run a page in an empty directory; return its transcript."""
    with tempfile.TemporaryDirectory() as folder:
        parts = []
        for title, words in commands(page):
            command = [word.replace("CHECKOUT", str(place.checkout)) for word in words]
            made = title.startswith("make ")
            print(f"  $ {title}", flush=True)
            output = place.run(command, place.checkout if made else Path(folder))
            parts.append(f"$ {title}\n{outline(output) if made else output}")
    return "\n".join(parts)


class Place:
    """A clean checkout, installed into an empty environment."""

    def __init__(self, folder: Path) -> None:
        self.checkout, self.venv = folder / "checkout", folder / "venv"
        (folder / "home").mkdir()
        kept = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        java = {"JAVA_HOME": os.environ["JAVA_HOME"]} if "JAVA_HOME" in os.environ else {}
        path = f"{self.venv}/bin:/usr/local/bin:/usr/bin:/bin"
        self.env = {"PATH": path, "HOME": str(folder / "home"), "LANG": "C.UTF-8", **kept, **java}

    def install(self) -> None:
        """Clone and install, as the README says: pyspark first, so that the jar is compiled."""
        subprocess.run(["git", "clone", "-q", ROOT, self.checkout], check=True)
        subprocess.run([sys.executable, "-m", "venv", self.venv], check=True)
        pip = [self.venv / "bin/pip", "install", "-q", "-c", "constraints.txt"]
        self._quietly(*pip, "pyspark")
        self._quietly(*pip, f".[{EXTRAS}]")

    def _quietly(self, *command: object) -> None:
        words = [str(word) for word in command]
        subprocess.run(words, cwd=self.checkout, env=self.env, check=True)

    def run(self, words: list[str], cwd: Path) -> str:
        """Run a command; return its normalized output and, if it failed, its status."""
        done = subprocess.run(
            words,
            cwd=cwd,
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:  # otherwise stderr has Spark's progress, and nothing else
            return f"{normalized(done.stdout)}exit status {done.returncode}\n{done.stderr[-3000:]}"
        return normalized(done.stdout)


def normalized(output: str) -> str:
    """Replace what differs from run to run.

    >>> normalized("took 1.25 s\\nrows 5\\n")
    'took … s\\nrows 5\\n'
    """
    text = "".join(f"{line.rstrip()}\n" for line in output.splitlines())
    for pattern, replacement in VARYING:
        text = re.sub(pattern, replacement, text)
    return text


def outline(output: str) -> str:
    """Return the titles of the steps of a make target: the rest is figures."""
    return "".join(f"{line}\n" for line in output.splitlines() if re.match(r"\d+\. ", line))


def compare(page: Path, transcript: str, *, record: bool) -> bool:
    """Compare with the transcript of the repository, or rewrite that."""
    path = TRANSCRIPTS / f"{page.stem}.txt"
    if record:
        path.parent.mkdir(exist_ok=True)
        path.write_text(transcript)
        return True
    expected = path.read_text() if path.exists() else ""
    difference = difflib.unified_diff(
        expected.splitlines(), transcript.splitlines(), "expected", "found", lineterm=""
    )
    print("\n".join(difference))
    return expected == transcript


def main() -> int:
    """Replay all pages; the exit status says whether all of them are as recorded."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--only", help="pages whose path contains this")
    arguments = parser.parse_args()
    different = []
    with tempfile.TemporaryDirectory(prefix="reef-replay-") as folder:
        place = Place(Path(folder))
        print("clone and install", flush=True)
        place.install()
        for page in pages():
            if arguments.only is None or arguments.only in str(page):
                print(page.relative_to(ROOT), flush=True)
                if not compare(page, replay(page, place), record=arguments.record):
                    different.append(str(page.relative_to(ROOT)))
    print("different:", ", ".join(different) if different else "none")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
