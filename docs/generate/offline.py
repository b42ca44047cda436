"""What a page of the site would fetch from another host by itself: readers may be offline."""

from __future__ import annotations

import re
from typing import Final

_THERE: Final = r"""["']?(?:https?:)?//[^\s"'>)]*"""
# Scripts, styles, fonts and pictures. A link that a reader follows is none of these, nor is one that names a page.
_FETCHED: Final = re.compile(
    rf"<(?:script|img|iframe|source|audio|video)\b[^>]*\bsrc={_THERE}"
    rf"|<link\b(?![^>]*\brel=[\"']?(?:canonical|alternate|next|prev))[^>]*\bhref={_THERE}"
    rf"|url\({_THERE}"
)


def fetched_from_elsewhere(text: str) -> str | None:
    """The first such place in a page or a style sheet; None where there is none."""
    found = _FETCHED.search(text)
    return found[0] if found else None
