"""The report page in a real browser: a section of every kind, and names that contain markup."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

BUILD = Path(os.environ.get("HORNER", "build/horner")).parent
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
HOSTILE = "<img src=x onerror=alert(1)></script><script>alert(2)</script>&amp;\u2028'\"$&"

try:
    from playwright.sync_api import sync_playwright
except ImportError:
    sync_playwright = None

pytestmark = pytest.mark.skipif(
    not CHROMIUM or not sync_playwright, reason="requires Chromium and Playwright"
)


def page_file(folder, name="a run"):
    out = folder / "report.html"
    done = subprocess.run([BUILD / "report_tool", out, name])
    if done.returncode == 3:
        pytest.skip("built without npm: no report page")
    assert done.returncode == 0
    return out


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return page_file(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    return page_file(tmp_path_factory.mktemp("hostile"), HOSTILE)


@pytest.fixture(scope="module")
def browser():
    quiet = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
    with sync_playwright() as p:
        b = p.chromium.launch(executable_path=CHROMIUM, args=[*quiet, "--disable-sync", "--no-first-run"])
        yield b
        b.close()


def opened(browser, path, width=1280, scheme="light"):
    """The page, and its problems: messages, errors, requests, dialogs."""
    page = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme).new_page()
    page.set_default_timeout(180_000)  # ms: other tests share the cores
    wrong = []
    ours = "willReadFrequently"  # a warning about pixels() below, not about the page
    page.on("console", lambda m: ours in m.text or wrong.append(f"{m.type}: {m.text}"))
    page.on("pageerror", lambda e: wrong.append(f"error: {e}"))
    page.on("dialog", lambda d: (wrong.append(f"dialog: {d.message}"), d.dismiss()))
    page.on("request", lambda r: r.url == path.as_uri() or wrong.append(f"request: {r.url}"))
    page.goto(path.as_uri())
    page.locator(".chart canvas").nth(5).wait_for(state="attached")
    page.wait_for_timeout(200)
    return page, wrong


def pixels(page, section):
    """The number of pixels of each colour in a section's charts."""
    return page.evaluate(
        """s => {
          const n = {};
          for (const c of document.querySelectorAll('section')[s].querySelectorAll('canvas')) {
            const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
            for (let i = 0; i < d.length; i += 4)
              if (d[i + 3] > 250) { const k = [d[i], d[i + 1], d[i + 2]].join(); n[k] = (n[k] || 0) + 1; }
          }
          return n;
        }""",
        section,
    )


def colour_of(entry):
    style = entry.locator(".chip").evaluate("e => getComputedStyle(e).backgroundColor")
    return ",".join(re.findall(r"\d+", style)[:3])


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 375])
def test_opens_without_errors_or_requests_and_fits(browser, plain, width, scheme):
    page, wrong = opened(browser, plain, width, scheme)
    assert wrong == []
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.locator("section").count() == 8
    ink, paper = page.evaluate("[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]")
    brightness = [sum(map(int, re.findall(r"\d+", c)[:3])) for c in (ink, paper)]
    assert (brightness[0] > brightness[1] + 400) if scheme == "dark" else (brightness[1] > brightness[0] + 400)
    for section in range(page.locator("section").count()):
        if page.locator("section").nth(section).locator("canvas").count():
            assert len(pixels(page, section)) > 3, "an empty chart"


def test_colours_follow_the_system_while_it_is_open(browser, plain):
    page, wrong = opened(browser, plain)
    chip = page.locator("section").first.get_by_role("button", name="softmax")
    before = colour_of(chip)
    page.emulate_media(color_scheme="dark")
    page.wait_for_timeout(200)
    assert colour_of(chip) != before and wrong == []
    assert pixels(page, 0).get(colour_of(chip), 0) > 20, "softmax is drawn in its new colour"


def test_every_run_is_in_the_legend_and_a_click_hides_it(browser, plain):
    page, wrong = opened(browser, plain)
    section = page.locator("section").first
    names = section.locator(".legend .entry").all_inner_texts()
    assert names == ["softmax", "a run", "a gap", *(f"taylor{n}" for n in range(1, 7)), "linear_elu", "linear_relu"]
    entry = section.get_by_role("button", name="taylor1", exact=True)
    colour = colour_of(entry)
    assert pixels(page, 0).get(colour, 0) > 20
    entry.click()
    assert entry.get_attribute("aria-pressed") == "false" and pixels(page, 0).get(colour, 0) == 0
    entry.click()
    assert entry.get_attribute("aria-pressed") == "true" and pixels(page, 0).get(colour, 0) > 20
    section.get_by_role("button", name="taylor", exact=True).click()  # the group
    assert pixels(page, 0).get(colour, 0) == 0
    pressed = section.locator(".legend .entry").evaluate_all("all => all.filter(e => e.ariaPressed === 'false').map(e => e.textContent)")
    assert pressed == [f"taylor{n}" for n in range(1, 7)]
    section.get_by_role("button", name="linear_elu").dblclick()  # alone with the reference
    pressed = section.locator(".legend .entry").evaluate_all("all => all.filter(e => e.ariaPressed === 'true').map(e => e.textContent)")
    assert pressed == ["softmax", "linear_elu"] and wrong == []


def test_markup_in_names_is_text(browser, hostile):
    source = hostile.read_text()
    assert source.count("<script") == 2 and "<img" not in source
    page, wrong = opened(browser, hostile)
    assert wrong == [] and page.locator("img").count() == 0
    shown = HOSTILE.replace("\u2028", "")
    clean = lambda s: s.replace("\u2028", "").replace("\n", "")
    assert clean(page.locator("h1").text_content()) == "Sample " + shown
    assert clean(page.locator("h2").nth(1).text_content()) == "Loss " + shown
    assert clean(page.locator("section").first.locator(".entry").nth(1).text_content()) == shown
    assert clean(page.locator("td").nth(2).text_content()) == shown
    assert clean(page.locator("dd.code").text_content()).endswith(shown)
    box = page.locator("section").first.locator("canvas").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_timeout(300)
    assert shown in clean(page.locator(".tip").first.text_content())
    data = json.loads(page.locator("#report").text_content())
    assert data["title"] == "Sample " + HOSTILE
    assert wrong == [] and page.locator("img").count() == 0


def test_hover_zoom_and_switches(browser, plain):
    page, wrong = opened(browser, plain)
    section = page.locator("section").first
    canvas = section.locator("canvas")
    box = canvas.bounding_box()
    at = lambda x, y: (box["x"] + x * box["width"], box["y"] + y * box["height"])
    page.mouse.move(*at(0.5, 0.5))
    page.wait_for_timeout(300)
    assert re.search(r"step \d+.*softmax", page.locator(".tip").first.text_content(), re.S)
    picture = canvas.screenshot()
    page.mouse.move(*at(0.3, 0.2))
    page.mouse.down()
    page.mouse.move(*at(0.6, 0.8))
    page.mouse.up()
    page.mouse.move(0, 0)
    page.wait_for_timeout(200)
    zoomed = canvas.screenshot()
    assert zoomed != picture
    canvas.dblclick(position={"x": 200, "y": 100})
    page.mouse.move(0, 0)
    page.wait_for_timeout(200)
    whole = canvas.screenshot()
    assert whole != zoomed
    section.get_by_role("button", name="log y").click()
    page.mouse.move(0, 0)
    page.wait_for_timeout(200)
    assert canvas.screenshot() != whole and wrong == []


def test_tables_sort_and_charts_are_saved(browser, plain):
    page, wrong = opened(browser, plain)
    table = page.locator("table")
    first = lambda: table.locator("tbody td:first-child").all_inner_texts()
    assert first() == ["taylor10", "taylor2", "a run", "softmax"]
    table.get_by_role("button", name="loss").click()
    assert first() == ["softmax", "taylor10", "taylor2", "a run"]
    table.get_by_role("button", name="loss").click()
    assert first() == ["taylor2", "taylor10", "softmax", "a run"], "missing values stay last"
    table.get_by_role("button", name="name").click()
    assert first() == ["a run", "softmax", "taylor2", "taylor10"], "names sort in natural order"
    with page.expect_download() as saved:
        page.get_by_role("button", name="PNG").first.click()
    assert saved.value.suggested_filename == "loss-a-run.png"
    assert Path(saved.value.path()).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    with page.expect_download() as saved:
        page.get_by_role("button", name="CSV").click()
    assert Path(saved.value.path()).read_text().splitlines()[:2] == ["name,loss,note", "a run,,x"]
    assert wrong == []


def test_a_click_on_a_cell_shows_its_details(browser, plain):
    page, wrong = opened(browser, plain)
    heat = page.locator("section").nth(5)
    box = heat.locator(".chart").bounding_box()
    for x in range(20, int(box["width"]) - 20, 40):
        heat.locator(".chart").click(position={"x": x, "y": 70})
        if heat.locator("section").count():
            break
    assert heat.locator("section h2").text_content() == "Head 1.2 a run"
    assert wrong == []


def made_up_runs(folder, names):
    """Folders like those of `horner train`: every variant, two seeds, two tasks."""
    for task in ("text", "recall:pairs=16"):
        for i, name in enumerate(names):
            for seed in (0, 1):
                run = folder / f"{task[:4]}-{i}-{seed}"
                run.mkdir(parents=True)
                loss = 2 + 0.1 * i + 0.01 * seed
                settings = {"model": "tiny", "attention": name, "task": task, "seed": seed, "steps": 30}
                (run / "settings.json").write_text(json.dumps(settings))
                lines = [{"step": s, "loss": loss + 3 / s, "gradient_norm": 1 / s, "tokens_per_second": 1e5} for s in range(1, 31)]
                lines[19]["entropy"] = [1.5, 0.5 + i]
                lines += [{"step": s, "validation_loss": loss, "validation_accuracy": 1 / (1 + i)} for s in (10, 20, 30)]
                (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
                result = {"finished": True, "steps": 30, "validation_loss": loss, "tokens_per_second": 1e5, "device": "none"}
                (run / "result.json").write_text(json.dumps(result))


def change(i):
    """The loss of the i-th made-up variant against the first: mean and 95 % interval of two seeds, in words."""
    by = [(2 + 0.1 * i + 0.01 * seed) / (2 + 0.01 * seed) - 1 for seed in (0, 1)]
    mean, half = sum(by) / 2, 12.706204736174694 * abs(by[0] - by[1]) / 2  # t of 1 degree of freedom; the mean's error is |a - b| / 2
    words = [("+" if x >= 0 else "−") + f"{abs(100 * x):.{1 if abs(100 * x) < 9.95 else 0}f} %" for x in (mean, mean - half, mean + half)]
    return f"{words[0]} ({words[1]} to {words[2]})"


def test_an_order_is_a_point_of_its_own_family(tmp_path):
    made_up_runs(tmp_path, ["softmax", "taylor1", "taylor2", "raw_taylor1", "raw_taylor3", "centred_taylor2", "taylor2:norm=l2", "taylor2:denominator=nothing"])
    done = subprocess.run([BUILD / "horner", "report", tmp_path, "--json"], check=True, capture_output=True, text=True)
    said = " ".join(json.loads(done.stdout)["findings"])
    assert f"The series of exp, truncated at order 1 {change(1)} and 2 {change(2)}." in said
    assert f"without a floor under its sum, truncated at order 1 {change(3)} and 3 {change(4)}." in said
    assert f"The series with other stages: taylor2:denominator=nothing {change(7)} and taylor2:norm=l2 {change(6)}." in said
    sections = {s["heading"]: s["content"] for s in json.loads((tmp_path / "report.json").read_text())["sections"]}
    sweep = {s["name"]: [p[0] for p in s["points"]] for s in sections["Orders: Text"]["series"]}
    assert sweep["plain"] == [1, 2] and sweep["plain, raw sum"] == [1, 3] and sweep["centred"] == [2]


@pytest.mark.parametrize("width", [1280, 390])
def test_wide_tables_scroll_and_long_text_wraps(browser, tmp_path, width):
    made_up_runs(tmp_path, ["softmax", "l2", "taylor1", "centred_taylor2", "linear_elu"])
    subprocess.run([BUILD / "horner", "report", tmp_path], check=True, capture_output=True)
    if not (tmp_path / "report.html").exists():
        pytest.skip("built without npm: no report page")
    page, _ = opened(browser, tmp_path / "report.html", width)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    for box in page.locator(".wide").all():
        inner, outer, right = box.evaluate("e => [e.scrollWidth, e.clientWidth, e.getBoundingClientRect().right]")
        assert right <= width and inner < 4 * max(outer, 500)
        assert all(w <= 36 * 16 + 32 for w in box.locator("td").evaluate_all("all => all.map(e => e.offsetWidth)"))
        if inner > outer:  # the last column can be reached, and the names stay
            box.evaluate("e => { e.scrollLeft = e.scrollWidth; }")
            page.wait_for_timeout(100)
            last, first, left = (box.locator(f"tbody tr:first-child td:{which}-child").bounding_box() for which in ("last", "first", "first"))
            edge = box.bounding_box()
            assert last["x"] + last["width"] <= edge["x"] + edge["width"] + 1
            assert abs(first["x"] - edge["x"]) <= 1 and first["width"] < 0.6 * outer


@pytest.mark.parametrize("scheme, width", [("light", 1280), ("dark", 375)])
def test_the_report_of_runs_shows_every_run(browser, tmp_path, scheme, width):
    names = ["softmax", "l2", "taylor1", "taylor2", "centred_taylor2", "linear_elu", "<b>mine</b><script>alert(3)</script>"]
    made_up_runs(tmp_path, names)
    said = subprocess.run([BUILD / "horner", "report", tmp_path], check=True, capture_output=True, text=True).stdout
    if not said.strip().endswith("report.html"):
        pytest.skip("built without npm: no report page")
    page, wrong = opened(browser, tmp_path / "report.html", width, scheme)
    assert wrong == [] and page.locator("b").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") == width
    for heading in ("Text: training loss", "Text: validation loss", "Recall of 16 pairs: validation accuracy", "Text: gradient norm"):
        section = page.locator("section", has=page.get_by_role("heading", name=heading, exact=True))
        assert set(section.locator(".legend .entry").all_inner_texts()) == set(names)
    first = page.locator("table tbody td:first-child").all_inner_texts()
    assert sorted(first) == sorted(2 * names + names[1:] + ["centred_taylor2"])  # results, and comparisons of losses
    entry = page.locator("section", has=page.get_by_role("heading", name="Text: training loss")).locator(".entry", has_text="<b>mine")
    entry.click()
    assert entry.get_attribute("aria-pressed") == "false"
    words = page.locator(".summary li").all_inner_texts()
    assert any(w.startswith("Text: softmax reaches a validation loss of 2.0050 ± 0.0071") for w in words)
    assert any(f"order 1 {change(2)} and 2 {change(3)}" in w for w in words)
    assert wrong == []
