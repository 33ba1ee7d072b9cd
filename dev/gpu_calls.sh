#!/bin/sh
# What to measure with minutes on a GPU, the most informative first: one line per call, none longer
# than ten minutes. Each call resumes where an earlier one stopped, so a line is repeated until it
# says that it is complete. Rows and tables go to $OUT.
#
#     OUT=results/speed sh dev/gpu_calls.sh 1        the first call alone
#     OUT=results/speed sh dev/gpu_calls.sh          all of them, one after the other
#
# 1  what no one has seen yet: does it compile and run, and is it right (rank 1 under torch.compile,
#    the known cliffs of attention, ensembles and decoders)                            about 9 minutes
# 2  the random attention shapes that are left                                         about 7 minutes
# 3  decoders, each against one by one compiled and the compiled stack                 about 9 minutes
# 4  the random ensembles, most of the time torch.compile                 9 minutes, three to five times
# 5  the fair single model of the first figure; then the README's ratios               about 9 minutes
# 6  runs that the pages of docs/ lack                                    dev/gpu_queue.py --list
set -eu
OUT=${OUT:-gpu-calls}
PYTHON=${PYTHON:-python}
export PYTHONPATH="${PYTHONPATH:-src}:."
mkdir -p "$OUT"

call() {
    case "$1" in
    1)
        $PYTHON -m pytest tests/kernels/test_attention_short_compiled.py -x -q
        $PYTHON -m benchmarks.shapes --out "$OUT/shapes.jsonl" --seconds 480
        ;;
    2) $PYTHON -m benchmarks.shapes --out "$OUT/shapes.jsonl" --kinds attention --seconds 560 ;;
    3) $PYTHON -m benchmarks.shapes --out "$OUT/shapes.jsonl" --kinds decoder --seconds 560 ;;
    4) $PYTHON -m benchmarks.shapes --out "$OUT/shapes.jsonl" --kinds ensemble --seconds 560 ;;
    5) $PYTHON -m benchmarks.figure1 --out "$OUT/figure1.json" --ways headwise,competent ;;
    6) $PYTHON dev/gpu_queue.py --out "$OUT/queue" --seconds 560 ;;
    *)
        echo "calls are 1 to 6, got $1" >&2
        exit 2
        ;;
    esac
}

for number in ${*:-1 2 3 4 5 6}; do
    call "$number"
done
