"""docs/failures.md: promises are numbered without gaps, and each names tests and models that exist;
each model is named by a promise, by the code that it models, and names that code."""

import re
from pathlib import Path

from test_claims import cpp_tests, exists

ROOT = Path(__file__).resolve().parents[2]
PROMISES = re.split(r"^(\d+)\. ", (ROOT / "docs" / "failures.md").read_text(), flags=re.M)[1:]
MODELS = {path.name for path in (ROOT / "proofs").glob("*.pml")}
NUMBERS, TEXTS = PROMISES[::2], PROMISES[1::2]


def proofs_of(text: str) -> list[str]:
    names = re.findall(r"`([^`]+)`", text)
    return [name for name in names if re.search(r"\.pml$|::|^\w+\.\w+$", name)]


def test_promises_are_numbered():
    assert len(NUMBERS) >= 15
    assert [str(number) for number in range(1, len(NUMBERS) + 1)] == NUMBERS


def test_each_promise_names_proofs_that_exist():
    cpp = cpp_tests()
    missing = [
        f"{number}: {name or 'no proof'}"
        for number, text in zip(NUMBERS, TEXTS, strict=True)
        for name in proofs_of(text) or [""]
        if name not in MODELS and not exists(name, cpp)
    ]
    assert not missing, "\n".join(missing)


def test_models_and_code_point_at_each_other():
    named = {name for text in TEXTS for name in proofs_of(text)}
    assert named >= MODELS
    for model in MODELS:
        sources = re.findall(r"src/[\w/]+\.(?:h|cpp)", (ROOT / "proofs" / model).read_text())
        assert sources, model
        texts = [
            (ROOT / source).with_suffix(suffix).read_text()
            for source in sources
            for suffix in (".h", ".cpp")
            if (ROOT / source).with_suffix(suffix).exists()
        ]
        assert any(f"proofs/{model}" in text for text in texts), model
