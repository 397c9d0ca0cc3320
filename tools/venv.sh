# Sourced by the tools: makes .venv with tracefile and its development dependencies, once per change of either.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
stamp=$(cat pyproject.toml tools/constraints.txt tools/build_native.py tracefile/_decode.c | sha256sum | cut -d' ' -f1)
if [ "$(cat .venv/stamp 2>/dev/null || true)" != "$stamp" ]; then
    echo "Setting up .venv (a few minutes the first time) ..."
    "${PYTHON:-python3}" -m venv .venv
    log=$(mktemp)
    # torch first and alone: its exact pin keeps other packages from choosing a larger build.
    if ! { .venv/bin/python -m pip install --quiet --disable-pip-version-check "$(grep '^torch==' tools/constraints.txt)" &&
        .venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint tools/constraints.txt \
            --editable '.[dev]' &&
        # Without its dependencies, which need a GPU's toolkit; its RouterReplay needs none of them.
        .venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint tools/constraints.txt \
            --no-deps megatron-core; } >"$log" 2>&1; then
        cat "$log" >&2
        exit 1
    fi
    rm -f "$log"
    echo "$stamp" >.venv/stamp
fi
python=$PWD/.venv/bin/python
