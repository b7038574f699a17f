"""The code blocks, headings and links of README.md and docs/.

A comment before a block says how it is tested; every block in a language has one.

    <!-- test: python, 2 ranks -->            a whole program, started by torchrun
    <!-- test: python -->                     a whole program in one process
    <!-- test: python, 2 ranks, given NAME -->   lines that follow those of given/NAME.py, on ranks
    <!-- test: python, given NAME -->         the same in one process
    <!-- test: session -->                    commands after `$ ` and what they print, where any
                                              number stands for any other, and `...` for any lines
    <!-- test: session, given NAME -->        in a folder that given/NAME.py has filled
    <!-- test: sh, given NAME -->             the same for commands without their output
    <!-- test: cpp, same as examples/x.cpp -->   that file, which the build compiles
    <!-- test: cpp -->                        a whole file, which is compiled
    <!-- test: cpp, given NAME -->            statements that follow given/NAME.h, compiled
    <!-- test: not run: REASON -->

A block without a language that follows a whole program is a session with it.
"""

import dataclasses
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
GIVEN = Path(__file__).resolve().parent / "given"

_FENCE = re.compile(
    r"^(?P<fence>`{3,})(?P<language>[^\n`]*)\n(?P<text>.*?)^(?P=fence)$", re.M | re.S
)
_MARK = re.compile(r"<!-- test: (?P<words>.*) -->\n\Z")
_WORDS = re.compile(
    r"(?P<kind>python|session|sh|cpp|not run)(?:, (?P<ranks>\d+) ranks)?(?:, given (?P<given>\w+))?"
    r"(?:, same as (?P<same>\S+))?(?:: (?P<reason>.+))?"
)


@dataclasses.dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str
    kind: str = ""  # without a mark
    ranks: int = 0
    given: str = ""
    same: str = ""
    reason: str = ""
    session: str = ""
    """Of a whole program: how it is started, and what it prints."""

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def is_directive(self) -> bool:
        return self.language.startswith("{")


def _marked(before: str) -> dict[str, object]:
    mark = _MARK.search(before)
    if mark is None:
        return {}
    words = _WORDS.fullmatch(mark["words"])
    if words is None:
        return {"kind": f"unknown: {mark['words']}"}
    found = {name: value for name, value in words.groupdict().items() if value}
    return {**found, "ranks": int(words["ranks"] or 0)}


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    found = [
        Block(
            page,
            text.count("\n", 0, fence.start()) + 1,
            fence["language"],
            fence["text"],
            **_marked(text[: fence.start()]),
        )
        for fence in _FENCE.finditer(text)
    ]
    program = None
    for number, block in enumerate(found):
        if block.kind in ("python", "cpp") and not block.given:
            program = number
        elif program is not None and not block.kind and block.text.startswith("$ "):
            found[program] = dataclasses.replace(found[program], session=block.text)
            found[number] = dataclasses.replace(block, kind="session of a program")
            program = None
    return found


def all_blocks() -> list[Block]:
    return [block for page in PAGES for block in blocks(page)]


def without_blocks(page: Path) -> str:
    return _FENCE.sub("", page.read_text())


def anchor(heading: str) -> str:
    """What GitHub and MyST call a heading in links."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", plain.strip().lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", without_blocks(page), re.M):
        name = base = anchor(heading)
        number = 0
        while name in found:
            number += 1
            name = f"{base}-{number}"
        found.add(name)
    return found


def links(page: Path) -> list[str]:
    """The targets of links and pictures."""
    return re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", without_blocks(page)))
