# Sourced by quickstart.sh and laptop.sh, from the root of the repository: a long command as stages that can be repeated.
#
# The script sets number_of_stages, directory, and run (the run's directory).

number=0 title=

stage() { # TITLE FUNCTION
    number=$((number + 1)) title=$1
    local start=$SECONDS
    printf '\n== %d/%d %s\n' "$number" "$number_of_stages" "$title"
    "$2"
    printf '== %d/%d done in %d s\n' "$number" "$number_of_stages" $((SECONDS - start))
}

report_failure() {
    local status=$?
    if ((status != 0 && number > 0)); then # before the first stage a mistake is in the arguments
        printf '\nstage %d (%s) failed or was interrupted. See the message above; then run the same command\n' \
            "$number" "$title" >&2
        printf 'again: finished stages are skipped and training resumes from its last checkpoint.\n' >&2
    fi
}

up_to_date() { # RESULT SOURCE: the result exists and is not older
    [[ -e $1 && ! $1 -ot $2 ]] && echo "already there: $1"
}

trained_steps() { # the step of the newest checkpoint
    local newest
    newest=$(find "$run/checkpoints" -maxdepth 1 -name 'step_*[0-9]' 2>/dev/null | sort | tail -n 1)
    [[ -n $newest ]] && echo $((10#${newest##*step_})) || echo 0
}

claim_directory() { # NAME: make the directory, or refuse one that has other files
    if [[ -d $directory && -n $(ls -A "$directory") && ! -e $directory/.$1 ]]; then
        echo "error: $directory is not empty and not from an earlier $1; choose another directory." >&2
        exit 2
    fi
    if ! mkdir -p "$directory" 2>/dev/null || ! touch "$directory/.$1" 2>/dev/null; then
        echo "error: $directory is not a directory that can be written; choose another directory." >&2
        exit 2
    fi
}

yaml_text() { # TEXT: in the quotes of YAML, which doubles one that the text has
    local quote="'"
    printf "'%s'" "${1//$quote/$quote$quote}"
}

choose_processes() { # processes and OMP_NUM_THREADS: up to two GPUs, else two processes on all cores
    processes=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
    if ((processes > 2)); then processes=2; fi
    if ((processes == 0)); then
        processes=2
        export DS_ACCELERATOR=cpu # the launcher would warn on every start that it found no GPU
    fi
    local threads=$(($(nproc) / processes))
    export OMP_NUM_THREADS=$((threads > 0 ? threads : 1))
}
