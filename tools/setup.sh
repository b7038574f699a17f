#!/usr/bin/env bash
# Prepares this clone for one kind of work: build, python, test, format, types, docs, prove or
# fuzz. make runs it.
# Python packages go into .venv. What the system lacks comes from PyPI if PyPI has it, else from
# apt, and that is announced first.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { echo "setup: $*"; }
die() { say "$*" >&2; exit 1; }

has_program() { command -v "$1" >/dev/null; }

has_header() {
  printf '#if !__has_include(<%s>)\n#error\n#endif\n' "$1" |
    "${CXX:-c++}" -I .venv/system/usr/include -E -x c++ - >/dev/null 2>&1
}

as_root() { if [[ $EUID -eq 0 ]]; then "$@"; else sudo -n "$@"; fi; }

apt_get() {
  as_root env DEBIAN_FRONTEND=noninteractive timeout 300 \
    apt-get -y -qq --no-install-recommends -o DPkg::Lock::Timeout=120 "$@" >/dev/null 2>&1
}

from_apt() {  # package, what needs it
  has_program apt-get && as_root true 2>/dev/null || return 1
  say "installing $1 with apt-get, because $2"
  apt_get install "$1" || { apt_get update && apt_get install "$1"; }
}

# Headers and static libraries can be unpacked without root. CMake looks for them there.
unpack_from_apt() {  # package, what needs it
  has_program apt-get || return 1
  say "unpacking $1 into .venv/system, because $2"
  local folder status=0
  folder=$(mktemp -d)
  (cd "$folder" && timeout 300 apt-get download "$1") >/dev/null 2>&1 &&
    mkdir -p .venv/system && dpkg-deb -x "$folder"/*.deb .venv/system || status=1
  rm -rf "$folder"
  return $status
}

headers_from_apt() {  # package, one of its headers, what needs it
  has_header "$2" || from_apt "$1" "$3" || unpack_from_apt "$1" "$3" ||
    say "could not get $1; without it there is no $2"
}

make_venv() {
  if [[ -x .venv/bin/python ]]; then return; fi
  say "creating .venv"
  local python=${PYTHON:-python3}
  "$python" -m venv .venv >/dev/null 2>&1 && return
  rm -rf .venv
  from_apt python3-venv "python3 cannot create a virtual environment without it" || true
  "$python" -m venv .venv || { rm -rf .venv; die "install python3-venv and run make again"; }
}

# Byte code is written when a module is first imported: compiling all of torch's takes longer than
# downloading it.
pip_install() {
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile "$@"
}

# An index with both builds prefers the CPU build, whose version is "later". PyPI alone would bring
# gigabytes of CUDA.
install_torch() {
  local torch more=("$@")
  torch=$(grep '^torch==' requirements/build.txt)
  pip_install "$torch+cpu" -r requirements/build.txt "${more[@]}" 2>/dev/null ||
    pip_install --extra-index-url https://download.pytorch.org/whl/cpu \
      -r requirements/build.txt "${more[@]}"
}

prepare_build() {
  has_program "${CXX:-c++}" || from_apt g++ "nothing compiles without it" ||
    die "install a C++20 compiler (Debian: g++) and run make again"
  make_venv
  headers_from_apt zlib1g-dev zlib.h "checkpoints have zlib's checksums"
  headers_from_apt libcli11-dev CLI/CLI.hpp "the example train_gpt reads its options with CLI11"
  local more=()
  has_program cmake || more+=(cmake==4.4.4)
  has_header nlohmann/json.hpp || more+=(nlohmann_json==3.12.0)
  say "installing torch${more[*]:+, ${more[*]}} and ninja into .venv"
  install_torch "${more[@]}"
}

prepare_python() {
  local headers
  headers=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("include"))')
  [[ -e $headers/Python.h ]] || from_apt python3-dev "the Python module needs Python.h" ||
    die "install Python's development files (Debian: python3-dev) and run make again"
  prepare_packages python
}

prepare_test() {
  headers_from_apt libgtest-dev gtest/gtest.h "the C++ tests use GoogleTest"
  has_program mpirun || from_apt openmpi-bin "a test starts its ranks with mpirun" ||
    say "without mpirun (Debian: openmpi-bin), the test of mpirun is skipped"
  prepare_packages test
}

prepare_prove() {
  has_program "${CC:-cc}" || from_apt gcc "spin's checkers are C programs" ||
    die "install a C compiler (Debian: gcc) and run make again"
  has_program spin || [[ -x .venv/system/usr/bin/spin ]] ||
    from_apt spin "it checks the models in proofs/" ||
    unpack_from_apt spin "it checks the models in proofs/" ||
    die "install spin (Debian: spin) and run make again"
}

prepare_docs() {
  has_program doxygen || from_apt doxygen "the C++ API's pages are made from it" ||
    die "install doxygen (Debian: doxygen) and run make again"
  prepare_packages docs
}

prepare_fuzz() {
  has_program clang++ || from_apt clang "libFuzzer is a part of it" ||
    die "install clang (Debian: clang) and run make again"
  has_program llvm-cov || from_apt llvm "it reports what the fuzzers have covered" ||
    die "install llvm-cov (Debian: llvm) and run make again"
  # Debian packages libFuzzer apart from clang.
  [[ -e $(clang++ -print-resource-dir)/lib/linux/libclang_rt.fuzzer-$(uname -m).a ]] ||
    from_apt "libclang-rt-$(clang++ -dumpversion | cut -d. -f1)-dev" "it has libFuzzer" ||
    die "install clang's runtime libraries (Debian: libclang-rt-*-dev) and run make again"
}

prepare_packages() {  # part
  say "installing requirements/$1.txt into .venv"
  pip_install -r "requirements/$1.txt"
}

case "${1-}" in
  build | python | test | docs | prove | fuzz) "prepare_$1" ;;
  format | types) prepare_packages "$1" ;;
  *) die "expected build, python, test, format, types, docs, prove or fuzz, got '${1-}'" ;;
esac
