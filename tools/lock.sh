#!/bin/sh
# Writes requirements/*.lock: the versions of constraints.txt with the hashes of every wheel, by uv.
# Run it by `make lock` on Linux x86_64, where pip is configured to find a CPU build of PyTorch.
set -eu
cd "$(dirname "$0")/.."
bin=.venv/bin locks=requirements

compile() {
    "$bin/uv" pip compile -q --python "$bin/python" --generate-hashes --only-binary :all: \
        --emit-build-options --no-annotate --custom-compile-command "make lock" \
        -c constraints.txt "$@" >/dev/null
}

without() { # what another lock has
    sed -nE 's/^([a-z0-9-]+)==.*/--no-emit-package=\1/p' "$locks/$1.lock"
}

# PyTorch has locks of its own: the public CUDA build with all that only it needs, and the CPU build.
echo torch | compile $(without run) - -o $locks/torch-cuda.lock
# hatchling and editables build the project: locked too, or pip would fetch them on the side.
needed="pyproject.toml $locks/backend.in"
compile $(without torch-cuda) --extra cli --extra plots $needed -o $locks/run.lock
compile $(without torch-cuda) --extra dev $needed -o $locks/dev.lock

folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
"$bin/pip" download -q --no-deps --only-binary :all: -c constraints.txt -d "$folder" torch
version=$(basename "$folder"/torch-*+cpu-*.whl | cut -d- -f2)
{
    printf '# Written by `make lock`.\n--only-binary :all:\n\ntorch==%s \\\n    ' "$version"
    "$bin/pip" hash "$folder"/torch-*.whl | tail -n 1
} >$locks/torch-cpu.lock
