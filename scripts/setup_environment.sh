# Sourced by quickstart.sh and test.sh, from the root of the repository.
#
# ensure_environment FILE: make .venv hold what the requirements file FILE asks for. A stamp with the hash of the
# requirements makes later calls instant and free of the network.

python=.venv/bin/python

ensure_environment() {
    local file=$1 base=${PYTHON:-python3} key
    if ! command -v "$base" >/dev/null || ! "$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "error: $base is not Python 3.11 or newer; install it, or name one with PYTHON=/path/to/python." >&2
        return 2
    fi
    key=$(requirements_key "$base" "$file")
    if [[ -x $python && $(cat ".venv/$file.stamp" 2>/dev/null) == "$key" ]]; then
        return
    fi
    if ! "$base" -c 'import ensurepip, venv' 2>/dev/null; then
        echo "error: $base lacks the venv module; install it (Debian: apt-get install python3-venv)." >&2
        return 2
    fi
    echo "installing $file into .venv (once; a few minutes)"
    rm -f .venv/*.stamp
    "$base" -m venv .venv || return
    "$python" -m pip install --disable-pip-version-check -r "$file" || return
    # requirements-dev.txt includes requirements.txt.
    requirements_key "$base" requirements.txt >.venv/requirements.txt.stamp
    echo "$key" >".venv/$file.stamp"
}

requirements_key() {
    { "$1" --version; cat requirements.txt "$2"; } | sha256sum | cut -d ' ' -f 1
}
