#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the prose of README, CONTRIBUTING and docs/: length of sentences and lines, words to avoid, and targets of links.

usage: check.py [FILE...]: prints file:line and the problem; the exit status is 1 if there is a problem
"""
import pathlib
import re
import sys
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[2]
MOST_WORDS, MOST_COLUMNS = 30, 119
#: Pages with long table rows: they quote error messages and lines of code, and Markdown cannot wrap a row.
WIDE_TABLES = {"docs/operators.md", "docs/coming-from.md", "docs/papers.md"}
#: Phrases without a clear reference, or unidiomatic ones (regular expressions), each with a replacement.
AVOID = {
    r"that which": "the noun", r"of which": "a second sentence", r"of whom": "a second sentence", r"of it": "its, or the noun",
    r"such an?": "the noun with the",
    r"thereby|whereby|therein|thereof|thereupon": "a second sentence", r"by way of": "through", r"in the place of": "instead of",
    r"in place of": "instead of", r"as ever": "as before", r"that is why": "therefore", r"does not do": "does not work",
    r"nobody|somebody": "the actor's name", r"one's own": "your own", r"will do": "suffices", r"the like": "the nouns",
    r"utilize[sd]?": "use", r"in order to": "to", r"due to the fact that": "because",
}


def sentences(path: pathlib.Path) -> Iterator[tuple[int, str]]:
    """Yields (line, sentence) for all text outside code, comments and directives. A table cell or list item ends a sentence."""
    fence, start, text = None, 1, ""
    for number, line in enumerate(path.read_text().splitlines() + [""], 1):
        mark = re.match(r"\s*(```+|~~~+|:::+|\$\$(?!.*\$\$))", line)
        if mark and (fence is None or line.strip() == fence):
            fence = None if fence else mark[1]
        code = fence is not None or mark or line.startswith("    ") and not text
        item = re.match(r"\s*([-*>#|<]|\d+\.|\(\w+\)=|$)", line)
        if code or item:
            yield from split(start, text)
            text = ""
        if code or not line.strip() or line.startswith("<!--"):
            continue
        if line.lstrip().startswith("|"):
            for cell in line.split("|"):
                yield from split(number, cell)
            continue
        start = start if text else number
        text += " " + line
    yield from split(start, text)


def split(line: int, text: str) -> Iterator[tuple[int, str]]:
    text = re.sub(r"`[^`]*`|\$\$.*?\$\$|\$[^$]*\$|<[^>]*>", "X", text)  # a piece of code or a formula counts as one word
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"\b(e\.g|i\.e|et al|vs|cf)\.", r"\1", text)
    for sentence in re.split(r"(?<=[.!?:;])[)\"*]*\s+", text):
        if sentence.strip():
            yield line, sentence.strip()


def broken_links(path: pathlib.Path) -> Iterator[tuple[int, str]]:
    text = re.sub(r"```.*?```", lambda m: "\n" * m[0].count("\n"), path.read_text(), flags=re.S)
    for link in re.finditer(r"\]\(([^)\s#]+)(#[^)\s]*)?\)|(?:src|href)=\"([^\"#]+)\"", text):
        target = link[1] or link[3]
        if not re.match(r"[a-z]+:", target) and not (path.parent / target).exists():
            yield text[:link.start()].count("\n") + 1, f"no such file: {target}"


def problems(path: pathlib.Path) -> Iterator[tuple[int, str]]:
    yield from broken_links(path)
    wide = path.relative_to(ROOT).as_posix() in WIDE_TABLES
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if len(line) > MOST_COLUMNS and not (wide and line.startswith("|")):
            yield number, f"{len(line)} columns, at most {MOST_COLUMNS}"
    for number, sentence in sentences(path):
        words = [w for w in sentence.split() if re.search(r"\w", w)]
        if len(words) > MOST_WORDS:
            yield number, f"a sentence of {len(words)} words, at most {MOST_WORDS}: {' '.join(words[:6])} ..."
        for pattern, instead in AVOID.items():
            for found in re.finditer(rf"\b(?:{pattern})\b", sentence, re.I):
                yield number, f'"{found[0]}": write {instead}'


files = [pathlib.Path(name).resolve() for name in sys.argv[1:]] or [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
failures = [f"{file.relative_to(ROOT)}:{line}: {what}" for file in files for line, what in sorted(problems(file))]
print("\n".join(failures) or f"{len(files)} pages read well")
sys.exit(bool(failures))
