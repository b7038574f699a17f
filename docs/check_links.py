#!/usr/bin/env python3
"""Fails if a link in built HTML leads to no file or no anchor: `check_links.py build/docs/html`.

Links to other sites are not followed.
"""

import html.parser
import sys
import urllib.parse
from pathlib import Path


class Page(html.parser.HTMLParser):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name in ("id", "name") and value:
                self.anchors.add(value)
            elif name in ("href", "src") and value and tag != "link":
                self.links.append(value)


def dead_links(root: Path) -> tuple[list[str], int]:
    pages = {path.resolve(): Page(path) for path in root.rglob("*.html")}
    dead, count = [], 0
    for path, page in pages.items():
        for link in page.links:
            parts = urllib.parse.urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            count += 1
            target = path
            if parts.path:
                target = (path.parent / urllib.parse.unquote(parts.path)).resolve()
            name = urllib.parse.unquote(parts.fragment)
            known = pages[target].anchors if target in pages else set()
            if not target.exists() or (name and name != "top" and name not in known):
                dead.append(f"{path.relative_to(root.resolve())}: {link}")
    return dead, count


def main() -> int:
    dead, count = dead_links(Path(sys.argv[1]))
    print("\n".join(dead) or f"{sys.argv[1]}: {count} links, none of them dead")
    return 1 if dead or not count else 0


if __name__ == "__main__":
    sys.exit(main())
