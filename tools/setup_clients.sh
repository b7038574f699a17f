#!/usr/bin/env bash
# Makes .venv-clients, which has what requirements/clients*.txt list and sees the rest in .venv.
# Exits with 3 if they cannot be downloaded.
set -euo pipefail
cd "$(dirname "$0")/.."
ready=.venv-clients/ready
[[ $ready -nt requirements/clients.txt && $ready -nt requirements/clients_timm.txt ]] && exit

echo "setup: installing requirements/clients.txt and clients_timm.txt into .venv-clients"
rm -rf .venv-clients
.venv/bin/python -m venv .venv-clients
folder=$(.venv-clients/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
ours=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "$ours" > "$folder/shardstep-venv.pth"
torch=$(.venv/bin/python -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))')
pip=(.venv-clients/bin/python -m pip install --quiet --disable-pip-version-check --no-compile)
"${pip[@]}" --constraint <(echo "$torch") -r requirements/clients.txt &&
  "${pip[@]}" --no-deps --target .venv-clients/timm -r requirements/clients_timm.txt || {
    rm -rf .venv-clients
    exit 3
  }
touch $ready
