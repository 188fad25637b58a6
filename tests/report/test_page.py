"""The report's page, and what a notebook shows, in a real browser: as read, pressed and printed."""

import dataclasses
import io
import itertools
import re
import shutil
from pathlib import Path

import pytest

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright (dev extra)")
Image = pytest.importorskip("PIL.Image", reason="needs the cli extra")
pytest.importorskip("skimage", reason="needs the cli extra")
pytest.importorskip("matplotlib", reason="needs the plots extra")

import spear
from spear.report import Drawing, Level, Remark, Report, Table, evidence, words
from spear.report.page import render
from spear.report.pictures import data_uri
from support import reports

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
KINDS = reports.every()
OPEN_ALL = "document.querySelectorAll('details').forEach(one => one.open = true)"
WIDTH = "document.documentElement.scrollWidth"
PAPER = "getComputedStyle(document.body).backgroundColor"

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium on the PATH")


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def window(browser):
    """One tab for all pages that need no options of their own, and what it complains of or fetches."""
    page, complaints = browser.new_page(), []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", lambda dialog: (complaints.append("a dialog"), dialog.dismiss()))
    page.on(
        "request",
        lambda request: (
            request.url.startswith(("file:", "data:")) or complaints.append(request.url)
        ),
    )
    yield page, complaints
    page.close()


@pytest.fixture
def opened(window, tmp_path):
    """Opens a report's page from disk; whatever it complains of or fetches fails the test."""
    page, complaints = window

    def open_page(report, width=1280):
        page.set_viewport_size({"width": width, "height": 800})
        page.emulate_media(media="screen", color_scheme="light")
        page.goto(written(report, tmp_path / "page.html"))
        return page

    yield open_page
    told, complaints[:] = list(complaints), []
    assert told == []


def written(report, path):
    text = report if isinstance(report, str) else render(report)
    path.write_text(text, encoding="utf-8")
    return path.as_uri()


def texts(page, selector):
    return page.locator(selector).all_inner_texts()


def focused(page):
    return page.evaluate("document.activeElement.getAttribute('aria-label')")


CONTRASTS = """(within) => {
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const known = {};
  const rgb = (colour) => known[colour] ??= (() => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  })();
  const linear = (v) => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const light = (c) => {
    const [r, g, b] = c.map((v) => linear(v / 255));
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const bad = [];
  for (const element of document.querySelectorAll(within + ' *')) {
    if (![...element.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim())) continue;
    if (!element.checkVisibility()) continue;
    let back = element;
    while (rgb(getComputedStyle(back).backgroundColor)[3] < 255) back = back.parentElement;
    const a = light(rgb(getComputedStyle(element).color));
    const b = light(rgb(getComputedStyle(back).backgroundColor));
    const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    if (ratio < 4.5) bad.push(`${element.className} ${element.textContent.trim()}: ${ratio}`);
  }
  return bad;
}"""
WORDS = {
    "partial": "Partly recovered",
    "failure": "Nothing recovered",
    "inconclusive": "Cannot tell",
    "audit": "Results",
    "bare": "Results",
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_read_on_any_screen(opened, kind):
    page = opened(KINDS[kind])
    page.evaluate(OPEN_ALL)
    assert page.inner_text("main > :first-child .word") == WORDS.get(kind, "Recovered exactly")
    assert page.inner_text(".say") == KINDS[kind].headline
    assert ("no guarantee" in page.inner_text(".means")) == (kind in ("failure", "audit", "bare"))
    for width in (1280, 700, 360):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate(WIDTH) <= width
    assert page.evaluate("[...document.images].every(i => i.complete && i.naturalWidth && i.alt)")
    heads = "[...document.querySelectorAll('h1,h2,h3,h4')].map(h => Number(h.tagName[1]))"
    levels = page.evaluate(heads)
    assert levels.count(1) == 1
    assert all(b - a <= 1 for a, b in itertools.pairwise(levels))  # no level is skipped
    assert page.evaluate("new Set([...document.querySelectorAll('[id]')].map(e => e.id)).size") == (
        page.locator("[id]").count()
    )
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate(CONTRASTS, "body") == [], scheme
        bright = sum(map(int, re.findall(r"\d+", page.evaluate(PAPER))))
        assert bright > 700 if scheme == "light" else bright < 100


def test_images_and_headings_are_named_once(opened):
    page = opened(KINDS["partial"])
    first = page.locator(".card .zoom").first
    assert first.get_attribute("aria-label") == "Enlarge Sample 1"
    assert first.inner_text() == ""  # no words beside the name that a reader hears
    assert page.locator(".card .zoom[aria-label$='not recovered']").count() == 2
    assert page.locator("html").get_attribute("lang") == "en"
    assert page.evaluate("[...document.querySelectorAll('th')].every(h => h.scope && h.innerText)")
    plot = opened(KINDS["audit"]).locator(".drawing img").first
    assert plot.get_attribute("alt") == "The leakage frontier. Batches that came back whole."


def test_no_option_and_no_setting_is_torn_over_two_lines(opened):
    words = "Add --noise-multiplier 1, or set C = 1 or more."
    page = opened(Report("audit", "t", words, remarks=(Remark(Level.NOTE, "s", words),)))
    assert texts(page, "#remarks .option") == ["--noise-multiplier"]
    assert page.locator(".option").first.evaluate("o => getComputedStyle(o).whiteSpace") == "nowrap"
    assert "C\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}1" in page.inner_text(".say")


def test_what_the_verdict_says_is_not_said_again(opened):
    found, said = KINDS["exact"].findings[0], "all 6 samples visible in the update were recovered"
    found = dataclasses.replace(found, reason=f"{said}, proved by replay")
    page = opened(Report("inversion", "t", found.headline, (found,)))
    assert page.inner_text("main").lower().count(said) == 1
    assert page.inner_text(".facts dd").startswith("'0' (192 -> 40")


def test_every_tone_can_be_read(opened):
    page, grounds = opened(KINDS["exact"]), set()
    for tone in ("exact", "partial", "approximate", "inconclusive", "failed", "neutral"):
        page.evaluate(
            "tone => document.querySelector('.verdict').className = `verdict tone-${tone}`", tone
        )
        assert page.locator(f"#icon-{tone}").count() == 1
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            assert page.evaluate(CONTRASTS, ".verdict") == [], (tone, scheme)
            tint = "getComputedStyle(document.querySelector('.verdict')).backgroundColor"
            grounds.add(page.evaluate(tint))
    assert len(grounds) == 12


def test_originals_stand_beside_their_recoveries(opened):
    found = KINDS["partial"].findings[0]
    cards = opened(KINDS["partial"]).locator(".card")
    assert cards.count() == 6
    true, back = map(found.image_format.pictures, (found.truth.inputs, found.inputs))
    missing = sorted({*range(6)} - {*found.truth.index})
    for i, j in enumerate((*found.truth.index, *missing)):
        card = cards.nth(i)
        title = f"Sample {i + 1}" if i < 4 else f"photo {j}"
        assert card.locator(".name").inner_text() == title
        assert card.locator("img").first.get_attribute("src") == data_uri(true[j])
        if i < 4:
            assert card.locator(".label .soft").inner_text() == f"photo {j}"
            assert card.locator("img").nth(1).get_attribute("src") == data_uri(back[i])
            sure = "certified" if found.certified[i] else "not certified"
            assert card.locator(".mark").inner_text() == sure
        else:
            assert card.locator("img").count() == 1
            assert card.locator(".empty").inner_text() == "not recovered"
            assert card.locator(".mark").inner_text() == "not recovered"


def test_values_are_shown_where_there_are_no_pictures(opened):
    found = KINDS["tabular"].findings[0]
    page = opened(KINDS["tabular"])
    first = page.locator(".values tbody").first
    j = found.truth.index[0]
    for line, rows, row in (("recovered", found.inputs, 0), ("original", found.truth.inputs, j)):
        shown = first.locator(f".{line} td").all_inner_texts()
        assert len(shown) == evidence.MOST_COLUMNS
        numbers = [float(text) for text in shown]
        assert numbers == pytest.approx(rows[row, : len(shown)].tolist(), rel=1e-3, abs=1e-3)
    gaps = first.locator(".difference td").all_inner_texts()
    assert all(abs(float(text)) < 1e-9 for text in gaps)
    assert "95 more values" in page.inner_text(".finding")
    assert page.locator(".gallery").count() == 0


def test_too_many_pictures_are_left_out_and_counted(opened, monkeypatch):
    report = Report("inversion", "Many", "Many.", (reports.finding(70, 70),))
    page = opened(report)
    assert page.locator(".card").count() == 64
    assert "6 more samples are not shown" in page.inner_text(".finding")
    assert page.locator("#findings .sortable tbody tr").count() == 70
    monkeypatch.setattr(evidence.PictureBudget.__init__, "__defaults__", (1000,))
    small = render(report)
    assert 1 <= small.count('class="card ') <= 3
    assert "more samples are not shown" in small


def test_tables_are_sorted_from_the_keyboard(opened):
    rows = ((10, "b10"), (9, "b9"), (None, "a"), (-1.5, "B2"), (1e-7, None), (10_000, "c"))
    page = opened(Report("audit", "t", "h", tables=(Table("T", ("n", "words"), rows),)))
    number, word = page.locator("#tables th button").all()
    number.focus()
    page.keyboard.press("Enter")
    assert texts(page, "#tables td:first-child") == ["-1.5", "1e-07", "9", "10", "10,000", "–"]
    assert page.locator("#tables th").first.get_attribute("aria-sort") == "ascending"
    page.keyboard.press("Space")
    assert texts(page, "#tables td:first-child") == ["10,000", "10", "9", "1e-07", "-1.5", "–"]
    assert page.locator("#tables th").first.get_attribute("aria-sort") == "descending"
    page.keyboard.press("Tab")
    assert word.evaluate("button => button === document.activeElement")
    page.keyboard.press("Enter")
    assert texts(page, "#tables td:nth-child(2)") == ["a", "B2", "b9", "b10", "c", "–"]
    assert page.locator("#tables th[aria-sort]").count() == 1


def test_the_overview_sorts_by_severity_and_leads_to_each_update(opened):
    page = opened(KINDS["flower"])
    assert page.locator("details.finding").count() == 10
    assert page.locator("details.finding[open]").count() == 0
    head = page.locator("th button", has_text="outcome").first
    head.press("Enter")
    head.press("Enter")
    words = [
        "Recovered exactly",
        "Partly recovered",
        "Recovered approximately",
        "Cannot tell",
        "Nothing recovered",
    ]
    names = texts(page, "#findings > div.panel td:nth-child(2)")
    assert names == [word for word in words for _ in range(2)]
    page.locator("#findings td a", has_text="round 2, client 1").press("Enter")
    page.wait_for_selector("#finding-10[open]")
    assert page.evaluate("document.activeElement.parentElement.id") == "finding-10"
    page.locator("#all").press("Enter")
    assert page.locator("details.finding[open]").count() == 10


def test_pictures_are_enlarged_from_the_keyboard(opened):
    page = opened(KINDS["partial"])
    first = page.locator(".zoom").first
    first.focus()
    page.keyboard.press("Enter")
    box = page.locator("#lightbox")
    assert box.evaluate("dialog => dialog.open")
    assert page.inner_text("#lightbox-name") == "Sample 1"
    small = first.locator("img").first.evaluate("i => i.clientWidth")
    large = box.locator("img").first.evaluate("i => i.clientWidth")
    assert large > 2 * small
    look = "i => getComputedStyle(i).imageRendering"
    assert box.locator("img").first.evaluate(look) == "pixelated"
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#lightbox-name") == "Sample 2"
    assert page.inner_text("#lightbox-count") == "2 of 6"
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert page.inner_text("#lightbox-count") == "6 of 6"
    assert page.inner_text("#lightbox-note") == "not recovered"
    last = page.inner_text("#lightbox-name") + ": not recovered"
    page.keyboard.press("Escape")
    assert not box.evaluate("dialog => dialog.open")
    assert focused(page) == f"Enlarge {last}"
    page.keyboard.press("Space")
    page.locator("#lightbox-close").click()
    assert focused(page) == f"Enlarge {last}"


def test_drawings_are_images_and_are_enlarged(opened):
    page = opened(KINDS["audit"])
    assert page.locator("main svg script, main object, main embed, iframe").count() == 0
    page.locator(".drawing .zoom").first.press("Enter")
    assert page.inner_text("#lightbox-name") == "The leakage frontier"
    assert page.locator("#lightbox img").evaluate("i => i.clientWidth") > 600


def brightness(page, selector):
    """The darkest and the lightest grey that a reader sees within the element."""
    shot = Image.open(io.BytesIO(page.locator(selector).first.screenshot()))
    return shot.convert("L").getextrema()


def test_plots_follow_the_colour_scheme_and_plain_drawings_stay_on_white(opened):
    report = KINDS["audit"]
    page = opened(report)
    assert brightness(page, ".drawing img") == (0, 255)
    page.emulate_media(color_scheme="dark")
    dark, light = brightness(page, ".drawing img")
    assert 20 < dark < 40  # the card, and nothing black on it
    assert 200 < light < 245
    page.emulate_media(media="print", color_scheme="dark")
    assert brightness(page, ".drawing img") == (0, 255)
    plain = dataclasses.replace(report, drawings=(Drawing("Mine", SVG, ""),))
    page = opened(plain)
    page.emulate_media(color_scheme="dark")
    assert brightness(page, ".drawing img") == (0, 255)


@pytest.mark.parametrize("width", [400, 800, 1280])
def test_the_letters_of_a_plot_are_large_enough_to_read(opened, width):
    drawing = KINDS["audit"].drawings[0]
    page = opened(dataclasses.replace(KINDS["audit"], drawings=(drawing,) * 3), width)
    points = min(100 * float(scale) for scale in re.findall(r"scale\((0\.\d+) -", drawing.svg))
    drawn = float(re.search(r'viewBox="0 0 ([\d.]+)', drawing.svg)[1])
    shown = page.locator(".drawing img").first.evaluate("i => i.clientWidth")
    assert points * shown / drawn >= 11


def test_everything_is_open_in_print(opened):
    page = opened(KINDS["flower"], width=700)
    assert page.locator("details[open]").count() == 0
    page.emulate_media(media="print", color_scheme="dark")
    page.wait_for_function("document.querySelectorAll('details:not([open])').length === 0")
    assert not any(button.is_visible() for button in page.locator(".tools button").all())
    assert page.evaluate(PAPER) == "rgb(255, 255, 255)"
    assert page.locator("#finding-3 .card").first.is_visible()
    assert page.locator(".verdict").is_visible()
    assert not page.locator(".onward, nav").first.is_visible()  # nobody follows them on paper
    link = page.locator("#findings td a").first
    assert link.evaluate("a => getComputedStyle(a).color") == "rgb(0, 0, 0)"
    inside = "() => [...document.querySelectorAll('.verdict,.drawing,.remarks li,tr,.steps li')]"
    cut = inside + ".filter(one => getComputedStyle(one).breakInside !== 'avoid').length"
    assert page.evaluate(cut) == 0
    assert page.evaluate("getComputedStyle(document.querySelector('.card')).breakInside") == "avoid"
    assert page.evaluate(WIDTH) <= 700
    assert page.pdf(format="A4").startswith(b"%PDF")
    page.emulate_media(media="screen")
    page.wait_for_function("document.querySelectorAll('details[open]').length === 0")


def test_the_page_reads_without_scripts(browser, tmp_path):
    page = browser.new_page(java_script_enabled=False)
    page.goto(written(KINDS["flower"], tmp_path / "page.html"))
    assert not page.locator("#all").is_visible()
    page.locator("#finding-1 > summary").click()
    assert page.locator("#finding-1 .card").first.is_visible()
    page.close()


def test_the_skip_link_and_focus_are_seen(opened):
    page = opened(KINDS["exact"])
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    assert page.evaluate("document.activeElement.getBoundingClientRect().top") >= 0
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.keyboard.press("Tab")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    assert page.inner_text("#command") == KINDS["exact"].settings["command"]


HOSTILE = [
    "</script><img src=x onerror=alert(1)>",
    '"onmouseover="alert(1)" autofocus onfocus="alert(1)',
    "' onload='alert(1)",
    "</style></title></textarea>--><svg onload=alert(1)>",
    "{{7*7}}{% raw %}<b>${7*7}</b>",
    "javascript:alert(1)//",
    "\u202egnp.exe\u202c مرحبا שלום",
    "🦔👩‍👩‍👧‍👦 emoji",
]
SVG = (
    '<svg xmlns="http://www.w3.org/2000/svg" onload="alert(1)"><script>alert(1)</script>'
    '<rect width="9" height="9"/></svg>'
)


def named(word):
    """A report in which everything that can have a name has this one."""
    stats = {word: 0.5, word + "s": 7, "search": 1.0}
    texts = {"name": word, "reason": word, "notes": (word, word), "assumptions": (word,)}
    found = reports.finding(3, 4, layer=f"{word}\n{word}", stats=stats, **texts)
    flat = reports.finding(2, 2, image_format=None, name=word)
    found, flat = (
        dataclasses.replace(
            one, truth=dataclasses.replace(one.truth, names=(word,) * len(one.truth.names))
        )
        for one in (found, flat)
    )
    return Report(
        word,
        word,
        word,
        (found, flat),
        tuple(Remark(level, word, word) for level in Level),
        (Table(word, (word, "b" + word), ((word, 1.5), (None, word)), word),),
        (Drawing(word, SVG, word),),
        {"command": word, word: word, "nested": {word: [word]}},
        {word: word, "spear": word},
        word,
        1.0,
    )


SHAPE = """[...document.querySelectorAll('*')].map(
  e => e.tagName + [...e.attributes].map(a => a.name)).join(' ')"""
GROUND = '<meta charset="utf-8"><body style="background:{};color:{}">'
GROUNDS = [GROUND.format("#fff", "#000"), GROUND.format("#111", "#eee")]  # a notebook's


@pytest.mark.parametrize(
    "word", [" ".join(HOSTILE), " ".join(reversed(HOSTILE)), "a" * 300], ids=["all", "back", "long"]
)
def test_names_stay_names(opened, word):
    harmless = opened(named("harmless"), 360).evaluate(SHAPE)
    page = opened(named(word), 360)
    assert page.evaluate(SHAPE) == harmless
    assert page.locator("script").count() == 1
    assert page.inner_text("h1") == word
    assert page.title() == re.sub(r"\s+", " ", f"{word} – SPEAR")
    assert page.inner_text("#command") == word
    assert page.locator(".gallery img").first.get_attribute("alt") == f"original: {word}"
    page.evaluate(OPEN_ALL)
    assert page.evaluate(WIDTH) <= 360
    assert page.locator(".gallery .label .soft").first.inner_text() == word
    page.locator(".gallery .zoom").first.press("Enter")
    assert page.inner_text("#lightbox-name") == "Sample 1"
    page.keyboard.press("Escape")
    page.locator(".drawing .zoom").first.press("Enter")
    page.keyboard.press("Escape")
    for button in page.locator("th button").all()[:2]:
        button.press("Enter")
    in_a_notebook = opened(GROUNDS[0] + named("harmless")._repr_html_()).evaluate(SHAPE)
    assert opened(GROUNDS[0] + named(word)._repr_html_()).evaluate(SHAPE) == in_a_notebook


@pytest.mark.parametrize("ground", GROUNDS, ids=["light", "dark"])
def test_a_notebook_shows_the_verdict_and_pictures(opened, ground):
    report = KINDS["partial"]
    page = opened(ground + report._repr_html_())
    told = page.inner_text("body")
    for word in ("Partly recovered", report.headline, *report.findings[0].assumptions):
        assert word in told
    assert page.evaluate("[...document.images].map(i => i.naturalWidth)") == [8] * 10
    assert (told.count("not recovered"), told.count("not certified")) == (2, 2)
    assert page.evaluate(CONTRASTS, "body") == []
    many = opened(ground + KINDS["flower"]._repr_html_())
    assert "7 more updates" in many.inner_text("body")
    assert "<img" not in KINDS["redacted"]._repr_html_()


def test_no_script_but_ours_runs(browser, tmp_path):
    """The policy holds even where an escape was missed."""
    text = render(KINDS["exact"]).replace("</main>", "<script>window.hacked = 1</script></main>")
    page = browser.new_page()
    page.goto(written(text, tmp_path / "page.html"))
    assert page.evaluate("window.hacked") is None
    assert page.locator(":root.js").count() == 1
    page.close()


SCROLLED = """[...document.querySelectorAll('.scroll')].filter(e => e.querySelector('.sortable'))
  .filter(e => e.scrollWidth > e.clientWidth + 2).map(e => e.getAttribute('aria-label'))"""


def as_wide_as_a_sweep():
    """The columns and the longest cells of the pages of `spear audit`."""
    leakage = {
        "setting": ("FedAvg, 5 epochs, lr 0.05", "C = 1, z = 0.0003"),
        "verdict": ("whole batches exact", "nothing recovered"),
        "leaks, %": (100, 0),
        "95 % interval": ("16–100", "0–84"),
        "exact, %": (100, 0),
        "best, dB": (171.7, None),
        "accuracy, %": (33.1, 26.1),
        "cost, points": ("-0.1 ± 1.4", None),
    }
    settings = {
        "setting": ("12 clients aggregated",),
        "batch": (8,),
        "protocol": ("FedAvg, 5 epochs, lr 0.05",),
        "C": (1,),
        "σ": (0.000125,),
        "z": (0.0003,),
        "ε": (5.572e6,),
        "precision": ("bfloat16",),
        "pruned": (0.5,),
        "clients": (12,),
    }
    tables = [
        Table(title, tuple(columns), tuple(zip(*columns.values(), strict=True)))
        for title, columns in (("Leakage", leakage), ("Settings", settings))
    ]
    return dataclasses.replace(KINDS["flower"], tables=tuple(tables))


WIDE = {kind: KINDS[kind] for kind in ("exact", "flower", "audit")} | {
    "sweep": as_wide_as_a_sweep()
}


@pytest.mark.parametrize("width", [1280, 800, 400])
@pytest.mark.parametrize("report", WIDE.values(), ids=WIDE)
def test_tables_stay_tables_down_to_800_and_nothing_scrolls_sideways(opened, report, width):
    page = opened(report, width)
    page.evaluate(OPEN_ALL)
    assert page.evaluate(SCROLLED) == []
    assert page.evaluate(WIDTH) == width
    row = page.locator("#advice .sortable tbody tr").first
    shown = ("table-row", "table-cell") if width > 400 else ("grid", "block")
    assert row.evaluate("row => getComputedStyle(row).display") == shown[0]
    look = "cell => [getComputedStyle(cell).display, parseFloat(getComputedStyle(cell).fontSize)]"
    for cell in row.locator("td").all():
        display, size = cell.evaluate(look)
        assert display == shown[1]
        assert 12 <= size <= 16


def test_cards_name_their_values_and_are_still_read_as_a_table(opened):
    page = opened(as_wide_as_a_sweep(), 400)
    row = page.locator("#tables .sortable tbody tr").first
    cells = row.get_by_role("cell").all()
    named = [cell.evaluate("c => getComputedStyle(c, '::before').content") for cell in cells]
    assert named[:2] == ['"verdict"', '"leaks, %"']
    assert row.get_by_role("rowheader").inner_text() == "FedAvg, 5 epochs, lr 0.05"
    assert page.locator("#tables").get_by_role("columnheader").count() == 18
    gap = page.locator("#tables td[data-none]").first
    assert gap.evaluate("cell => getComputedStyle(cell).display") == "none"


def test_stages_and_counts_are_named_in_words(opened):
    page = opened(KINDS["exact"])
    stages = ["reading the batch size", "rest of the search", "proving the samples"]
    assert texts(page, ".bars th") == stages
    assert texts(page, ".work .pairs dt") == ["search passes", "starting points"]


def test_every_stage_and_count_of_the_code_has_words():
    files = Path(spear.__file__).parent.rglob("*.py")
    attacks = [file for file in files if "experiments" not in file.parts]
    source = "\n".join(file.read_text("utf-8") for file in attacks)
    assert set(re.findall(r'\.stage\("(\w+)"\)', source)) == set(words.STAGES)
    assert set(re.findall(r'watch\.count\("(\w+)"', source)) == set(words.COUNTS)


def test_what_may_still_leak_is_called_a_bound(opened):
    heads = texts(opened(KINDS["exact"]), "#advice .sortable thead th")
    assert heads == ["setting", "leaked", "at most (95 % bound)", "cost in training"]


def test_the_verdict_leads_to_what_to_do_now(opened):
    page = opened(KINDS["exact"])
    page.locator(".onward a").press("Enter")
    assert page.evaluate("location.hash") == "#advice"
    assert page.locator("main section").last.get_attribute("id") == "advice"
    assert page.locator("#advice pre").first.inner_text().startswith("spear check --weights")
