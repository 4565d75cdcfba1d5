"""Count pro-words, which stand for nouns, and long sentences: ``python -m tests.words`` prints a line for each page.

CONTRIBUTING.md sets the limit: at most 6.1 % in docstrings, in messages and on pages. A sentence with many of them reads as
translated; the remedy is to name the noun. Code, tables of results and quoted settings are not counted.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMIT, LONG = 6.1, 30
PRO_WORDS = frozenset(
    re.findall(r"\w+", "what that which it its one those them these such other others whose this they each itself own")
)
SENTENCE = re.compile(r"(?<=[.!?:;])\s+(?=[A-Z*\[(])|\n\s*\n|\n(?=\s*(?:[-*|#]|\d+\.) ?)|[|]")
SECTION = re.compile(r"\n\s*(?:Args|Returns|Parameters|Examples?|Raises):")
PAGES = ("README.md", "CONTRIBUTING.md", "docs", "config/README.md")
ERRORS = ("UserError", "CutOffError", "ExhaustedError", "Finding", "print")


def docstrings(path: Path) -> Iterator[str]:
    """Yield the docstrings of a module."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, documented) and (text := ast.get_docstring(node)):
            yield SECTION.split(text)[0]


def messages(path: Path) -> Iterator[str]:
    """Yield the literal text of a module's errors, findings, prints and command-line help."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        spoken = node.args if name in ERRORS else []
        for value in [*spoken, *(key.value for key in node.keywords if key.arg in ("help", "description"))]:
            yield " ".join(
                part.value for part in ast.walk(value) if isinstance(part, ast.Constant) and isinstance(part.value, str)
            )


def prose(path: Path) -> str:
    """Return a page's text without code, quotes of settings, links' targets and comments."""
    text = re.sub(r"^```.*?^```|<!--.*?-->", " ", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`]*`|\]\([^)]*\)", " ", text)


def long_sentences(path: Path) -> list[str]:
    """Return a page's sentences, items and cells of more than 30 words; a quoted name counts as a word."""
    text = re.sub(r"^```.*?^```|<!--.*?-->", "\n\n", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", "] ", re.sub(r"`[^`]*`", "X", text))
    return [" ".join(each.split()) for each in SENTENCE.split(text) if len(re.findall(r"[\w'-]+", each)) > LONG]


def share(texts: Iterator[str] | list[str]) -> float:
    """Return the share of pro-words among the words, in percent."""
    words = [word for text in texts for word in re.findall(r"[a-z']+", text.lower())]
    return 100 * sum(word in PRO_WORDS for word in words) / max(1, len(words))


def modules() -> list[Path]:
    """Return the modules of scripts/."""
    return sorted((ROOT / "scripts").rglob("*.py"))


def pages() -> list[Path]:
    """Return the counted pages."""
    found = [ROOT / name for name in PAGES]
    return [page for path in found for page in (sorted(path.rglob("*.md")) if path.is_dir() else [path])]


def main() -> None:
    """Print the shares of docstrings and messages, then of each page with words and long sentences, the highest first."""
    print(f"{share([text for path in modules() for text in docstrings(path)]):5.1f} % docstrings")
    print(f"{share([text for path in modules() for text in messages(path)]):5.1f} % messages")
    for value, page in sorted(((share([prose(page)]), page) for page in pages()), reverse=True):
        words, long = len(page.read_text().split()), len(long_sentences(page))
        print(f"{value:5.1f} % {words:6} words {long:3} sentences over {LONG} {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
