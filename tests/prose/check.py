"""Is the text of the source plain English?  Counts offences in docstrings, comments, messages and names.

`check.py` compares the numbers of all packages with `baseline.json`, `check.py PATH ...` lists the offences
in files and folders, and `check.py --lower` lowers the baseline.  docs/contributing/plain-english.md
has the rules.
"""

from __future__ import annotations

import ast
import io
import json
import re
import sys
import tokenize
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
BASELINE = Path(__file__).with_name("baseline.json")
HUMAN = re.compile(
    r"\b(?:tells?|telling|told|hears?|heard|kn(?:ows?|ew|own to|own of)|learn(?:s|ed|t)?)\b", re.I
)
RULES = {
    "a noun is missing": re.compile(
        r"\b(?:wh(?:at|atever|oever)|those (?:that|which|who))\b"
        r"|^(?:return|yield|say) (?:how|where|when|who|which)\b",
        re.I,
    ),
    "data is sent, received, recorded": HUMAN,
    "not an X": re.compile(
        r"(?<!there )\b(?:is|are|was|were|be|been) no (?!longer\b|more\b)|there (?:is|are) none\b", re.I
    ),
    "over 30 words": re.compile(r"^(?:\S+\s+){30}\S"),
}
SENTENCE = re.compile(r"(?<=[.?!;])\s+|\n\s*\n|\n\s*[*-] |:\n")


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield the docstrings, messages and comments of a module, each with its line."""
    tree = ast.parse(source)
    nodes = [node for node in ast.walk(tree) if isinstance(node, (ast.Constant, ast.JoinedStr))]
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    inside = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        text = "".join(str(part.value) if isinstance(part, ast.Constant) else "x" for part in parts)
        if id(node) not in inside and (id(node) in docs or "\n" not in text):  # else a program, or a query
            yield node.lineno, text
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = [
        (token.start, token.string.lstrip("# ")) for token in tokens if token.type == tokenize.COMMENT
    ]
    for _, block in groupby(enumerate(comments), lambda entry: (entry[1][0][0] - entry[0], entry[1][0][1])):
        lines = [comment for _, comment in block]
        yield lines[0][0][0], "\n".join(text for _, text in lines)


def offences(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield each offence of a module: its line, the rule, and the sentence."""
    for line, text in texts(source):
        for part in SENTENCE.split(text) if text.count(" ") > 2 else ():
            sentence = " ".join(re.sub(r"`+[^`]+`+", "`x`", part).split())
            for rule, pattern in RULES.items():
                if pattern.search(sentence) and not sentence.endswith("?"):
                    yield line, rule, sentence
    for node in ast.walk(ast.parse(source)):
        name = node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else ""
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("test_"):
            name = node.name
        if HUMAN.search(re.sub(r"_|(?<=[a-z])(?=[A-Z])", " ", name)):
            yield getattr(node, "lineno", 0), "a name", name


def package(file: Path) -> str:
    """Return the package of a file, such as `src/reknit/engine` or `tests/engine`."""
    parts = file.relative_to(ROOT).parts[:-1]
    return "/".join(parts[: 3 if parts[0] == "src" else 2])


def main(arguments: list[str]) -> int:
    """Run the check, and return its exit status."""
    paths = [Path(name).resolve() for name in arguments if name != "--lower"]
    roots = paths or [ROOT / name for name in ("src", "tests", "benchmarks")]
    files = [file for root in roots for file in ([root] if root.is_file() else sorted(root.rglob("*.py")))]
    found = [(file, *offence) for file in files for offence in offences(file.read_text(encoding="utf-8"))]
    if paths:
        for file, line, rule, text in found:
            print(f"{file.relative_to(ROOT)}:{line}: {rule}: {text}")
        return bool(found)
    allowed = json.loads(BASELINE.read_text(encoding="utf-8"))
    numbers = Counter(package(file) for file, *_ in found)
    if "--lower" in arguments:
        allowed = {name: min(allowed[name], numbers[name]) for name in sorted(allowed) if numbers[name]}
        BASELINE.write_text(json.dumps(allowed, indent=2) + "\n", encoding="utf-8")
    worse = {name: number for name, number in sorted(numbers.items()) if number > allowed.get(name, 0)}
    for name, number in worse.items():
        print(f"{name}: {number} offences, of which {allowed.get(name, 0)} are allowed: see check.py {name}")
    print(f"prose: {numbers.total()} offences, {sum(allowed.values())} allowed")
    return bool(worse)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
