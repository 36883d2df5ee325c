#!/bin/sh
# The container image, built and used as launch/guide/container.md says: container.sh
#
# Needs docker or podman; the first that works here, or the one that ENGINE names. As on a careful host, containers have a read-only
# root, no capabilities, a memory limit, a user whom the image does not know, and a folder of the host for what stays.
#
#   BASE            another base image than the Dockerfile's, where its registry is not reachable; an image that is here already will do
#   BUILD_OPTIONS   more options of `build`, separated by blanks: --isolation chroot, or --volume for wheels and certificates
#   RUN_OPTIONS     more options of `run`: --network host where there is no network for containers
#
# Exit status: 0; 1 when something is not as it should be; 2 when there is no engine.
set -eu

checkout=$(cd "$(dirname "$0")/../.." && pwd -P)
scratch=$(mktemp -d)
name=neuronpipe-nightly
image=$name:$$
key=0123456789abcdef0123456789abcdef
said=$scratch/said

say() { printf 'container: %s\n' "$*" >&2; }

wrong() {
    say "$*"
    [ ! -s "$said" ] || tail -n 30 "$said" >&2
    exit 1
}

engine=${ENGINE:-}
for each in docker podman; do
    [ -n "$engine" ] || ! "$each" info >/dev/null 2>&1 || engine=$each # a command alone is no engine
done
[ -n "$engine" ] || {
    say "neither docker nor podman works here; apt-get install podman"
    exit 2
}

clean_up() {
    "$engine" rm --force "$name" >/dev/null 2>&1 || true
    "$engine" rmi --force "$image" >/dev/null 2>&1 || true
    rm -rf "$scratch"
}
trap clean_up EXIT
trap 'exit 130' INT TERM

mkdir "$scratch/data" "$scratch/tmp"
chmod 1777 "$scratch/data" "$scratch/tmp"

# in_container OPTIONS... IMAGE WORDS...: as on a careful host. RUN_OPTIONS and the like are words by their blanks.
in_container() {
    # shellcheck disable=SC2086
    "$engine" run --read-only --volume "$scratch/tmp:/tmp" --volume "$scratch/data:/data" --user 4711 --memory 512m \
        --cap-drop ALL --security-opt no-new-privileges ${RUN_OPTIONS:-} "$@"
}

say "building with $engine"
# An image in Podman's own format has no health check.
[ "$engine" != podman ] || set -- --format docker
# shellcheck disable=SC2086
"$engine" build "$@" ${BASE:+--build-arg BASE="$BASE"} ${BUILD_OPTIONS:-} --tag "$image" "$checkout" >"$said" 2>&1 ||
    wrong "the image could not be built"

say "without a key"
code=0
in_container --rm "$image" >"$said" 2>&1 || code=$?
[ "$code" = 2 ] && grep -q 'set NEURONPIPE_KEY' "$said" || wrong "expected status 2 and a line on the key, got $code"

say "no compiler in it"
in_container --rm --entrypoint sh "$image" -c '! { command -v cc || command -v gcc || command -v pip; }' >"$said" 2>&1 ||
    wrong "it holds what only building needs"

say "the same tokens with io_uring and without, where memory is short and on one core"
generate() {
    in_container --rm "$@" run -p 'def fibonacci(n):' -n 32 --json --ffn-resident 50% 2>"$said" | grep -o '"token_ids": \[[^]]*\]'
}
tokens=$(generate "$image") || wrong "no text"
[ "$(generate --security-opt seccomp=unconfined "$image")" = "$tokens" ] || wrong "other tokens without a filter for system calls"
[ "$(generate --memory 160m --cpuset-cpus 0 "$image")" = "$tokens" ] || wrong "other tokens with little memory"

say "serving"
in_container --detach --name "$name" --publish 127.0.0.1::8080 --env NEURONPIPE_KEY=$key "$image" >"$said" 2>&1 || wrong "it did not start"
# Podman has its checks started by systemd, which need not be there: we start them.
is_healthy() {
    if [ "$engine" = podman ]; then
        podman healthcheck run "$name" >/dev/null 2>&1
    else
        [ "$("$engine" inspect --format '{{.State.Health.Status}}' "$name")" = healthy ]
    fi
}
tries=0
until is_healthy; do
    tries=$((tries + 1))
    [ "$tries" -lt 120 ] || { "$engine" logs "$name" >"$said" 2>&1; wrong "not healthy after a minute"; }
    sleep 0.5
done
place=$("$engine" port "$name" 8080 2>/dev/null | head -n 1)
address=http://${place:-127.0.0.1:8080} # on the host's own network nothing is published

# ask KEY: the status; the answer is in $said.
ask() {
    curl --silent --output "$said" --write-out '%{http_code}' "$address/v1/completions" -H "Authorization: Bearer $1" \
        -H 'content-type: application/json' -d '{"prompt": "def fibonacci(n):", "max_tokens": 16}'
}
[ "$(ask wrong)" = 401 ] || wrong "served without the key"
[ "$(ask $key)" = 200 ] && grep -q '"completion_tokens": 16' "$said" || wrong "no text over HTTP"

say "a killed worker comes back, and leaves nothing behind"
"$engine" exec "$name" python3 -c '
import os, signal, time
def processes():
    stats = [open(f"/proc/{pid}/stat").read() for pid in os.listdir("/proc") if pid.isdigit()]
    return {stat[stat.index("(") + 1 : stat.rindex(")")]: (int(stat.split()[0]), stat[stat.rindex(")") + 2]) for stat in stats}
before, _ = processes()["np-decode.0"]
os.kill(before, signal.SIGKILL)
until = time.monotonic() + 10
while processes().get("np-decode.0", (before, ""))[0] == before and time.monotonic() < until:
    time.sleep(0.1)
found = processes()
assert found["np-decode.0"][0] != before, found
assert not [name for name, (_, state) in found.items() if state == "Z"], found
' >"$said" 2>&1 || wrong "after the end of a worker"
[ "$(ask $key)" = 200 ] || wrong "no text after the end of a worker"

say "stopping"
"$engine" stop --time 20 "$name" >/dev/null 2>&1
code=$("$engine" inspect --format '{{.State.ExitCode}}' "$name")
"$engine" logs "$name" >"$said" 2>&1
[ "$code" = 0 ] || wrong "ended with status $code"
[ -z "$(ls -A "$scratch/tmp")" ] || wrong "left in /tmp: $(ls -A "$scratch/tmp")"
say "all as it should be"
