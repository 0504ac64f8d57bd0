"""Put a table into a document between two markers, so that its figures come from a run and nowhere else.

<!-- begin NAME -->
... replaced ...
<!-- end NAME -->
"""

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
