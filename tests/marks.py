"""Lines of a test file found by a comment `# MARK: name`, so that no line number is written down."""

from __future__ import annotations

from pathlib import Path


def marked(file: str, name: str) -> tuple[int, str]:
    """(line number, code of the line without the comment)."""
    for number, line in enumerate(Path(file).read_text().splitlines(), 1):
        code, _, mark = line.partition("# MARK: ")
        if mark.strip() == name:
            return number, code.strip()
    raise LookupError(f"no line of {file} is marked {name}")
