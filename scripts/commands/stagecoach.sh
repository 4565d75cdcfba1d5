#!/bin/sh
# The command `stagecoach`: runs the commands of the clone that the working directory lies in, by the Python beside it.
# `make setup` links it into .venv/bin.
root=$PWD
until [ -f "$root/scripts/commands/__main__.py" ]; do
    [ "$root" ] || { echo "error: $PWD lies in no clone of Stagecoach; cd to one" >&2; exit 1; }
    root=${root%/*}
done
folder=${PWD#"$root"}
export STAGECOACH_FOLDER="${folder#/}"
python=$(cd "$(dirname "$0")" && pwd)/python
cd "$root/" && exec "$python" -m scripts.commands "$@"
