#!/bin/sh
# neuronpipe on a phone, in Termux, without root: checks what Android allows, installs what is missing, starts a run with a plan
# for this phone, keeps the processor awake and the phone cool.
#
#   phone.sh --check                           only check: 0 it can run, 1 something stands in the way; installs nothing
#   phone.sh [PACKAGE] [options of `up`]       start a run that stays until Ctrl-C; the demo, a self-test, without PACKAGE
#   phone.sh serve [PACKAGE] [options]         the same with OpenAI's API, at http://127.0.0.1:8080
#   phone.sh run [PACKAGE] -p TEXT [options]   one text, then the end
#
# Without --memory the run may take half of what is available now: Android kills apps that take memory from
# others, without notice. NEURONPIPE_DEVICE names a folder whose proc and sys are looked at in place of the phone's (for tests).
set -eu
unset CDPATH

script=$0
case $script in
*/*) ;;
*) script=./$script ;;
esac
root=$(cd "${script%/*}/.." && pwd -P)
device=${NEURONPIPE_DEVICE:-}
. "$root/launch/bootstrap.sh"

MIN_DISK_MIB=3000 # for what is not installed yet: an estimate for Python, two compilers and what they build
COMFORTABLE_DISK_MIB=8000
MIN_MEMORY_MIB=400
COMFORTABLE_MEMORY_MIB=1024
PHANTOM_SINCE=31        # Android 12
PHANTOM_SWITCH_SINCE=32 # Android 12L has a switch for it

failed=

finding() { # finding ok|warn|FAIL NAME FOUND [ADVICE]
    printf '%-4s  %-14s %s\n' "$1" "$2" "$3"
    if [ "$1" = FAIL ]; then failed=yes; fi
    if [ -n "${4:-}" ]; then printf '%21s-> %s\n' '' "$4"; fi
}

property() { getprop "$1" 2>/dev/null || :; }

memory_mib() { # memory_mib FIELD: of /proc/meminfo
    awk -v field="$1:" '$1 == field { found = $2 } END { print int(found / 1024) }' "$device/proc/meminfo" 2>/dev/null || echo 0
}

check_termux() {
    if ! is_termux; then
        finding warn termux "this is not Termux" "on any other Linux, launch/neuronpipe does the same"
    elif [ "${TERMUX_APP__APK_RELEASE:-${TERMUX_APK_RELEASE:-}}" = GOOGLE_PLAY_STORE ]; then
        finding warn termux "$TERMUX_VERSION from the Play Store, whose packages are fewer" "install Termux from F-Droid or GitHub"
    else
        finding ok termux "$TERMUX_VERSION"
    fi
    sdk=$(property ro.build.version.sdk)
    case $sdk in '' | *[!0-9]*) sdk=0 ;; esac
    [ "$sdk" = 0 ] || finding ok android "$(property ro.build.version.release) (API $sdk), $(property ro.product.model)"
}

check_architecture() {
    case $(uname -m) in
    aarch64 | arm64 | x86_64) finding ok architecture "$(uname -m), Linux $(uname -r)" ;;
    *) finding FAIL architecture "$(uname -m)" "a 64-bit system is needed; some phones have a 64-bit processor and a 32-bit Android" ;;
    esac
}

# Shared storage (/sdcard) runs no programs and knows no links.
check_place() {
    trial=$root/.phone-trial.$$
    if {
        printf '#!%s\nexit 0\n' "$(command -v sh)" >"$trial" && chmod +x "$trial" && "$trial" && ln -s x "$trial.link"
    } 2>/dev/null; then
        finding ok place "$root"
    else
        finding FAIL place "$root runs no programs or takes no links" "clone into Termux's home: cd ~ && git clone ..."
    fi
    rm -f "$trial" "$trial.link"
}

check_disk() {
    free_mib=$(df -Pk "$root" 2>/dev/null | awk 'NR == 2 { print int($4 / 1024) }')
    free_mib=${free_mib:-0}
    if [ "$free_mib" -lt "$MIN_DISK_MIB" ] && ! is_current run; then
        finding FAIL storage "$free_mib MiB free" "installing takes about $MIN_DISK_MIB MiB; remove something"
    elif [ "$free_mib" -lt "$COMFORTABLE_DISK_MIB" ]; then
        finding warn storage "$free_mib MiB free" "enough for the demo; a 7B model takes 4300 MiB"
    else
        finding ok storage "$free_mib MiB free"
    fi
}

check_memory() {
    available_mib=$(memory_mib MemAvailable)
    found="$available_mib of $(memory_mib MemTotal) MiB available"
    if [ "$available_mib" -lt "$MIN_MEMORY_MIB" ]; then
        finding FAIL memory "$found" "close other apps; $MIN_MEMORY_MIB MiB is the least"
    elif [ "$available_mib" -lt "$COMFORTABLE_MEMORY_MIB" ]; then
        finding warn memory "$found" "close other apps: what is not in memory is read from flash for every token"
    else
        finding ok memory "$found"
    fi
}

# Cores by speed, like "8: 2 of 325, 5 of 830, 1 of 1024": capacities where the kernel states them, else clocks in kHz.
check_cores() {
    kinds=
    for file in cpu_capacity cpufreq/cpuinfo_max_freq; do
        kinds=$(cat "$device"/sys/devices/system/cpu/cpu[0-9]*/"$file" 2>/dev/null | sort -n | uniq -c |
            awk '{ printf "%s%s of %s", separator, $1, $2; separator = ", " }')
        [ -z "$kinds" ] || break
    done
    all=$(ls -d "$device"/sys/devices/system/cpu/cpu[0-9]* 2>/dev/null | wc -l | tr -d ' ')
    allowed=$(awk '$1 == "Cpus_allowed_list:" { print $2 }' "$device/proc/self/status" 2>/dev/null || :)
    usable=$(printf '%s\n' "$allowed" | awk -F, '{
        for (i = 1; i <= NF; i++) { n = split($i, ends, "-"); sum += n == 2 ? ends[2] - ends[1] + 1 : n }
        print sum + 0 }')
    found="$all${kinds:+: $kinds}; this process may use ${allowed:-all}"
    if [ "$usable" -gt 0 ] && [ "$usable" -lt "$all" ]; then
        finding warn cores "$found" "Android keeps apps in the background off the fast cores: leave Termux open and the screen on"
    else
        finding ok cores "$found"
    fi
}

# Since Android 12 all apps together may have 32 processes that are no apps; the rest are killed, ours among them.
check_processes() {
    if [ "$sdk" -lt "$PHANTOM_SINCE" ]; then
        [ "$sdk" = 0 ] || finding ok processes "this Android does not count them"
    elif [ "$(property persist.sys.fflag.override.settings_enable_monitor_phantom_procs)" = false ]; then
        finding ok processes "not limited"
    elif [ "$sdk" -ge "$PHANTOM_SWITCH_SINCE" ]; then
        finding warn processes "32 for all apps together, and a busy one may be killed; a run has about 12" \
            "developer options, disable child process restrictions; or from a computer:
                        adb shell settings put global settings_enable_monitor_phantom_procs false"
    else
        finding warn processes "32 for all apps together (unless raised already); a run has about 12" \
            "from a computer:
                        adb shell device_config set_sync_disabled_for_tests persistent
                        adb shell device_config put activity_manager max_phantom_processes 2147483647"
    fi
}

check_kernel_limits() {
    locked=$(ulimit -l 2>/dev/null || echo unknown)
    case $locked in
    unlimited) finding ok "locked memory" "no limit" ;;
    *) finding ok "locked memory" "at most $locked KiB: weights are not locked; leave memory to other apps and they stay" ;;
    esac
    if [ "$sdk" -gt 0 ]; then
        finding ok io_uring "not for apps; a pool of threads reads flash instead"
    fi
}

check_awake() {
    if command -v termux-wake-lock >/dev/null; then
        finding ok awake "termux-wake-lock"
    else
        finding warn awake "no termux-wake-lock: the phone slows down or sleeps when the screen is off" "pkg install termux-tools"
    fi
}

check_temperature() {
    if cat "$device"/sys/class/thermal/thermal_zone0/temp >/dev/null 2>&1; then
        finding ok temperature "the kernel's sensors"
    elif command -v termux-battery-status >/dev/null; then
        finding ok temperature "the battery's, through Termux:API"
    else
        finding warn temperature "no sensor can be read: the run does not slow down when it is too hot" \
            "install the app Termux:API from where Termux came from, then: pkg install termux-api"
    fi
}

check() {
    check_termux
    check_architecture
    check_place
    check_disk
    check_memory
    check_cores
    check_processes
    check_kernel_limits
    check_awake
    check_temperature
}

# Sets $run to the run directory among the arguments, or to a new name; $limited when they say how much memory.
read_arguments() {
    run= limited= before=
    for word; do
        case $word in
        --run=*) run=${word#--run=} ;;
        --memory | --memory=* | --plan | --plan=*) limited=yes ;;
        esac
        if [ "$before" = --run ]; then run=$word; fi
        before=$word
    done
}

finish() {
    trap '' INT TERM HUP
    [ -z "$watcher" ] || kill "$watcher" 2>/dev/null || :
    if [ -n "$server" ]; then
        kill "$server" 2>/dev/null || :
        wait "$server" || :
    else
        "$venv/bin/neuronpipe" down --run "$run" >/dev/null 2>&1 || :
    fi
    release
}

release() {
    if command -v termux-wake-unlock >/dev/null; then termux-wake-unlock || :; fi
}

case ${1:-} in
-h | --help)
    sed -n '2,/^set /s/^#\( \|$\)//p' "$script"
    exit
    ;;
--check)
    check
    if is_current run; then
        printf '\nneuronpipe doctor:\n'
        "$venv/bin/neuronpipe" doctor || failed=yes
        "$venv/bin/neuronpipe" throttle --once
    elif is_termux; then
        find_missing
        finding ok installed "not yet${missing:+; missing: $missing}" "launch/phone.sh installs everything"
    fi
    [ -z "$failed" ] || exit 1
    exit 0
    ;;
esac

check >&2
if [ -n "$failed" ]; then
    say "put right what says FAIL, then start again"
    exit 2
fi
bootstrap run
export NEURONPIPE_COMMAND="$root/launch/neuronpipe" # lines to paste begin with it

read_arguments "$@"
if [ -z "$limited" ]; then
    set -- "$@" --memory "$((available_mib / 2))MiB"
    say "the run may take $((available_mib / 2)) MiB; --memory says otherwise"
fi
trap 'exit 130' INT # without these, some shells leave out what is to be done on EXIT
trap 'exit 143' TERM HUP
if command -v termux-wake-lock >/dev/null; then
    termux-wake-lock || say "the wake lock was refused: leave the screen on"
fi

if [ "${1:-}" = run ]; then
    trap release EXIT
    "$venv/bin/neuronpipe" "$@"
    exit
fi
if [ -z "$run" ]; then
    run=${TMPDIR:-/tmp}/neuronpipe-phone-$$
    set -- "$@" --run "$run"
fi
watcher= server=
trap finish EXIT
# In the background and waited for: a signal that comes to this shell then need not wait for them.
if [ "${1:-}" = serve ]; then
    "$venv/bin/neuronpipe" "$@" &
    server=$!
    while kill -0 "$server" 2>/dev/null && [ ! -e "$run/run.json" ]; do sleep 1; done
    kill -0 "$server" 2>/dev/null || wait "$server"
else
    "$venv/bin/neuronpipe" up "$@"
fi
say "until Ctrl-C; temperatures as they change:"
"$venv/bin/neuronpipe" throttle --run "$run" ${device:+--sensors "$device"} &
watcher=$!
wait "${server:-$watcher}"
