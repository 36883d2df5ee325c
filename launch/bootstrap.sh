# Sourced by launch/neuronpipe and launch/test, with $root set to the checkout: `bootstrap run` or `bootstrap test` gives the
# checkout a virtual environment in .venv with the project installed into it, kernels compiled. Costs a few milliseconds when
# there is nothing to do. POSIX sh; pip's own settings (PIP_*, pip.conf) hold; everything it prints goes to .venv/bootstrap.log.
#
#   file                   meaning
#   .venv/run.stamp        installed; first line: the checkout's path, time stamp: when that installation began
#   .venv/test.stamp       the same, with what the tests need
#   .venv/bootstrap.lock   held (flock) by the start that is installing
#   .venv/bootstrap.log    output of the latest installation

venv=$root/.venv
log=$venv/bootstrap.log

say() { printf 'neuronpipe: %s\n' "$*" >&2; }

# Is the installation of this kind there, made for this path, and newer than everything it was built from?
is_current() {
    [ -x "$venv/bin/python" ] && [ -x "$venv/bin/neuronpipe" ] && [ -e "$root/native/_kernels.abi3.so" ] || return 1
    [ -f "$venv/$1.stamp" ] && read -r made_for <"$venv/$1.stamp" && [ "$made_for" = "$root" ] || return 1
    [ -z "$(find "$root/pyproject.toml" "$root/native" \
        \( -name '*.[ch]' -o -name '*.cmake' -o -name CMakeLists.txt -o -name bind.py -o -name pyproject.toml \) \
        -newer "$venv/$1.stamp")" ]
}

# Sets $python to a Python of version 3.11 or newer, or to nothing.
find_python() {
    for python in python3 python3.14 python3.13 python3.12 python3.11 python; do
        if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            return 0
        fi
    done
    python=
}

compiler_works() {
    for compiler in ${CC:-} cc gcc clang; do
        if printf '#include <stdio.h>\n' | "$compiler" -x c -fsyntax-only - 2>/dev/null; then
            return 0
        fi
    done
    return 1
}

is_termux() { [ -n "${TERMUX_VERSION:-}" ]; }

# Sets $missing to words out of: python headers venv compiler.
find_missing() {
    missing=
    find_python
    if [ -z "$python" ]; then
        missing="python headers venv"
    else
        "$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' || missing="headers"
        "$python" -c 'import venv, ensurepip' 2>/dev/null || missing="${missing:+$missing }venv"
    fi
    compiler_works || missing="${missing:+$missing }compiler"
    # No wheels of these exist for Android's C library, so the phone's own packages are used.
    if is_termux && ! { command -v cmake && command -v ninja && "$python" -c 'import numpy, psutil'; } >/dev/null 2>&1; then
        missing="${missing:+$missing }packages"
    fi
}

# Prints the command that installs $missing here, for root; nothing when the package manager is unknown.
install_command() {
    if is_termux; then
        echo "pkg install -y tur-repo && pkg install -y python python-pip python-numpy python-psutil python-tokenizers" \
            "clang cmake ninja binutils rust libzmq"
    elif command -v apt-get >/dev/null; then
        if [ -n "$python" ]; then
            version=$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
        elif command -v python3 >/dev/null; then
            version=python3.11 # the distribution's own is older; some of them carry this one beside it
        else
            version=python3
        fi
        packages=
        for word in $missing; do
            case $word in
            python) packages="$packages $version" ;;
            headers) packages="$packages $version-dev" ;;
            venv) packages="$packages $version-venv" ;;
            compiler) packages="$packages gcc libc6-dev" ;;
            esac
        done
        echo "apt-get update && apt-get install -y$packages" # a fresh Debian has no lists of packages
    elif command -v dnf >/dev/null; then
        echo "dnf install -y gcc python3.11 python3.11-devel"
    elif command -v pacman >/dev/null; then
        echo "pacman -S --needed gcc python"
    elif command -v apk >/dev/null; then
        echo "apk add gcc musl-dev linux-headers python3 python3-dev"
    fi
}

# Runs "$@" with its output in the log. On a terminal the current step of pip is shown on one line that is wiped afterwards.
logged() {
    if [ ! -t 2 ]; then
        "$@" >>"$log" 2>&1
        return
    fi
    rm -f "$venv/bootstrap.failed"
    { "$@" 2>&1 || echo $? >"$venv/bootstrap.failed"; } | while IFS= read -r line; do
        printf '%s\n' "$line" >>"$log"
        case $line in
        Collecting* | Downloading* | *"Building "* | *"Preparing "* | Installing* | Unpacking* | "Setting up "*)
            printf '\r\033[K  %.70s' "$line" >&2
            ;;
        esac
    done
    printf '\r\033[K' >&2
    ! [ -e "$venv/bootstrap.failed" ]
}

# logged "$@", or the end of the log and exit 1.
must() { logged "$@" || give_up; }

give_up() {
    tail -n 30 "$log" >&2
    say "setting up failed; all of its output is in $log"
    exit 1
}

# apt_install PACKAGES...: as root. Another start may be doing the same: its locks are waited for, up to five minutes. The option
# for that knows dpkg's lock alone; those on the lists and on the archives end apt-get at once, so it is tried again.
apt_install() {
    apt_until=$(($(date +%s) + 300))
    until logged sh -c 'export LC_ALL=C DEBIAN_FRONTEND=noninteractive
        apt-get update && apt-get install -y "$@" --no-install-recommends -o DPkg::Lock::Timeout=300' sh "$@"; do
        case $(tail -n 4 "$log") in
        *"E: Could not get lock"* | *"E: Unable to lock"*) ;;
        *) return 1 ;;
        esac
        [ "$(date +%s)" -lt "$apt_until" ] || return 1
        [ -n "${apt_waited:-}" ] || say "another apt holds a lock; waiting for it"
        apt_waited=yes
        sleep 1
    done
}

# Compiler, headers and Python itself: installed where that is allowed, else the command is named and we leave with 2.
require_system_packages() {
    find_missing
    # Twice: with Python itself missing, only the first round shows that the distribution's own is too old.
    for round in 1 2; do
        [ -n "$missing" ] || return 0
        command=$(install_command)
        if is_termux; then
            say "installing with pkg: $missing"
            must sh -c "$command"
        elif [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
            say "installing with apt-get: $missing"
            # shellcheck disable=SC2086 # names of packages, one word each
            apt_install ${command##*install -y } || give_up
        else
            break
        fi
        find_missing
    done
    [ -n "$missing" ] || return 0
    say "missing: $missing (needed: Python 3.11 or newer with headers and venv, and a C compiler)"
    command=$(install_command)
    if [ -z "$command" ]; then
        say "install these with your system's package manager, then start again"
    elif is_termux || [ "$(id -u)" = 0 ]; then
        say "this installs them:  $command"
    elif command -v sudo >/dev/null; then
        say "this installs them:  sudo sh -c '$command'"
    else
        say "this installs them:  su -c '$command'"
    fi
    exit 2
}

make_environment() {
    if ! "$venv/bin/python" -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        say "making the virtual environment .venv"
        # Half of one from an interrupted start, or one whose Python is gone; the log and the lock live here too and stay.
        rm -rf "$venv/bin" "$venv/lib" "$venv/lib64" "$venv/include" "$venv/pyvenv.cfg"
        if is_termux; then
            must "$python" -m venv --system-site-packages "$venv"
        else
            must "$python" -m venv "$venv"
        fi
    fi
}

# $1: run or test. The build tools stay in the environment, so that a changed kernel compiles without a network.
install_project() {
    extras= compile=
    # Of what the tests bring along, Python compiles what they import when they do; to compile all takes 15 s of a core.
    [ "$1" = run ] || extras='[test]' compile=--no-compile
    say "installing the build tools"
    PATH=$venv/bin:$PATH
    build_requirements=$("$venv/bin/python" -c '
import sys, tomllib
print(*tomllib.load(open(sys.argv[1], "rb"))["build-system"]["requires"], sep="\n")' "$root/pyproject.toml" 2>>"$log")
    old_ifs=$IFS
    IFS='
'
    # shellcheck disable=SC2086 # one requirement per line, made into words by the newline
    must "$venv/bin/python" -m pip install $build_requirements
    # The build system knows whether CMake and Ninja are here already or have to come as packages.
    more=$("$venv/bin/python" -c '
from scikit_build_core.build import get_requires_for_build_editable
print(*get_requires_for_build_editable({}), sep="\n")' 2>>"$log") || more=
    if [ -n "$more" ]; then
        # shellcheck disable=SC2086
        must "$venv/bin/python" -m pip install $more
    fi
    IFS=$old_ifs
    say "installing neuronpipe and compiling its kernels"
    # shellcheck disable=SC2086 # an option, or nothing
    must "$venv/bin/python" -m pip install $compile --no-build-isolation --editable ".$extras"
}

bootstrap() {
    is_current "$1" && return
    started=$(date +%s)
    mkdir -p "$venv" 2>/dev/null && touch "$log" 2>/dev/null || {
        say "$venv cannot be written; make the checkout yours, or copy it to a place that is"
        exit 2
    }
    require_system_packages
    # The lock belongs to the open file, which this shell keeps: it ends with us, however we end.
    exec 9>"$venv/bootstrap.lock"
    if ! "$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)' 2>/dev/null; then
        say "another start is installing; waiting for it"
        "$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)'
    fi
    if ! is_current "$1"; then
        trap 'say "setting up was interrupted; the same command goes on with it"; exit 130' INT
        : >"$log"
        # Stamped with the time before the build: what is edited meanwhile is newer, and built by the next start.
        printf '%s\n' "$root" >"$venv/new.stamp"
        (
            cd "$root"
            make_environment
            install_project "$1"
        ) || exit $?
        rm -f "$venv/run.stamp" "$venv/test.stamp"
        [ "$1" = run ] || cp -p "$venv/new.stamp" "$venv/run.stamp"
        mv "$venv/new.stamp" "$venv/$1.stamp"
        trap - INT
        say "ready after $(($(date +%s) - started)) s"
    fi
    exec 9>&-
}
