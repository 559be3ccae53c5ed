"""The description on a package index: README.md, whose relative links lead nowhere there.

The rest of the package's metadata is in `pyproject.toml`.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ELSEWHERE = r"(?!https?:|#)[^)\s]+"  # a target relative to the repository
IMAGE = rf"!\[([^\]]*)\]\(({ELSEWHERE})\)"
LINK = rf"(?<!!)\[([^\]]*)\]\(({ELSEWHERE})\)"
CAPTION = r"\n\n\*[^*\n]+\*(?=\n)"  # a paragraph in italics below an image


def description(readme: str, source: str | None = None) -> str:
    """The Markdown with links into `source`, the repository's address; without one they become plain text.

    Then images and their captions are left out, and so are parentheses with nothing but a link.
    """
    if source is not None:
        readme = re.sub(IMAGE, rf"![\1]({source}/raw/HEAD/\2)", readme)
        return re.sub(LINK, rf"[\1]({source}/blob/HEAD/\2)", readme)
    readme = re.sub(rf"\n{IMAGE}(?:{CAPTION})?\n", "", readme)
    return re.sub(LINK, r"\1", re.sub(rf"\s\({LINK}\)", "", readme))


if __name__ == "__main__":
    here = Path(__file__).parent
    urls = tomllib.loads((here / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
    text = description((here / "README.md").read_text(encoding="utf-8"), urls.get("Source"))
    setup(long_description=text, long_description_content_type="text/markdown")
