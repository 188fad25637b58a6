"""For the API pages: examples in docstrings become code, comments behind fields their description."""

import re
from typing import Any

import griffe


def fenced(text: str) -> str:
    """A docstring with a fence around each of its examples.

    >>> fenced("Adds.\\n\\n>>> 1 + 1\\n2").splitlines()[2:]
    ['```pycon', '>>> 1 + 1', '2', '```']
    """
    blocks, example = [], False
    for block in text.split("\n\n"):
        starts = block.lstrip().startswith(">>> ")
        if starts and example:
            blocks[-1] += f"\n\n{block}"
        else:
            blocks.append(block)
        example = starts
    return "\n\n".join(
        f"```pycon\n{block}\n```" if block.startswith(">>> ") else block for block in blocks
    )


def described(lines: list[str]) -> str:
    """The comment at the end of a field's lines.

    >>> described(['EXACT = "exact"  # every sample recovered'])
    'Every sample recovered.'
    """
    found = re.search(r"\s# (?!type:|noqa)(.+)", "\n".join(lines))
    words = found[1].strip() if found else ""
    return words and f"{words[0].upper()}{words[1:].rstrip('.')}."


class Docstrings(griffe.Extension):
    """Docstrings as the pages want them."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Fences the examples of every docstring."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """A field without a docstring has its comment for one."""
        if attr.docstring is None and attr.parent is not None and attr.parent.is_class:
            words = described(attr.lines)
            if words:
                attr.docstring = griffe.Docstring(words, parent=attr)
