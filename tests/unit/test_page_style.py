"""The page's scripts and its style sheet know each other's names."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "services" / "gateway" / "page"


def test_every_colour_that_a_script_names_is_one_of_the_style_sheet() -> None:
    defined = set(re.findall(r"(--[\w-]+):", (PAGE / "page.css").read_text()))
    named = {name for script in PAGE.glob("*.js") for name in re.findall(r'"(--[\w-]+)"', script.read_text())}
    assert named
    assert named - defined == set()
