#!/usr/bin/env bash
# Prepares a clone: system packages as far as this user may install them, and .venv. Run by make.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { echo "setup: $*"; }

as_root=()
if [[ $EUID -ne 0 ]]; then as_root=(sudo -n); fi

# Best effort: returns non-zero where packages cannot be installed.
apt_install() {
  command -v apt-get >/dev/null || return 1
  "${as_root[@]}" true 2>/dev/null || return 1
  local options=(-y -qq --no-install-recommends -o DPkg::Lock::Timeout=120)
  DEBIAN_FRONTEND=noninteractive timeout 300 \
    "${as_root[@]}" apt-get install "${options[@]}" "$@" >/dev/null 2>&1 && return 0
  timeout 300 "${as_root[@]}" apt-get update -qq >/dev/null 2>&1 || return 1
  DEBIAN_FRONTEND=noninteractive timeout 300 \
    "${as_root[@]}" apt-get install "${options[@]}" "$@" >/dev/null 2>&1
}

want() {  # package, how to see that it is there, what happens without it
  if eval "$2" >/dev/null 2>&1; then return; fi
  say "installing $1"
  apt_install "$1" || say "could not install $1: $3"
}

for tool in cmake g++; do
  want "$tool" "command -v $tool" "it is required"
  command -v "$tool" >/dev/null || { say "install $tool, e.g. apt-get install $tool"; exit 1; }
done
want libgtest-dev "test -e /usr/include/gtest/gtest.h" "CMake will fetch GoogleTest"
want nlohmann-json3-dev "test -e /usr/include/nlohmann/json.hpp" "CMake will fetch it"
want ccache "command -v ccache" "rebuilding will be slower"
want openmpi-bin "command -v mpirun" "the test of mpirun will be skipped"

if [[ ! -x .venv/bin/python ]]; then
  say "creating .venv"
  if ! ${PYTHON:-python3} -m venv .venv >/dev/null 2>&1; then
    rm -rf .venv
    apt_install python3-venv || true
    ${PYTHON:-python3} -m venv .venv || {
      rm -rf .venv
      say "python3 cannot make a virtual environment; install python3-venv and run make again"
      exit 1
    }
  fi
fi

say "installing requirements-dev.txt into .venv"
pip=(.venv/bin/python -m pip install --quiet --disable-pip-version-check)
torch_pin=$(sed -n 's/^torch==//p' requirements-dev.txt)
# An index with both builds prefers the CPU one, whose version is "later"; PyPI alone would bring
# gigabytes of CUDA.
"${pip[@]}" "torch==$torch_pin+cpu" -r requirements-dev.txt 2>/dev/null ||
  "${pip[@]}" --extra-index-url https://download.pytorch.org/whl/cpu -r requirements-dev.txt
.venv/bin/python -c 'import torch; print("setup: torch", torch.__version__)'
