# Shell functions of the Makefile; sourced, never run. bash, with set -euo pipefail.

say() { printf '\033[1msie-stream\033[0m %s\n' "$*"; }

stage() {
    printf '\n\033[1m== %s\033[0m\n' "$*"
}

fail() {
    printf 'sie-stream: %s\n' "$*" >&2
    exit 1
}

# require_python PYTHON
require_python() {
    local python=$1
    command -v "$python" >/dev/null 2>&1 ||
        fail "no '$python' found. Install Python 3.11 or later (Debian: apt-get install python3 python3-venv), or name one: make setup PYTHON=python3.12"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        fail "'$python' is $("$python" --version 2>&1); Python 3.11 or later is needed. Name another one: make setup PYTHON=python3.12"
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "'$python' cannot create virtual environments. Debian: apt-get install python3-venv"
}

# create_environment PYTHON FOLDER UV_VERSION: a virtual environment with uv in it; kept if it is of the same Python.
create_environment() {
    local python=$1 folder=$2 uv_version=$3 wanted found
    wanted=$("$python" -c 'import sys; print(sys.version_info[:2])')
    found=$("$folder/bin/python" -c 'import sys; print(sys.version_info[:2])' 2>/dev/null || true)
    if [[ $found != "$wanted" ]]; then
        say "creating $folder with $("$python" --version 2>&1)"
        "$python" -m venv --clear "$folder"
    fi
    if [[ $("$folder/bin/uv" --version 2>/dev/null || true) != "uv $uv_version"* ]]; then
        "$folder/bin/python" -m pip install --quiet --disable-pip-version-check "uv==$uv_version"
    fi
}

# install_project WHEELS_FOLDER: the project (editable) and its tools, exactly as locked.
install_project() {
    local wheels=$1 options=()
    if [[ -n $wheels ]]; then
        [[ -d $wheels ]] || fail "TORCH_WHEELS=$wheels: no such folder"
        wheels=$(cd "$wheels" && pwd)
        options=(--find-links "$wheels")
    fi
    if ! torch_from_wheels "$wheels" && ! .venv/bin/python -c 'import torch' 2>/dev/null; then
        say "torch comes from the package index; on Linux x86 that is a CUDA build (4.7 GB). For a CPU build: make setup TORCH_WHEELS=dir"
    fi
    # Compiled once here: without it every engine process would compile scikit-learn or torch again where caches are off.
    with_steps .venv/bin/uv pip install --compile-bytecode --python .venv/bin/python --constraints requirements.lock "${options[@]}" --editable '.[dev]'
}

# with_steps COMMAND...: uv's own bars at a terminal; elsewhere one line for each step and each large download, without
# the list of all packages.
with_steps() {
    if [[ -t 2 ]]; then
        "$@"
    else
        "$@" 2>&1 | { grep --line-buffered -v '^ [-+~] ' || true; }
    fi
}

# torch_from_wheels FOLDER: true when the folder has a torch wheel that fits this interpreter.
torch_from_wheels() {
    local tag
    tag=$(.venv/bin/python -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
    [[ -n $1 ]] && compgen -G "$1/torch-2.13.0*-$tag-*$(uname -m).whl" >/dev/null
}

# run_tests FOLDER...: pytest; a folder without tests yet is said, not failed.
run_tests() {
    local status=0
    .venv/bin/pytest --no-header "$@" || status=$?
    if [[ $status == 5 ]]; then
        say "no tests in $*"
        status=0
    fi
    return "$status"
}

# beside COMMAND FOREGROUND...: run both at once, show the output of COMMAND at the end, fail if either does.
beside() {
    local output status=0
    output=$(mktemp)
    $1 >"$output" 2>&1 &
    local background=$!
    "${@:2}" || status=$?
    wait "$background" || status=$?
    cat "$output"
    rm -f "$output"
    return "$status"
}

compile_locks() {
    local options=(--quiet --universal --python-version 3.11 --no-header --no-annotate --upgrade)
    {
        sed -n '/^#/p' requirements.lock
        .venv/bin/uv pip compile "${options[@]}" --extra dev pyproject.toml
    } >requirements.lock.new
    {
        sed -n '/^#/p' requirements-bench.lock
        .venv/bin/uv pip compile "${options[@]}" --group bench
    } >requirements-bench.lock.new
    mv requirements.lock.new requirements.lock
    mv requirements-bench.lock.new requirements-bench.lock
}
