#!/usr/bin/env bash
set -euo pipefail

usage() {
    cat <<'END'
Usage: scripts/quickstart.sh [--smoke] [DIRECTORY]

From a bare checkout to a small trained GLM, in 6 to 9 minutes on two recent CPU cores, 12 on slow ones without AVX-512:
installs the requirements into .venv, collects English text from the documentation of the
installed packages, trains a tokenizer, builds the corpora, trains the model of
configs/tiny.yaml with the deepspeed launcher (stopping halfway and resuming), draws the
losses, scores how it fills words left out of the validation text beside n-gram models, shows
its answers, trains two tasks whose best possible score is known, exports the model to Hugging
Face, loads the export, and writes a page about the run.

Everything but .venv is written below DIRECTORY (default: quickstart). Run it again to
continue after an interruption: finished stages are skipped.

  --smoke   a few training steps on little text: checks that everything works, not that
            the model learns (default DIRECTORY: build/quickstart)

Needs Python 3.11 to 3.13 with venv and pip (PYTHON=... names another one than python3),
a C compiler, 4 GB of memory and 8 GB of disk.
END
}

smoke=false directory=
for argument in "$@"; do
    case $argument in
        -h | --help) usage; exit 0 ;;
        --smoke) smoke=true ;;
        -*) echo "error: unknown option $argument; see scripts/quickstart.sh --help." >&2; exit 2 ;;
        *)
            if [[ -n $directory ]]; then
                echo "error: more than one directory given; see scripts/quickstart.sh --help." >&2
                exit 2
            fi
            directory=$(realpath -m -- "$argument")
            ;;
    esac
done

cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_environment.sh
source scripts/stages.sh

megabytes=4 vocab_size=2048 margin=(--margin 0.3) scored_samples=400 small=() overrides=()
if $smoke; then
    megabytes=0.5 vocab_size=512 margin=() scored_samples=40 small=(--smoke)
    overrides=(training.steps=16 training.eval_interval=8 training.eval_samples=16 schedule.warmup_steps=4
        checkpoint.save_interval=0 run.log_interval=4)
fi
if [[ -z $directory ]]; then
    directory=quickstart
    if $smoke; then directory=build/quickstart; fi
fi

corpus=$directory/corpus.jsonl
tokenizer=$directory/tokenizer/tokenizer.json
data=$directory/data/corpus
run=$directory/run
exported=$directory/huggingface
sentence='If this is [MASK], the function returns the [MASK].'

readonly number_of_stages=12

# ---- stages ----

install() {
    ensure_environment requirements.txt
    "$python" --version
}

collect() {
    if [[ -e $corpus ]]; then echo "already there: $corpus"; return; fi
    "$python" -m scripts.quickstart.collect_corpus --max-megabytes "$megabytes" --output "$corpus"
}

tokenize() {
    if up_to_date "$tokenizer" "$corpus"; then return; fi
    rm -f "$tokenizer"
    "$python" scripts/train_tokenizer.py --kind hf_json --vocab-size "$vocab_size" --input "$corpus" \
        --output "$directory/tokenizer"
}

build() {
    if up_to_date "${data}_test.json" "$tokenizer"; then return; fi
    "$python" scripts/preprocess_data.py --input "$corpus" --output "$data" --overwrite \
        --tokenizer-kind hf_json --tokenizer-path "$tokenizer" --split train=0.9,validation=0.05,test=0.05
}

pretrain() { # OVERRIDE...
    .venv/bin/deepspeed --log_level error --master_port $((20000 + RANDOM % 10000)) --num_gpus "$processes" \
        pretrain_glm.py --config configs/tiny.yaml "${settings[@]}" "$@"
}

train_first_half() {
    if [[ -e $run/config.yaml && $run/config.yaml -ot ${data}_test.json ]]; then
        rm -rf "$run" # trained on a corpus that has been rebuilt since
    fi
    if (($(trained_steps) >= steps / 2)); then echo "already trained to step $(trained_steps)"; return; fi
    pretrain training.stop_after_step=$((steps / 2))
}

train_to_the_end() {
    if (($(trained_steps) >= steps)); then echo "already trained to step $(trained_steps)"; return; fi
    pretrain
}

compare() {
    "$python" -m scripts.quickstart.unigram_baseline "$run" "${margin[@]}"
    "$python" -m scripts.quickstart.scores "$run" --samples "$scored_samples" | tee "$run/scores.txt"
}

draw() {
    "$python" scripts/report.py "$run" --plot
}

fill() {
    "$python" -m scripts.quickstart.fill_examples "$run" --count 6 | tee "$run/examples.txt"
}

learn_tasks() {
    if up_to_date "$directory/tasks/tasks.txt" "$run/scores.json"; then cat "$directory/tasks/tasks.txt"; return; fi
    "$python" -m scripts.quickstart.tasks "$run" "$directory/tasks" "${small[@]}"
}

export_it() {
    rm -rf "$exported"
    "$python" scripts/convert_checkpoint.py export --checkpoint "$run" --output "$exported"
    "$python" -m scripts.quickstart.fill_export --export "$exported" --checkpoint "$run" --text "$sentence"
}

report() {
    "$python" scripts/report.py "$run" --output "$directory/report.html"
}

tell() {
    printf '\n%s\n' '================================================================================'
    printf 'Everything worked, in %d minutes %d seconds.\n' $((SECONDS / 60)) $((SECONDS % 60))
    printf '\n1. English: '
    sed '2,$s/^/   /' "$run/scores.txt"
    printf '\n   The first of these texts, the word and the answers; = marks the word among them:\n'
    sed 's/^/   /' "$run/examples.txt"
    printf '\n2. Tasks whose best possible score is known:\n'
    sed 's/^/   /' "$directory/tasks/tasks.txt"
    cat <<END

3. Next (source .venv/bin/activate):
   a page to try it in   python scripts/try.py '$run'
   the run as a page     $directory/report.html
   your own text         README.md, "Your own corpus"
   with transformers     pipeline("blank-infilling", model="$exported", trust_remote_code=True)
   every logged number   $run/metrics.jsonl, or tensorboard --logdir '$run/tensorboard'
END
}

# ---- the whole ----

trap report_failure EXIT
claim_directory quickstart
choose_processes

stage 'environment' install
settings=(
    "tokenizer.path=$(yaml_text "$tokenizer")"
    "data.train=[{prefix: $(yaml_text "${data}_train")}]"
    "data.validation=[{prefix: $(yaml_text "${data}_validation")}]"
    "run.directory=$(yaml_text "$run")"
    training.eval_fillings=3 # for the page
    "${overrides[@]}"
)
steps=$("$python" pretrain_glm.py --config configs/tiny.yaml "${settings[@]}" --print-config | sed -n 's/^  steps: //p')
stage 'corpus: English text from the documentation of installed packages' collect
stage "tokenizer: byte-level BPE with $vocab_size tokens" tokenize
stage 'datasets: train, validation and test' build
stage "training on $processes processes, stopped at step $((steps / 2)) of $steps" train_first_half
stage 'training, the same command again: resumed to the end' train_to_the_end
stage 'scores beside simpler models' compare
stage 'loss plot' draw
stage 'words left out of the validation text, the first of a random order' fill
stage 'two tasks whose best possible score is known' learn_tasks
stage 'export to Hugging Face, loaded with transformers' export_it
stage 'a page about the run' report
tell
