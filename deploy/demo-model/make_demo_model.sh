#!/bin/sh
# Makes the demo model from nothing: packages, corpus, tokeniser, training, GGUF, verification.
#
#   deploy/demo-model/make_demo_model.sh WORK_DIRECTORY [STAGE...]
#
# Without stages, runs all of them in order. Needs Debian's apt-get and dpkg (nothing is installed:
# packages are unpacked into the work directory), a C++ compiler (torch.compile), Python 3.11 and,
# for `verify`, the project's own .venv (make setup). Environment: PYTHON (python3), THREADS (2),
# PAUSE_FILE (training rests while it exists). Training resumes from the last checkpoint.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
[ $# -ge 1 ] || { sed -n '2,9s/^# \{0,1\}//p' "$0" >&2; exit 2; }
mkdir -p "$1"
work=$(cd "$1" && pwd)
shift
[ $# -ge 1 ] || set -- packages environment corpus tokenizer cloze baseline train export reference verify plot

packages="bible-kjv bible-kjv-text sword-text-web sword-comm-mhcc r-cran-janeaustenr jargon-text dict-devil"
threads=${THREADS:-2}
# oneDNN keeps a kernel for each shape; the experts' batches have many shapes.
export OMP_NUM_THREADS="$threads" ONEDNN_PRIMITIVE_CACHE_CAPACITY=8192 PYTHONDONTWRITEBYTECODE=1

for stage; do
    echo "== $stage"
    case $stage in
    packages)
        rm -rf "$work/archives" "$work/packages"
        mkdir -p "$work/archives"
        (cd "$work/archives" && apt-get download $packages)
        for name in $packages; do
            mkdir -p "$work/packages/$name"
            dpkg -x "$work/archives/${name}"_*.deb "$work/packages/$name"
        done
        ;;
    environment)
        "${PYTHON:-python3}" -m venv "$work/venv"
        "$work/venv/bin/pip" install --quiet --requirement "$here/requirements.txt"
        ;;
    verify)
        "$root/.venv/bin/python" "$here" verify "$work" --threads "$threads"
        ;;
    train)
        "$work/venv/bin/python" "$here" train "$work" --threads "$threads" \
            ${PAUSE_FILE:+--pause-file "$PAUSE_FILE"}
        ;;
    *)
        "$work/venv/bin/python" "$here" "$stage" "$work" --threads "$threads"
        ;;
    esac
done
