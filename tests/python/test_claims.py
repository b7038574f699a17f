"""Each claim in tests/claims.md names tests that exist."""

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROWS = re.findall(r"^\| (.+) \| (.+) \|$", (TESTS / "claims.md").read_text(), re.M)
CLAIMS = [(claim, tests) for claim, tests in ROWS if claim != "claim"]


def cpp_tests() -> set[str]:
    pattern = re.compile(r"^TEST(?:_F|_P)?\(\s*(\w+),\s*(\w+)\s*\)", re.M)
    return {
        ".".join(found)
        for path in (TESTS / "cpp").rglob("*.cpp")
        for found in pattern.findall(path.read_text())
    }


def exists(name: str, cpp: set[str]) -> bool:
    file, _, test = name.partition("::")
    if not test:
        return name in cpp
    path = TESTS / "python" / file
    return path.is_file() and re.search(rf"^def {test}\(", path.read_text(), re.M) is not None


def test_each_claim_names_tests_that_exist():
    assert len(CLAIMS) > 50
    cpp = cpp_tests()
    missing = [
        f"{claim}: {name or 'no test'}"
        for claim, tests in CLAIMS
        for name in re.findall(r"`([^`]+)`", tests) or [""]
        if not exists(name, cpp)
    ]
    assert not missing, "\n".join(missing)
