#!/bin/sh
# Build and run the native tests: run.sh [native] [sanitized] [aarch64]; all three without arguments.
# Exit status: 0 all passed, 1 a failure, 77 a part could not be run for want of tools (and nothing failed).
set -u
here=$(cd "$(dirname "$0")" && pwd)
build=$(cd "$here/../.." && pwd)/build/native-tests
status=0

part() { # part NAME RUNNER CMAKE-OPTIONS...
    name=$1 runner=$2
    shift 2
    log="$build/$name.log"
    mkdir -p "$build/$name"
    # Compiling takes what others leave: beside other tests it fills the time in which these wait.
    if ! { cmake -S "$here" -B "$build/$name" "$@" && nice -n 19 cmake --build "$build/$name" --parallel 2; } >"$log" 2>&1; then
        tail -n 30 "$log"
        echo "$name: build failed; the whole output is in $log"
        status=1
        return
    fi
    for source in "$here"/test_*.c; do
        program=$(basename "$source" .c)
        code=0
        # shellcheck disable=SC2086 # a command and its arguments, or nothing
        output=$($runner "$build/$name/$program" 2>&1) || code=$?
        last=$(echo "$output" | tail -n 1)
        untested=$(echo "$output" | sed -n 's/^ *\(.*\): not tested$/, but not: \1/p' | uniq | tr -d '\n')
        case $code in
        0) echo "$name $program: ok, $last$untested" ;;
        77) echo "$name $program: skipped, $last" ;; # it can check nothing on this processor
        *)
            echo "$output" | tail -n 40
            echo "$name $program: FAILED (exit status $code)"
            status=1
            ;;
        esac
    done
}

# The archive that the editable install has left, unless a source is newer: compiling it again takes over a minute. Its
# warnings are no errors, but those of the other two parts are.
compiled_engine() {
    root=$here/../..
    for archive in "$root"/build/editable/*/libneuronpipe.a; do
        [ -e "$archive" ] && [ -z "$(find "$root/native" -name '*.[ch]' -newer "$archive")" ] && echo "$archive" && return
    done
}

lacking() { # lacking NAME WHAT PACKAGES
    echo "$1: skipped, no $2; on Debian: apt-get install $3"
    if [ "$status" = 0 ]; then status=77; fi
}

for wanted in ${*:-native sanitized aarch64}; do
    case $wanted in
    native) part native "" "-DNP_ENGINE=$(compiled_engine)" ;;
    sanitized) part sanitized "" -DNP_SANITIZE=ON ;;
    aarch64)
        if ! command -v aarch64-linux-gnu-gcc >/dev/null; then
            lacking aarch64 aarch64-linux-gnu-gcc "gcc-aarch64-linux-gnu libc6-dev-arm64-cross"
        elif ! command -v qemu-aarch64-static >/dev/null; then
            lacking aarch64 qemu-aarch64-static qemu-user-static
        else
            part aarch64 "qemu-aarch64-static -cpu max" -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
                -DCMAKE_C_COMPILER=aarch64-linux-gnu-gcc -DCMAKE_EXE_LINKER_FLAGS=-static
        fi
        ;;
    *)
        echo "run.sh: unknown part '$wanted'; use native, sanitized or aarch64"
        exit 2
        ;;
    esac
done
exit $status
