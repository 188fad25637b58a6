"""The demo's page in a real browser: it shows its pictures, and the console stays silent."""

import shutil

import pytest

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright (dev extra)")
pytest.importorskip("skimage", reason="needs the cli extra")

from spear.audit.demo import DemoSettings, run_demo

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium on the PATH")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_works_from_disk(tmp_path, scheme):
    run = run_demo(DemoSettings(batch_size=4, width=80, depth=3, pixels=16))
    page_file = tmp_path / "report.html"
    page_file.write_text(run.page(), encoding="utf-8")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(color_scheme=scheme, viewport={"width": 360, "height": 800})
        complaints, requests = [], []
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(page_file.as_uri())
        loaded = page.eval_on_selector_all(
            "img", "images => images.filter(i => i.complete && i.naturalWidth == 16).length"
        )
        heading = page.inner_text("h1")
        wide = page.evaluate("document.documentElement.scrollWidth")
        browser.close()
    assert loaded == 8
    assert heading == "What one gradient gave away"
    assert complaints == []
    assert all(url.startswith(("file:", "data:")) for url in requests)
    assert wide <= 360
