# Sourced by quickstart.sh and test.sh: enters the checkout and its own virtual environment, making it when missing.
# Needs Python >= 3.10 and pip; pip's own settings (its configuration files and PIP_* variables) apply.
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
    echo "error: $("$python" --version) is too old; install Python 3.10 or newer, or name one: PYTHON=python3.12 $0" >&2
    exit 1
}

stamp=.venv/draftsmith-installed
wanted=$(cksum <pyproject.toml)
if [[ ! -f $stamp || $(<"$stamp") != "$wanted" ]]; then
    echo "installing into $PWD/.venv (once)"
    [[ -x .venv/bin/python ]] || "$python" -m venv .venv
    if ! command -v nvidia-smi >/dev/null; then
        # Before anything that depends on torch, so that a machine without a GPU gets the build that pip is set up for.
        .venv/bin/python -m pip install --quiet torch==2.13.0
    fi
    .venv/bin/python -m pip install --quiet --editable '.[dev]'
    echo "$wanted" >"$stamp"
fi
export PATH="$PWD/.venv/bin:$PATH"
