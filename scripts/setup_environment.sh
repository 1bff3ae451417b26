# Sourced by quickstart.sh and test.sh, from the root of the repository.
#
# ensure_environment FILE: make .venv hold what the requirements file FILE asks for. A stamp with the hash of the
# requirements makes later starts instant and independent of the network.

python=.venv/bin/python

ensure_environment() {
    local file=$1 base=${PYTHON:-python3} key
    if ! command -v "$base" >/dev/null || ! "$base" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))'; then
        echo "error: $base is not Python 3.11 to 3.13; install one, or name it with PYTHON=/path/to/python." >&2
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
    install_packages "$file" || return
    # requirements-dev.txt includes requirements.txt.
    requirements_key "$base" requirements.txt >.venv/requirements.txt.stamp
    echo "$key" >".venv/$file.stamp"
}

install_packages() { # FILE: pip's lines go to a log, and their number to the terminal
    local log=.venv/pip.log start=$SECONDS line count=0
    "$python" -m pip install --disable-pip-version-check --progress-bar off -r "$1" 2>&1 | tee "$log" |
        while IFS= read -r line; do
            [[ $line == Collecting* ]] && count=$((count + 1))
            if [[ -t 1 ]]; then printf '\r\033[K%d packages; %.70s' "$count" "$line"; fi
        done
    local status=${PIPESTATUS[0]}
    if [[ -t 1 ]]; then printf '\r\033[K'; fi
    if ((status != 0)); then
        tail -n 12 "$log" >&2
        echo "error: pip could not install $1 (status $status); $log has all of its lines." >&2
        return "$status"
    fi
    echo "installed in $((SECONDS - start)) s; pip's lines are in $log"
}

requirements_key() {
    { "$1" --version; cat requirements.txt "$2"; } | sha256sum | cut -d ' ' -f 1
}
