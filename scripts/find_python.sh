#!/bin/sh
# Print the path of an interpreter that can hold the project: Python 3.11 or newer, with venv and ensurepip.
# An argument is tried first and alone. Prints one line that says what to do, and fails, where there is none.
set -eu

version_ok() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; }
venv_ok() { "$1" -c 'import ensurepip, venv' 2>/dev/null; }

without_venv=""
for candidate in ${1:-python3 python3.12 python3.11 python3.13 python}; do
    path=$(command -v "$candidate" 2>/dev/null) || continue
    version_ok "$path" || continue
    if venv_ok "$path"; then
        echo "$path"
        exit 0
    fi
    without_venv=$path
done

if [ -n "$without_venv" ]; then
    echo "error: $without_venv lacks the ensurepip module that virtual environments need:" \
        "install it (Debian, Ubuntu: the package python3-venv), or name another with make PYTHON=..." >&2
else
    echo "error: found no Python 3.11, 3.12 or 3.13 (tried: ${1:-python3 python3.12 python3.11 python3.13 python}):" \
        "install one, or name it with make PYTHON=..." >&2
fi
exit 1
