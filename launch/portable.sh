#!/bin/sh
# A folder that runs neuronpipe on any Linux kernel of this machine's architecture, Android's over adb among them, without anything
# installed there: portable.sh FOLDER. It holds Python, the C library with its dynamic loader, the packages and the demo model, and
# is entered through FOLDER/neuronpipe, which finds everything beside itself. For glibc systems; needs what launch/neuronpipe needs.
set -eu
unset CDPATH

target=${1:?usage: portable.sh FOLDER}
root=$(cd "$(dirname "$0")/.." && pwd -P)
. "$root/launch/bootstrap.sh"
bootstrap run
[ ! -e "$target" ] || {
    say "$target exists; name another folder, or remove it"
    exit 2
}
mkdir -p "$target"
target=$(cd "$target" && pwd -P)

"$venv/bin/python" - "$target" <<'PYTHON'
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

target = Path(sys.argv[1])
version = f"python{sys.version_info.major}.{sys.version_info.minor}"
skipped = shutil.ignore_patterns(
    "__pycache__", "test", "tests", "idlelib", "tkinter", "_tkinter*", "ensurepip", "config-*", "site-packages", "dist-packages"
)
shutil.copytree(sysconfig.get_path("stdlib"), target / "lib" / version, ignore=skipped)
(target / "bin").mkdir()
shutil.copy(Path(sys.executable).resolve(), target / "bin" / "python")

# Everything that is loaded: the interpreter's libraries, and those of every extension module.
found = [target / "bin/python", *(target / "lib").rglob("*.so*"), *Path(sysconfig.get_path("platlib")).rglob("*.so*")]
for program in found:
    said = subprocess.run(["ldd", program], capture_output=True, text=True).stdout
    for line in said.splitlines():
        # "libm.so.6 => /lib/libm.so.6 (0x7f...)", the loader "/lib64/ld-linux-x86-64.so.2 (0x7f...)"; a path may hold blanks.
        place = Path((line.partition("=> ")[2] or line).strip().rpartition(" (")[0])
        # What a wheel brings along lies beside its module and is found there.
        if not place.is_absolute() or "site-packages" in str(place) or place.is_relative_to(target):
            continue
        if not (target / "lib" / place.name).exists():
            shutil.copy(place.resolve(), target / "lib" / place.name)
PYTHON

say "installing into $target"
: >"$log"
must "$venv/bin/python" -m pip install --no-build-isolation --target "$target/packages" "$root"
loader=$(cd "$target/lib" && ls ld-linux-*.so.* ld-musl-*.so.* 2>/dev/null | head -n 1)
cat >"$target/neuronpipe" <<START
#!/bin/sh
# Runs what lies beside this file, wherever that is. Made by launch/portable.sh.
here=\$(cd "\${0%/*}" && pwd -P)
export PYTHONHOME="\$here" PYTHONPATH="\$here/packages" PYTHONDONTWRITEBYTECODE=1
export TMPDIR="\${TMPDIR:-\$here/tmp}" HOME="\${HOME:-\$here/tmp}"
mkdir -p "\$here/tmp" 2>/dev/null
export NEURONPIPE_COMMAND="\$0"
exec "\$here/lib/$loader" --library-path "\$here/lib" "\$here/bin/python" -m neuronpipe.launch "\$@"
START
chmod +x "$target/neuronpipe"
say "$(du -sm "$target" | cut -f 1) MB in $target"
