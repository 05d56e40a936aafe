"""The examples of a page of docs/: its blocks of code, and what they say that they print."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def blocks(page, language):
    """The blocks of code in that language, in order."""
    text = (ROOT / "docs" / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


def printed(code):
    """The lines that the code says it prints: what stands behind an arrow."""
    return re.findall(r"(?://|#) → (.*)", code)
