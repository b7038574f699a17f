#!/usr/bin/env python3
"""Shows doxygen a header of ours as it expects one: `doxygen_filter.py header.h` prints it.

Our headers have plain `//` comments, which doxygen ignores. The comment under `#pragma once`
becomes the file's, and comments before a declaration and behind a member become theirs.
"""

import itertools
import re
import sys
from collections.abc import Iterator

INLINE = re.compile(r"^(?P<code>\s*[^/\s].*?[;,{])\s*// (?P<text>.*)$")
COMMENT = re.compile(r"^(?P<indent>\s*)//(?P<text>.*)$")


def escaped(text: str) -> str:
    return re.sub(r"([@\\<>])", r"\\\1", text) if "`" not in text else text


def is_opening(lines: list[str], number: int) -> bool:
    """Whether only `#pragma once`, empty lines and comments come before."""
    before = (line for line in lines[:number] if not COMMENT.match(line))
    return all(line.strip() in ("", "#pragma once") for line in before)


def paragraph(text: str) -> str:
    return re.sub(r"(?<=\s)(REQUIRES|Collective):", r"**\1:**", escaped(text))


def with_examples(texts: list[str]) -> Iterator[str]:
    """Indented lines of a comment are shown as they are."""
    for is_example, group in itertools.groupby(texts, lambda text: text.startswith("   ")):
        shown = list(group)
        yield from [" @verbatim", *shown, " @endverbatim"] if is_example else map(paragraph, shown)


def filtered(lines: list[str]) -> list[str]:
    result: list[str] = []
    number, opened = 0, False
    while number < len(lines):
        comments = list(itertools.takewhile(bool, map(COMMENT.match, lines[number:])))
        if comments:
            indent = comments[0]["indent"]
            if not opened and is_opening(lines, number):
                opened = True
                result.append("/// @file")
            texts = with_examples([comment["text"] for comment in comments])
            result += [f"{indent}///{text}" for text in texts]
            number += len(comments)
            continue
        line = lines[number]
        inline = INLINE.match(line)
        number += 1
        if inline is not None:
            result.append(f"{inline['code']}  ///< {escaped(inline['text'])}")
        else:
            result.append(line)
    return result


if __name__ == "__main__":
    with open(sys.argv[1]) as header:
        print("\n".join(filtered(header.read().splitlines())))
