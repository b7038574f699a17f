"""What holds of the integrations without their trainers; tests/clients trains with each of them."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "python" / "shardstep"
INTEGRATIONS = sorted((PACKAGE / "integrations").glob("*.py"))
TRAINERS = {"transformers", "accelerate", "lightning"}


def imports(path: Path) -> set[str]:
    """Modules that a file imports, at its top or inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None and node.level == 0, f"{path}: a relative import"
            found |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
    return found


def test_there_is_one_module_per_trainer():
    public = {path.stem for path in INTEGRATIONS if not path.stem.startswith("_")}
    assert public == TRAINERS


@pytest.mark.parametrize("path", INTEGRATIONS, ids=lambda path: path.stem)
def test_an_integration_has_fewer_than_150_lines(path):
    assert len(path.read_text().splitlines()) < 150


def test_shardstep_needs_no_trainer():
    for path in PACKAGE.rglob("*.py"):
        if path not in INTEGRATIONS:
            modules = imports(path)
            assert not {name.partition(".")[0] for name in modules} & TRAINERS, path
            assert not any(name.startswith("shardstep.integrations") for name in modules), path


def test_the_page_is_made_of_its_template():
    """An edit of the page alone would be lost at the next `make test-clients`."""
    template = (ROOT / "tests" / "clients" / "clients.md.in").read_text()
    parts = [re.escape(part) for part in re.split(r"@[A-Z]+@", template)]
    assert re.fullmatch(".+".join(parts), (ROOT / "docs" / "clients.md").read_text(), re.S)


def test_the_page_says_what_ran_with_each_trainer():
    """A row of a trainer has its version, a date, and an outcome for both stages."""
    rows = re.findall(r"^\| (.*) \|$", (ROOT / "docs" / "clients.md").read_text(), re.M)
    cells = [row.split(" | ") for row in rows]
    trainers = [row for row in cells if len(row) == 6 and row[0] != "trainer"]
    assert len(trainers) == 14
    for row in trainers:
        assert re.search(r" \d+\.\d+", row[1]) and re.fullmatch(r"\d{4}-\d\d-\d\d", row[2]), row
        assert "not run" not in row, row
