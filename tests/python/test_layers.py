"""The layers of src/: CMakeLists.txt lists them from the lowest to the highest, and a layer may
include only itself and lower ones. A public header belongs to the layer whose source implements it;
one that no source implements belongs to the highest layer that it includes."""

import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES, PUBLIC = ROOT / "src", ROOT / "include"
LISTED = {
    name: files.split()
    for name, files in re.findall(
        r"^shardstep_layer\((\w+)([^)]*)\)", (ROOT / "CMakeLists.txt").read_text(), re.M
    )
}
LAYERS = list(LISTED)
BELOW_ALL = -1
STUBS = SOURCES / "launch" / "gloo_stub"  # stand in for gloo's own headers


def code_under(folder: Path) -> list[Path]:
    files = [path for path in folder.rglob("*") if path.suffix in (".h", ".cpp")]
    return sorted(path for path in files if STUBS not in path.parents)


@functools.cache
def included(path: Path) -> list[Path]:
    """Our own headers that a file includes."""
    names = re.findall(r'^\s*#\s*include\s+["<]([^">]+)[">]', path.read_text(), re.M)
    candidates = [folder / name for name in names for folder in (SOURCES, PUBLIC)]
    return [candidate for candidate in candidates if candidate.is_file()]


@functools.cache
def layer(path: Path) -> int:
    """Where a file's layer stands in LAYERS."""
    if path.is_relative_to(SOURCES):
        folder = path.relative_to(SOURCES).parts[0]
        return LAYERS.index(folder) if folder in LAYERS else BELOW_ALL
    within = path.relative_to(PUBLIC / "shardstep")
    if within.parts[0] in LAYERS:
        return LAYERS.index(within.parts[0])
    for name, files in LISTED.items():
        if f"{within.stem}.cpp" in files:
            return LAYERS.index(name)
    return max((layer(header) for header in included(path)), default=BELOW_ALL)


def name_of(path: Path) -> str:
    return LAYERS[layer(path)] if layer(path) != BELOW_ALL else "no layer"


@pytest.mark.parametrize("folder", [SOURCES, PUBLIC], ids=["src", "include"])
def test_a_layer_includes_only_itself_and_lower_ones(folder):
    found = [
        f"{path.relative_to(ROOT)} ({name_of(path)}) includes "
        f"{header.relative_to(ROOT)} ({name_of(header)})"
        for path in code_under(folder)
        for header in included(path)
        if layer(header) > layer(path)
    ]
    assert not found, "\n".join(found)


def test_public_headers_include_nothing_of_src():
    found = [
        f"{path.relative_to(ROOT)} includes {header.relative_to(ROOT)}"
        for path in code_under(PUBLIC)
        for header in included(path)
        if header.is_relative_to(SOURCES)
    ]
    assert not found, "\n".join(found)


def test_the_folders_of_src_are_the_layers():
    assert len(LAYERS) < 9
    assert {path.name for path in SOURCES.iterdir() if path.is_dir()} == set(LAYERS)


@pytest.mark.parametrize("name", LAYERS)
def test_every_source_is_listed(name):
    # Which of the two is compiled depends on the torch that was found.
    either = {"process_group_nccl.cpp", "process_group_no_nccl.cpp"}
    folder = SOURCES / name
    on_disk = {
        str(path.relative_to(folder)) for path in code_under(folder) if path.suffix == ".cpp"
    }
    assert on_disk - either == {file for file in LISTED[name] if not file.startswith("$")}


def test_the_folders_of_the_cpp_tests_are_layers():
    folders = {path.name for path in (ROOT / "tests" / "cpp").iterdir() if path.is_dir()}
    assert folders - {"support", "sim_device", "fuzz"} <= set(LAYERS)


def test_one_header_looks_at_torchs_version():
    folders = [ROOT / name for name in ("src", "include", "python/csrc", "tests")]
    code = [path for folder in folders for path in code_under(folder)]
    found = [path for path in code if re.search(r"#\s*\w*if.*TORCH_VERSION", path.read_text())]
    assert found == [SOURCES / "torch_versions.h"]
