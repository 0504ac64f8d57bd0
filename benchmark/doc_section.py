"""Put a table into a document between two markers, so that its figures come from a run and nowhere else.

The markers are the lines ``<!-- begin NAME -->`` and ``<!-- end NAME -->``; what is between them is replaced.
As a program it takes the table from standard input: ``... | python benchmark/doc_section.py FILE NAME``.
"""

import argparse
import sys
from pathlib import Path


class SectionError(ValueError):
    """The document has no such section; the message says what to write into it."""


def replace_section(path: Path, name: str, text: str) -> None:
    """Replace what is between the markers of section ``name`` in a Markdown file.

    Raises:
        SectionError: the markers aren't there, each once and in order.
    """
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    document = path.read_text(encoding="utf-8") if path.exists() else ""
    if document.count(begin) != 1 or document.count(end) != 1 or document.index(begin) > document.index(end):
        raise SectionError(f"{path} has no section {name!r}: write the lines {begin} and {end} into it")
    before, rest = document.split(begin)
    after = rest.split(end)[1]
    path.write_text(f"{before}{begin}\n\n{text.strip()}\n\n{end}{after}", encoding="utf-8")


def main(given: list[str] | None = None) -> int:
    """Replace a section by what comes on standard input."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("document", type=Path)
    parser.add_argument("name", help="of the section")
    arguments = parser.parse_args(given)
    text = sys.stdin.read()
    if not text.strip():
        print("error: nothing came on standard input: the section is left as it was", file=sys.stderr)
        return 1
    try:
        replace_section(arguments.document, arguments.name, text)
    except SectionError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
