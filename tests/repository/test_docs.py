"""The documentation site: it builds without a warning, needs no network, and works from a folder."""

import doctest
import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

for package in ("mkdocs", "material", "mkdocstrings", "mkdocs_jupyter"):
    pytest.importorskip(package, reason="needs the docs extra")

ROOT = Path(__file__).parents[2]
CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]


class Page(HTMLParser):
    """What a page refers to, and what can be referred to on it."""

    def __init__(self, text):
        super().__init__()
        self.links, self.fetched, self.anchors, self.scripts = [], [], set(), []
        self._in_script = False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        named = dict(attributes)
        self.anchors |= {named[key] for key in ("id", "name") if named.get(key)}
        if tag == "a" and named.get("href"):
            self.links.append(named["href"])
        elif tag == "link" and named.get("rel") != "canonical":
            self.fetched.append(named["href"])
        self.fetched += [named[key] for key in ("src", "srcset", "data", "poster") if key in named]
        self._in_script = tag == "script"

    def handle_data(self, data):
        if self._in_script:
            self.scripts.append(data)

    def handle_endtag(self, tag):
        self._in_script = False


def build(folder, root=ROOT):
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    ended = build(folder)
    assert ended.returncode == 0, ended.stderr
    assert "WARNING" not in ended.stderr + ended.stdout
    return folder


@pytest.fixture(scope="module")
def pages(site):
    files = [path for path in site.rglob("*.html") if path.name != "404.html"]
    return {path: Page(path.read_text(encoding="utf-8")) for path in files}


def test_every_page_of_the_docs_is_there(site, pages):
    sources = [p for p in (ROOT / "docs").rglob("*") if p.suffix in (".md", ".ipynb")]
    made = {str(path.relative_to(site).with_suffix("")) for path in pages}
    assert {str(p.relative_to(ROOT / "docs").with_suffix("")) for p in sources} == made
    assert not list(site.rglob("*.py*"))


def test_links_lead_to_pages_and_anchors_that_exist(pages):
    broken = []
    for path, page in pages.items():
        for link in [*page.links, *page.fetched]:
            parts = urlsplit(link)
            if parts.scheme or link.startswith("//"):
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchor = unquote(parts.fragment)
            known = pages[target].anchors if target in pages else set()
            if not target.is_file() or (anchor and target in pages and anchor not in known):
                broken.append(f"{path.name}: {link}")
    assert broken == []


def test_nothing_is_fetched_from_the_network(site, pages):
    for path, page in pages.items():
        foreign = [url for url in page.fetched if re.match(r"(https?:)?//", url)]
        assert foreign == [], path
        assert not any("https://" in script for script in page.scripts), path
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*[\"']?(https?:)?//", sheet.read_text("utf-8"))


def test_a_broken_link_fails_the_build(tmp_path):
    """On a page of its own: a second build of the whole site would say no more."""
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[0]
    (tmp_path / "mkdocs.yml").write_text(f"{settings}\nnav: [index.md]\n", encoding="utf-8")
    for part in ("site_build", "stylesheets", "javascripts"):
        shutil.copytree(ROOT / "docs" / part, tmp_path / "docs" / part)
    (tmp_path / "src").symlink_to(ROOT / "src")
    page = "# One page\n\n[itself](index.md), [nowhere](nowhere.md)\n"
    (tmp_path / "docs" / "index.md").write_text(page, encoding="utf-8")
    ended = build(tmp_path / "site", tmp_path)
    assert ended.returncode != 0
    assert "'nowhere.md'" in ended.stderr
    assert ended.stderr.count("WARNING") == 1  # nothing else is wrong with it


def test_the_api_pages_hold_every_public_name(pages):
    import spear

    anchors = set().union(*(page.anchors for page in pages.values()))
    places = ("spear", "spear.errors")
    documented = {n for n in spear.__all__ if any(f"{place}.{n}" in anchors for place in places)}
    assert documented == set(spear.__all__)
    assert {"spear.Outcome.EXACT", "spear.Inversion.certified", "spear.theory.harmonic"} <= anchors


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright (dev extra)")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium on the PATH")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_site_works_from_disk(site, browser, scheme):
    page = browser.new_page(color_scheme=scheme, viewport={"width": 1200, "height": 800})
    complaints, requests = [], []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    for name in ("tutorial.html", "api/inversion.html", "how.html"):
        page.goto((site / name).as_uri())
        page.wait_for_load_state("load")
    drawn = page.eval_on_selector_all(
        "article img", "images => images.filter(i => i.complete && i.naturalWidth).length"
    )
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.locator(".md-search__input").press_sequentially("certificate")  # it listens for keys
    page.wait_for_selector(".md-search-result__item", timeout=20_000)
    page.close()
    assert drawn == 6
    assert complaints == []
    assert all(url.startswith(("file:", "data:", "blob:", "about:")) for url in requests)
    bright = [int(part) for part in re.findall(r"\d+", background)[:3]]
    assert (min(bright) > 200) == (scheme == "light")


@pytest.mark.parametrize("name", ["docstrings", "notebooks"])
def test_what_prepares_the_pages_does_what_it_says(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "site_build" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    failed, tried = doctest.testmod(module)
    assert failed == 0
    assert tried > 0


@pytest.fixture(scope="module")
def script():
    pytest.importorskip("matplotlib", reason="needs the plots extra")
    return runpy.run_path(str(ROOT / "docs" / "draw_how.py"))


@pytest.fixture(scope="module")
def scene(script):
    pytest.importorskip("skimage", reason="needs the cli extra")
    return script["Scene"].real()


def test_the_pictures_of_how_it_works_are_drawn_from_a_real_run(tmp_path, script, scene):
    quick = {**script["DRAWINGS"], "noise": lambda s: script["noise"](s, (0.0, 1e-2))}
    script["draw"](tmp_path, scene, quick)
    text = (ROOT / "docs" / "how.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"images/how/(\w+\.png)", text))
    assert {file.name for file in tmp_path.iterdir()} == shown
    committed = ROOT / "docs" / "images" / "how"
    assert {file.name for file in committed.iterdir()} == shown
    for folder in (tmp_path, committed):
        assert all(5_000 < file.stat().st_size < 150_000 for file in folder.iterdir())


def test_what_how_it_works_says_of_that_run_is_so(scene):
    factors, result = scene.factors, scene.result
    assert (factors.b, result.outcome.name, result.proof.name) == (6, "EXACT", "REPLAY")
    assert factors.spectrum[6] < 1e-7 * factors.spectrum[5]  # seven orders of magnitude
    values = (factors.L @ scene.selection.directions.vectors[:, 0]).abs()
    off = values <= factors.zero
    assert (int(off.sum()), factors.outputs.empty_rows) == (82, 15)
    assert float(values[off].max()) < 1e-8
    assert float(values[~off].min()) > 1e-4
    zeros = (factors.L @ scene.selection.directions.vectors).abs() <= factors.zero  # (m, b)
    for i, j in combinations(range(6), 2):  # a mix lies between
        both = int((zeros[:, i] & zeros[:, j]).sum())
        assert factors.outputs.empty_rows < both < min(int(zeros[:, k].sum()) for k in (i, j))
