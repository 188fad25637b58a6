"""For the tutorial's page: no script that could reach for the network, and links that work."""

import re
from typing import Any

_SCRIPT = re.compile(r"<script\b[^>]*>.*?</script>", re.DOTALL)
_FOREIGN = re.compile(r'https?://|src=""|mathjax', re.IGNORECASE)
_LINK = re.compile(r'href="([\w/]+)\.md(#[^"]*)?"')
_NO_WORDS = "No description has been provided for this image"


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Called by mkdocs with the content of each page."""
    return cleaned(html) if page.file.src_uri.endswith(".ipynb") else html


def cleaned(html: str) -> str:
    """A notebook's page without scripts of others, with links to pages as the site has them.

    >>> cleaned('<a href="limits.md#use">x</a><script>import("https://cdn/mermaid.js")</script>')
    '<a href="limits.html#use">x</a>'
    """
    html = _SCRIPT.sub(lambda found: "" if _FOREIGN.search(found[0]) else found[0], html)
    html = _LINK.sub(lambda found: f'href="{found[1]}.html{found[2] or ""}"', html)
    return html.replace(_NO_WORDS, "The pictures drawn by the code above")
