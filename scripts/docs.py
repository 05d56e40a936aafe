"""Tables, sentences and pictures of docs/ from the numbers in docs/numbers.

    scripts/docs.py build/horner              writes the blocks of the pages and the pictures (`make docs`)
    scripts/docs.py build/horner --check      prints what differs, and fails if anything does; draws nothing
    scripts/docs.py build/horner --text       writes the blocks alone

A block of a page stands between `<!-- made by scripts/docs.py: NAME -->` and `<!-- end -->`; scripts/docs_blocks.py has its function. A
file of numbers is one of `horner report DIR --numbers FILE`, or was transcribed from a page and says so under "source".
"""

import difflib
import json
import re
import shutil
import sys
import tempfile
from pathlib import Path

import docs_blocks

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
BLOCK = re.compile(r"(<!-- made by scripts/docs.py: ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.S)

# A picture: the file of runs whose report it is of, with its first sections and the summary (top) or those whose headings have these
# words; or a function of docs_blocks that makes a report.
PICTURES = {
    "study.png": {"runs": "quick", "top": 3},
    "ablation.png": {"report": docs_blocks.ablation_chart},
    "orders.png": {"report": docs_blocks.orders_chart},
    "state-tracking.png": {"report": docs_blocks.state_tracking_chart},
    "recall-state.png": {"runs": "recall-state", "headings": ["Best first", "validation accuracy"]},
    "normalisers.png": {"runs": "normalisers-small", "headings": ["Longer sequences", "Best first"]},
}


def pages():
    return [p for p in sorted(DOCS.glob("*.md")) if BLOCK.search(p.read_text())]


def made(text, numbers):
    """The text of a page with its blocks as the numbers have them."""

    def block(m):
        if m[2] not in docs_blocks.BLOCKS:
            raise SystemExit(f"no block '{m[2]}'; possible: {', '.join(docs_blocks.BLOCKS)}")
        return f"{m[1]}\n{docs_blocks.BLOCKS[m[2]](numbers).strip()}\n\n{m[4]}"

    return BLOCK.sub(block, text)


def template():
    page = ROOT / "build" / "web" / "report.html"
    if not page.exists():
        raise SystemExit("pictures require the report page: install npm and build horner")
    return page.read_text()


def shoot(browser, html, picture, out):
    """The picture of all sections of a page, or of the first ones with the summary."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.html"
        path.write_text(html)
        page = browser.new_context(viewport={"width": 1280, "height": 1000}, color_scheme="light").new_page()
        page.set_default_timeout(180_000)
        page.goto(path.as_uri())
        page.locator(".chart canvas").first.wait_for(state="attached")
        page.wait_for_timeout(1000)
        boxes = [s.bounding_box() for s in page.locator(".sections > section").all()]
        chosen = [page.locator("header").bounding_box(), *boxes[: picture["top"]]] if "top" in picture else boxes
        left, top = min(b["x"] for b in chosen) - 12, min(b["y"] for b in chosen) - 12
        right = max(b["x"] + b["width"] for b in chosen) + 12
        bottom = max(b["y"] + b["height"] for b in chosen) + 12
        clip = {"x": max(left, 0), "y": max(top, 0), "width": right - left, "height": bottom - top}
        page.screenshot(path=out, clip=clip, full_page=True)
        page.context.close()


def draw(horner, only):
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if not chromium:
        raise SystemExit("pictures require Chromium: scripts/install-packages test")
    numbers = docs_blocks.Numbers(DOCS / "numbers", horner)
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for name, picture in PICTURES.items():
            if only and name not in only:
                continue
            report = numbers.report(picture["runs"]) if "runs" in picture else picture["report"](numbers)
            if "headings" in picture:
                chosen = [s for s in report["sections"] if any(h in s["heading"] for h in picture["headings"])]
                report = {**report, "summary": [], "sections": [{**s, "half": True} for s in chosen]}
            text = json.dumps(report).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
            shoot(browser, template().replace("/*report*/", text), picture, DOCS / name)
            print(DOCS / name)
        browser.close()


def main(horner, *words):
    numbers = docs_blocks.Numbers(DOCS / "numbers", horner)
    wrong = False
    for page in pages():
        is_there = page.read_text()
        wanted = made(is_there, numbers)
        if wanted == is_there:
            continue
        wrong = True
        if "--check" in words:
            sys.stdout.writelines(difflib.unified_diff(is_there.splitlines(True), wanted.splitlines(True), f"docs/{page.name}", "by its numbers"))
        else:
            page.write_text(wanted)
            print(page)
    if "--check" in words:
        raise SystemExit(1 if wrong else 0)
    if "--text" not in words:
        draw(horner, [w for w in words if w.endswith(".png")])


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
