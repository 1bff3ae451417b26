#!/usr/bin/env bash
set -euo pipefail

usage() {
    cat <<'END'
Usage: scripts/laptop.sh [--smoke] [--text FILE]... [--blimp PATH] [DIRECTORY]

A GLM from ten million words of English in 2.2 hours on two cores, and what it knows (docs/laptop.md): collects text from
packages with free licences, trains a tokenizer, builds the corpora, trains configs/laptop.yaml in its phases, scores it
on BLiMP after each phase, and writes a page about the run.

Everything but .venv is written below DIRECTORY (default: laptop). Run it again to continue after an interruption:
finished stages are skipped, and training resumes from its last checkpoint.

  --text FILE   your text instead of the packages: .txt, or .jsonl with a field text; repeatable
  --blimp PATH  BLiMP's files (data/ of github.com/alexwarstadt/blimp); without it nothing is scored
  --smoke       a few steps of a small model on the documentation of the installed packages: checks that everything
                works, not that the model learns (default DIRECTORY: build/laptop)

The packages come from apt-get (Debian, Ubuntu; no root needed) and pip. Needs what scripts/quickstart.sh needs.
END
}

smoke=false directory='' blimp='' texts=()
while (($#)); do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --smoke) smoke=true ;;
        --text | --blimp)
            if [[ ! -e ${2-} ]]; then
                echo "error: $1 ${2-} does not exist; name a file or directory." >&2
                exit 2
            fi
            if [[ $1 == --text && -d $2 ]]; then
                echo "error: --text $2 is a directory; name a file, and repeat --text for several." >&2
                exit 2
            fi
            if [[ $1 == --text ]]; then texts+=("$(realpath -- "$2")"); else blimp=$(realpath -- "$2"); fi
            shift
            ;;
        -*) echo "error: unknown option $1; see scripts/laptop.sh --help." >&2; exit 2 ;;
        *)
            if [[ -n $directory ]]; then
                echo "error: more than one directory given; see scripts/laptop.sh --help." >&2
                exit 2
            fi
            directory=$(realpath -m -- "$1")
            ;;
    esac
    shift
done

cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_environment.sh
source scripts/stages.sh

vocab_size=8192 pairs=100 all_pairs=() overrides=()
if ! grep -qE 'avx512_bf16|amx_bf16' /proc/cpuinfo 2>/dev/null; then
    overrides+=(training.precision=fp32) # bf16 without instructions for it is slower than fp32
fi
if $smoke; then
    vocab_size=512 pairs=1 all_pairs=(--pairs 1)
    overrides=(training.precision=fp32 model.num_layers=2 model.hidden_size=64 model.num_attention_heads=2
        model.ffn_size=128 training.steps=12 'phases=[{steps: 8, sequence_length: 32}, {}]' data.sequence_length=64
        'schedule.parts=[{kind: linear, steps: 4, start: 0, end: 1}, {kind: constant, steps: 8}]'
        training.eval_interval=6 training.eval_samples=16 checkpoint.save_interval=0 run.log_interval=4)
fi
if [[ -z $directory ]]; then
    directory=laptop
    if $smoke; then directory=build/laptop; fi
fi

readonly number_of_stages=8
corpus=$directory/corpus.jsonl
tokenizer=$directory/tokenizer/tokenizer.json
data=$directory/data/corpus
run=$directory/run

install() {
    ensure_environment requirements.txt
    "$python" --version
    if [[ -n $blimp ]]; then "$python" -m scripts.laptop.check_pairs "$blimp"; fi # an error now, not after hours
}

collect() {
    if [[ -e $corpus ]]; then echo "already there: $corpus"; return; fi
    echo "$options" >"$made_with"
    if ((${#texts[@]})); then
        "$python" -m scripts.laptop.collect_text --text "${texts[@]}" --output "$corpus"
    elif $smoke; then
        "$python" -m scripts.quickstart.collect_corpus --max-megabytes 0.5 --output "$corpus"
    else
        "$python" -m scripts.laptop.collect_text --packages "$directory/packages" --output "$corpus"
    fi
}

tokenize() {
    if up_to_date "$tokenizer" "$corpus"; then return; fi
    rm -f "$tokenizer"
    "$python" scripts/train_tokenizer.py --kind hf_json --vocab-size "$vocab_size" --input "$corpus" \
        --output "$directory/tokenizer"
}

build() {
    if up_to_date "${data}_test.json" "$tokenizer"; then return; fi
    "$python" scripts/preprocess_data.py --input "$corpus" --output "$data" --overwrite --deduplicate \
        --tokenizer-kind hf_json --tokenizer-path "$tokenizer" --split train=0.98,validation=0.01,test=0.01
}

train_until() { # STEP
    if (($(trained_steps) >= $1)); then echo "already trained to step $(trained_steps)"; return; fi
    .venv/bin/deepspeed --log_level error --master_port $((20000 + RANDOM % 10000)) --num_gpus "$processes" \
        pretrain_glm.py --config configs/laptop.yaml "${settings[@]}" training.stop_after_step="$1"
}

score() { # NAME OPTION...: the report shows minimal_pairs*.json of a run
    if [[ -z $blimp ]]; then echo 'not scored: no --blimp PATH'; return; fi
    local file=$run/minimal_pairs_$1.json
    if [[ -e $file ]]; then echo "already there: $file"; return; fi
    OMP_NUM_THREADS=$(nproc) "$python" scripts/evaluate.py --checkpoint "$run" --minimal-pairs "$blimp" --batch 128 \
        --score left-to-right --json "$file" "${@:2}"
}

train_first_phase() { train_until "$first_phase"; }

score_first_phase() {
    if (($(trained_steps) > first_phase)); then echo 'the second phase has begun'; return; fi
    score phase_1 --pairs "$pairs"
}

train_second_phase() { train_until "$steps"; }

score_at_the_end() { score phase_2 "${all_pairs[@]}" --plot "$directory/blimp.png"; }

report() {
    "$python" scripts/report.py "$run" --output "$directory/report.html"
}

# With other options than those of its text, a directory would train on what is there without a word.
options="smoke: $smoke; text: ${texts[*]:-packages}" made_with=$directory/.laptop

check_options() {
    if [[ -e $corpus && -s $made_with && $(<"$made_with") != "$options" ]]; then
        echo "error: $corpus was made with ($(<"$made_with")), not ($options); choose another directory." >&2
        exit 2
    fi
}

trap report_failure EXIT
claim_directory laptop
check_options
choose_processes

stage 'environment' install
settings=(
    "tokenizer.path=$(yaml_text "$tokenizer")"
    "data.train=[{prefix: $(yaml_text "${data}_train")}]"
    "data.validation=[{prefix: $(yaml_text "${data}_validation")}]"
    "run.directory=$(yaml_text "$run")"
    "${overrides[@]}"
)
resolved=$("$python" pretrain_glm.py --config configs/laptop.yaml "${settings[@]}" --print-config)
read -r first_phase steps < <("$python" -c 'import sys, yaml
tree = yaml.safe_load(sys.stdin)
print(tree["phases"][0]["steps"], tree["training"]["steps"])' <<<"$resolved")
stage 'text' collect
stage "tokenizer: byte-level BPE with $vocab_size tokens" tokenize
stage 'datasets: train, validation and test' build
stage "training on $processes processes, the first phase: to step $first_phase of $steps" train_first_phase
stage 'minimal pairs after the first phase' score_first_phase
stage 'training, the second phase' train_second_phase
stage 'minimal pairs at the end, and a page about the run' score_at_the_end
report
printf '\nThe run: %s. Next: docs/laptop.md.\n' "$run"
