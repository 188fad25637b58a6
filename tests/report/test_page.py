"""The report's page in a real browser: what a reader sees, presses and prints, from disk."""

import dataclasses
import itertools
import re
import shutil

import pytest

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright (dev extra)")
pytest.importorskip("skimage", reason="needs the cli extra")
pytest.importorskip("matplotlib", reason="needs the plots extra")

from spear.inversion import Outcome
from spear.report import Drawing, Level, Remark, Report, Table, evidence
from spear.report.page import render
from spear.report.pictures import data_uri
from spear.trials.demo import DemoSettings, run_demo
from support import reports

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
KINDS = reports.every()

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium on the PATH")


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def window(browser):
    """Where pages are opened that need no options of their own: a window costs more than a page."""
    context = browser.new_context()
    yield context
    context.close()


@pytest.fixture
def opened(browser, window, tmp_path):
    """Opens a report's page from disk; whatever it complains of or fetches fails the test."""
    pages, complaints, requests = [], [], []

    def open_page(report, width=1280, prepare=None, **options):
        path = tmp_path / f"{len(pages)}.html"
        text = report if isinstance(report, str) else render(report)
        path.write_text(text, encoding="utf-8")
        page = browser.new_page(**options) if options else window.new_page()
        page.set_viewport_size({"width": width, "height": 800})
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: (complaints.append("a dialog"), dialog.dismiss()))
        page.on("request", lambda request: requests.append(request.url))
        if prepare:
            page.add_init_script(prepare)
        page.goto(path.as_uri())
        pages.append(page)
        return page

    yield open_page
    for page in pages:
        page.close()
    assert complaints == []
    assert all(url.startswith(("file:", "data:")) for url in requests)


def texts(page, selector):
    return page.locator(selector).all_inner_texts()


def focused(page):
    return page.evaluate("document.activeElement.getAttribute('aria-label')")


@pytest.fixture(scope="module")
def demo_page():
    return run_demo(DemoSettings(samples=4, width=80, depth=3, pixels=16)).page()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_demo_works_from_disk(opened, demo_page, scheme):
    page = opened(demo_page, width=360, color_scheme=scheme)
    loaded = page.eval_on_selector_all(
        "img", "images => images.filter(i => i.complete && i.naturalWidth == 16).length"
    )
    assert loaded == 8
    assert page.inner_text("h1") == "What one gradient gave away"
    assert page.inner_text(".word") == "Recovered exactly"
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_fits_its_window_and_shows_its_pictures(opened, kind):
    page = opened(KINDS[kind])
    page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    for width in (1280, 700, 360):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("[...document.images].every(i => i.complete && i.naturalWidth > 0)")
    assert page.evaluate("[...document.images].every(i => i.alt)")
    levels = page.evaluate(
        "[...document.querySelectorAll('h1,h2,h3,h4')].map(h => Number(h.tagName[1]))"
    )
    assert levels.count(1) == 1
    assert all(b - a <= 1 for a, b in itertools.pairwise(levels))  # no level is skipped
    assert page.evaluate("new Set([...document.querySelectorAll('[id]')].map(e => e.id)).size") == (
        page.locator("[id]").count()
    )


@pytest.mark.parametrize(
    ("kind", "word"),
    [
        ("exact", "Recovered exactly"),
        ("partial", "Partly recovered"),
        ("failure", "Nothing recovered"),
        ("inconclusive", "Cannot tell"),
        ("audit", "Results"),
    ],
)
def test_the_verdict_comes_first(opened, kind, word):
    page = opened(KINDS[kind])
    assert page.inner_text(".word") == word
    assert page.inner_text(".say") == KINDS[kind].headline
    assert ("no guarantee" in page.inner_text(".means")) == (kind in ("failure", "audit"))
    order = (
        "document.querySelector('.verdict') === document.querySelector('main').firstElementChild"
    )
    assert page.evaluate(order)


def test_originals_stand_beside_their_recoveries(opened):
    report = KINDS["partial"]
    found = report.findings[0]
    page = opened(report)
    cards = page.locator(".card")
    assert cards.count() == 6
    true, back = (
        found.image_format.pictures(found.truth.inputs),
        found.image_format.pictures(found.inputs),
    )
    for j in range(6):
        card = cards.nth(j)
        assert card.locator(".name").inner_text() == f"photo {j}"
        assert card.locator("img").first.get_attribute("src") == data_uri(true[j])
        if j in found.truth.index:
            i = found.truth.index.index(j)
            assert card.locator("img").nth(1).get_attribute("src") == data_uri(back[i])
            sure = "certified" if found.certified[i] else "not certified"
            assert card.locator(".mark").inner_text() == sure
        else:
            assert card.locator("img").count() == 1
            assert card.locator(".empty").inner_text() == "not recovered"
            assert card.locator(".mark").inner_text() == "not recovered"


def test_values_are_shown_where_there_are_no_pictures(opened):
    found = KINDS["tabular-true"].findings[0]
    page = opened(KINDS["tabular-true"])
    first = page.locator(".values tbody").first
    i = found.truth.index.index(0)
    for line, rows, row in (("recovered", found.inputs, i), ("original", found.truth.inputs, 0)):
        shown = first.locator(f".{line} td").all_inner_texts()
        assert len(shown) == evidence.MOST_COLUMNS
        numbers = [float(text) for text in shown]
        assert numbers == pytest.approx(rows[row, : len(shown)].tolist(), rel=1e-3, abs=1e-3)
    assert all(
        abs(float(text)) < 1e-9 for text in first.locator(".difference td").all_inner_texts()
    )
    assert "95 more values" in page.inner_text(".finding")
    assert page.locator(".gallery").count() == 0


def test_too_many_pictures_are_left_out_and_counted(opened, monkeypatch):
    report = Report("inversion", "Many", "Many.", (reports.finding(70, 70),))
    page = opened(report)
    assert page.locator(".card").count() == 64
    assert "6 more samples are not shown" in page.inner_text(".finding")
    assert page.locator(".sortable tbody tr").count() == 70
    monkeypatch.setattr(evidence.PictureBudget.__init__, "__defaults__", (1000,))
    small = opened(report)
    assert 1 <= small.locator(".card").count() <= 3
    assert "more samples are not shown" in small.inner_text(".finding")


def test_tables_are_sorted_from_the_keyboard(opened):
    rows = ((10, "b10"), (9, "b9"), (None, "a"), (-1.5, "B2"), (1e-7, None), (10_000, "c"))
    page = opened(Report("audit", "t", "h", tables=(Table("T", ("n", "words"), rows),)))
    number, word = page.locator("th button").all()
    number.focus()
    page.keyboard.press("Enter")
    assert texts(page, "td:first-child") == ["-1.5", "1e-07", "9", "10", "10,000", "–"]
    assert page.locator("th").first.get_attribute("aria-sort") == "ascending"
    page.keyboard.press("Space")
    assert texts(page, "td:first-child") == ["10,000", "10", "9", "1e-07", "-1.5", "–"]
    assert page.locator("th").first.get_attribute("aria-sort") == "descending"
    page.keyboard.press("Tab")
    assert word.evaluate("button => button === document.activeElement")
    page.keyboard.press("Enter")
    assert texts(page, "td:nth-child(2)") == ["a", "B2", "b9", "b10", "c", "–"]
    assert page.locator("th[aria-sort]").count() == 1


def test_the_overview_sorts_by_severity_and_leads_to_each_update(opened):
    page = opened(KINDS["flower"])
    assert page.locator("details.finding").count() == 40
    assert page.locator("details.finding[open]").count() == 0
    head = page.locator("th button", has_text="outcome").first
    head.press("Enter")
    head.press("Enter")
    names = texts(page, "#findings > div.panel td:nth-child(2)")
    words = [
        "Recovered exactly",
        "Partly recovered",
        "Recovered approximately",
        "Cannot tell",
        "Nothing recovered",
    ]
    assert names == [word for word in words for _ in range(8)]
    page.locator("#findings td a", has_text="round 2, client 3").press("Enter")
    page.wait_for_selector("#finding-12[open]")
    assert page.evaluate("document.activeElement.parentElement.id") == "finding-12"
    page.locator("#all").press("Enter")
    assert page.locator("details.finding[open]").count() == 40


def test_pictures_are_enlarged_from_the_keyboard(opened):
    page = opened(KINDS["partial"])
    first = page.locator(".zoom").first
    first.focus()
    page.keyboard.press("Enter")
    box = page.locator("#lightbox")
    assert box.evaluate("dialog => dialog.open")
    assert page.inner_text("#lightbox-name") == "photo 0"
    small = first.locator("img").first.evaluate("i => i.clientWidth")
    large = box.locator("img").first.evaluate("i => i.clientWidth")
    assert large > 2 * small
    assert (
        box.locator("img").first.evaluate("i => getComputedStyle(i).imageRendering") == "pixelated"
    )
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#lightbox-name") == "photo 1"
    assert page.inner_text("#lightbox-note") == "not recovered"
    assert page.inner_text("#lightbox-count") == "2 of 6"
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert page.inner_text("#lightbox-count") == "6 of 6"
    page.keyboard.press("Escape")
    assert not box.evaluate("dialog => dialog.open")
    assert focused(page) == "Enlarge photo 5"
    page.keyboard.press("Space")
    page.locator("#lightbox-close").click()
    assert focused(page) == "Enlarge photo 5"


def test_drawings_are_images_and_are_enlarged(opened):
    page = opened(KINDS["audit"])
    assert page.locator("main svg script, main object, main embed, iframe").count() == 0
    page.locator(".drawing .zoom").first.press("Enter")
    assert page.inner_text("#lightbox-name") == "The leakage frontier"
    assert page.locator("#lightbox img").evaluate("i => i.clientWidth") > 600


BLOCKED = """Object.defineProperty(window, 'localStorage', {
  get() { throw new DOMException('no storage here', 'SecurityError'); } });"""


@pytest.mark.parametrize("prepare", [None, BLOCKED], ids=["storage", "no storage"])
def test_the_theme_is_toggled(opened, prepare):
    page = opened(KINDS["exact"], prepare=prepare, color_scheme="dark")
    paper = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(paper)
    page.locator("#theme").press("Enter")
    light = page.evaluate(paper)
    assert sum(map(int, re.findall(r"\d+", light))) > 700
    assert sum(map(int, re.findall(r"\d+", dark))) < 100
    assert page.get_attribute("#theme", "aria-label") == "Use dark colours"
    page.reload()
    assert page.evaluate(paper) == (dark if prepare else light)


def test_everything_is_open_in_print(opened):
    page = opened(reports.flower(10), width=700, color_scheme="dark")
    assert page.locator("details[open]").count() == 0
    page.emulate_media(media="print")
    page.wait_for_function("document.querySelectorAll('details:not([open])').length === 0")
    assert not any(button.is_visible() for button in page.locator(".tools button, #copy").all())
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.locator("#finding-3 .card").first.is_visible()
    assert page.evaluate("getComputedStyle(document.querySelector('.card')).breakInside") == "avoid"
    assert page.evaluate("document.documentElement.scrollWidth") <= 700
    assert page.pdf(format="A4").startswith(b"%PDF")
    page.emulate_media(media="screen")
    page.wait_for_function("document.querySelectorAll('details[open]').length === 0")


def test_the_page_reads_without_scripts(browser, tmp_path):
    path = tmp_path / "page.html"
    path.write_text(render(reports.flower(10)), encoding="utf-8")
    page = browser.new_page(java_script_enabled=False)
    page.goto(path.as_uri())
    assert not page.locator("#theme").is_visible()
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


CONTRASTS = """() => {
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
  for (const element of document.querySelectorAll('body *')) {
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


def test_words_stand_out_from_their_ground(opened):
    outcomes = [
        dataclasses.replace(reports.finding(2, 2), outcome=outcome, certified=(True, False))
        for outcome in Outcome
    ]
    report = dataclasses.replace(KINDS["flower"], findings=tuple(outcomes))
    for shown in (
        report,
        KINDS["redacted"],
        KINDS["failure"],
        KINDS["inconclusive"],
        KINDS["audit"],
        KINDS["tabular-true"],
    ):
        page = opened(shown)
        page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
        grounds = set()
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            assert page.evaluate(CONTRASTS) == [], scheme
            grounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert len(grounds) == 2


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
    found = reports.finding(
        3,
        4,
        name=word,
        layer=f"{word}\n{word}",
        reason=word,
        notes=(word, word),
        stats={word: 0.5, word + "s": 7, "search": 1.0},
    )
    true = dataclasses.replace(found.truth, names=(word,) * 4)
    table = Table(word, (word, "b" + word), ((word, 1.5), (None, word)), word)
    flat = reports.finding(2, 2, image_format=None, name=word)
    flat = dataclasses.replace(flat, truth=dataclasses.replace(flat.truth, names=(word, word)))
    return Report(
        word,
        word,
        word,
        (dataclasses.replace(found, truth=true), flat),
        tuple(Remark(level, word, word) for level in Level),
        (table,),
        (Drawing(word, SVG, word),),
        {"command": word, word: word, "nested": {word: [word]}},
        {word: word, "spear": word},
        word,
        1.0,
    )


SHAPE = """[...document.querySelectorAll('*')].map(
  e => e.tagName + [...e.attributes].map(a => a.name)).join(' ')"""


@pytest.fixture(scope="module")
def harmless_shape(browser, tmp_path_factory):
    """The elements and attributes of a page whose names are plain words."""
    path = tmp_path_factory.mktemp("harmless") / "page.html"
    path.write_text(render(named("harmless")), encoding="utf-8")
    page = browser.new_page(viewport={"width": 360, "height": 800})
    page.goto(path.as_uri())
    shape = page.evaluate(SHAPE)
    page.close()
    return shape


@pytest.mark.parametrize(
    "word",
    [" ".join(HOSTILE), " ".join(reversed(HOSTILE)), HOSTILE[1], "a" * 300],
    ids=["all", "reversed", "attribute", "long"],
)
def test_names_stay_names(opened, harmless_shape, word):
    page = opened(named(word), 360)
    assert page.evaluate(SHAPE) == harmless_shape
    assert page.locator("script").count() == 1
    assert page.inner_text("h1") == word
    assert page.title() == re.sub(r"\s+", " ", f"{word} – SPEAR")
    assert page.inner_text("#command") == word
    assert page.locator(".gallery img").first.get_attribute("alt") == f"original: {word}"
    page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.locator(".gallery .zoom").first.press("Enter")
    assert page.inner_text("#lightbox-name") == word
    page.keyboard.press("Escape")
    page.locator(".drawing .zoom").first.press("Enter")
    page.keyboard.press("Escape")
    for button in page.locator("th button").all()[:2]:
        button.press("Enter")


def test_no_script_but_ours_runs(browser, tmp_path):
    """The policy holds even where an escape was missed."""
    text = render(KINDS["exact"]).replace("</main>", "<script>window.hacked = 1</script></main>")
    path = tmp_path / "page.html"
    path.write_text(text, encoding="utf-8")
    page = browser.new_page()
    page.goto(path.as_uri())
    assert page.evaluate("window.hacked") is None
    assert page.locator(":root.js").count() == 1
    page.close()


def test_a_redacted_page_holds_no_data(opened):
    report = named("SECRET NAME")
    secret = dataclasses.replace(
        report,
        kind="demo",
        title="t",
        headline="h",
        findings=tuple(
            dataclasses.replace(
                f, name="u", layer="l", reason="r", notes=(), stats={}, labels=f.labels + 98765
            )
            for f in report.findings
        ),
        remarks=(),
        tables=(),
        drawings=(),
        settings={},
        versions={},
        created="",
    )
    whole, redacted = render(secret), render(secret.redacted())
    pictures, flat = secret.findings
    uris = [data_uri(image) for image in pictures.image_format.pictures(pictures.inputs)]
    value = evidence.values(flat, evidence.samples(flat))[0][1][0].cells[0]
    for word in ("SECRET NAME", "98765", "98766", value, *uris):
        assert word in whole
        assert word not in redacted
    assert "data:image/" not in redacted
    page = opened(secret.redacted())
    assert page.inner_text(".privacy").startswith("Redacted.")
    assert "3 samples were recovered and are left out of this redacted report." in redacted
    assert opened(secret).inner_text(".privacy").startswith("Not redacted.")


def test_the_command_can_be_copied(opened):
    page = opened(KINDS["exact"])
    page.locator("#copy").press("Enter")
    page.wait_for_function("document.getElementById('copy').textContent !== 'Copy'")
    assert page.inner_text("#copy") in ("Copied", "Marked")
    assert page.inner_text("#command") == KINDS["exact"].settings["command"]
