"""The pages of docs/ say what their numbers say; every picture is drawn from numbers, or is known not to be."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
HORNER = Path(os.environ.get("HORNER", ROOT / "build/horner")).absolute()
KEPT = {  # pictures of diagnoses whose folders were not kept (docs/diagnosis.md), and of timings
    *(f"diagnosis-{x}.png" for x in ("critical", "distance", "entropy", "heads", "order", "sensitivity", "separability", "series")),
    *(f"diagnosis-bytes-{x}.png" for x in ("distance", "heads", "law", "order", "sensitivity", "separability")),
    "recurrent-decode.svg", "recurrent-order.svg",
}  # fmt: skip

sys.path.insert(0, str(ROOT / "scripts"))
import docs as maker  # noqa: E402
import docs_blocks  # noqa: E402


def test_pages_say_what_the_numbers_say():
    done = subprocess.run([sys.executable, ROOT / "scripts/docs.py", HORNER, "--check"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, "run 'make docs':\n" + done.stdout + done.stderr


def test_a_page_that_says_something_else_is_found():
    """The first digit of every block, changed."""
    numbers = docs_blocks.Numbers(DOCS / "numbers", HORNER)
    made = {name: f"\n{block(numbers).strip()}\n\n" for name, block in docs_blocks.BLOCKS.items()}
    found = set()
    for page in maker.pages():
        for block in maker.BLOCK.finditer(page.read_text()):
            found.add(block[2])
            assert block[3] == made[block[2]], block[2]
            assert re.search(r"\d", block[3]), f"the block {block[2]} has no number"
            at = block.start(3) + re.search(r"\d", block[3]).start()
            text = page.read_text()
            other = text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1 :]
            assert other != text and maker.made(other, numbers) == text, "a wrong digit is found and put right"
    assert found == set(docs_blocks.BLOCKS), "every block is on a page"


def test_quotes_stand_where_they_are_quoted_from():
    page = " ".join((DOCS / "diagnosis.md").read_text().split())
    for row in json.loads((DOCS / "numbers/diagnosis.json").read_text())["rows"]:
        for quote in row["quotes"]:
            assert " ".join(quote.split()) in page, quote
        for number in re.findall(r"\d[\d,.]*\d", row["found"]):
            assert number in page, f"{number} is not in diagnosis.md"


def test_every_picture_is_drawn_from_numbers():
    pictures = {p.name for p in DOCS.iterdir() if p.suffix in (".png", ".svg")}
    assert pictures == KEPT | set(maker.PICTURES)
    shown = {Path(m).name for p in [*DOCS.glob("*.md"), ROOT / "README.md"] for m in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", p.read_text())}
    assert pictures == {name for name in shown if not name.startswith("http")}


def test_every_file_of_numbers_is_small_and_used():
    used = (ROOT / "scripts/docs.py").read_text() + (ROOT / "scripts/docs_blocks.py").read_text()
    for file in (DOCS / "numbers").iterdir():
        assert file.stat().st_size < 500_000, file
        numbers = json.loads(file.read_text())
        assert "source" in numbers or numbers["horner-runs"] == 1
        assert f'"{file.stem}"' in used, f"nothing uses {file.name}"


def test_intervals_and_corrections_by_hand():
    """Three seeds: scipy.stats.ttest_1samp([-1.6, -2.8, -2.8], 0) has p 0.0266747, interval -4.1211 to -0.6789."""
    mean, half = docs_blocks.interval({"seeds": [-1.6, -2.8, -2.8]})
    assert abs(mean + 2.4) < 1e-12 and abs(half - 1.72106) < 1e-4
    assert abs(docs_blocks.p_of(mean, half) - 0.0266747) < 1e-4
    assert docs_blocks.holm([0.01, 0.04, 0.03]) == [0.03, 0.06, 0.06]
