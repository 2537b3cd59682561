#!/usr/bin/env bash
# Sets up what a verb needs, once, and then becomes the verb's own command.
set -euo pipefail
shopt -s extglob

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${DDPSTATS_VENV:-$root/.venv}
if [[ $venv != /* ]]; then venv=$PWD/$venv; fi # `test` leaves this folder

usage() {
  cat <<'TEXT'
usage: scripts/launch.sh demo [ARGS]             wrong averages, then right ones (python -m ddpstats demo)
       scripts/launch.sh test [PYTEST ARGS]      the tests that need torch alone and are quick; or PATH...: those tests
       scripts/launch.sh test --all [...]        also the slow ones, and those of other libraries, launchers and tools
       scripts/launch.sh test --nightly [...]    also whole corpora, two hosts, all faults, long runs: hours
       scripts/launch.sh compat NAME==VERSION... a part of the tests with these versions (compat --help)
       scripts/launch.sh bench [ARGS]            scripts/bench.py
       scripts/launch.sh N SCRIPT [ARGS]         a script on N ranks, by torchrun; exits as the first rank that failed
       scripts/launch.sh dev COMMAND [ARGS]      a command among the development tools; without them: dev ddpstats ...

python3 (that of an active environment) is used where it has torch 2.6 or newer: its torch is never changed, and only
`test`, `bench` and `dev` add to it what they lack. Otherwise .venv is made, with the versions of constraints.txt.

  DDPSTATS_VENV=PATH  the virtual environment to make and use, also when the active one has torch
  PYTHON=PROGRAM      the Python to start from, in place of python3
  PIP_*               pip's own settings. PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu has a small torch
  NNODES, NODE_RANK, RDZV_BACKEND, RDZV_ENDPOINT=HOST:PORT, RDZV_ID  torchrun's PET_NNODES and so on, on several hosts
TEXT
}

say() { printf 'launch.sh: %s\n' "$*" >&2; }
fail() { # WHAT FIX
  say "error: $1"
  say "fix: $2"
  exit 2
}

find_python() { # sets $python, and $torch to the version of its torch: empty where there is none from 2.6 on
  local facts
  facts=$("${PYTHON:-python3}" "$root/scripts/set_up.py" torch) ||
    fail "Python 3.10 or newer is needed, and ${PYTHON:-python3} is none" \
      "install one (apt-get install python3.11 python3.11-venv, or brew install python), or name one: PYTHON=/path/to/python3.11"
  { read -r python && { read -r torch || true; }; } <<<"$facts"
}

install() { # PIP ARGUMENTS
  local quiet=1
  if [[ -t 2 && $python == "$venv"/* ]]; then quiet=0; fi # a download of gigabytes shows how far it is
  PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_QUIET=$quiet "$python" -m pip install "$@" >&2 ||
    fail "pip could not install into the environment of $python (its own words are above)" \
      "behind a proxy or mirror, set PIP_PROXY or PIP_INDEX_URL; if this Python has no build of torch, name another: PYTHON=python3.11"
}

install_level() { # LEVEL (scripts/set_up.py) PIP ARGUMENTS
  "$python" "$root/scripts/set_up.py" requirements "$1" | install "${@:2}" --requirement /dev/stdin
  if (($1 == 2)); then # setup.cfg says why these are without what they ask for
    install "${@:2}" --no-deps espnet funasr 'mindstudio-probe; sys_platform == "linux" and platform_machine == "x86_64"'
  fi
}

# What an environment is made from. It is written at the end of a set-up, so that one that was interrupted is done again.
sources() { "$venv/bin/python" -VV && cksum "$root"/{constraints.txt,setup.cfg,scripts/launch.sh,scripts/set_up.py}; }
is_set_up() { [[ -e $venv/set-up-$1 && $(<"$venv/set-up-$1") == "$(sources)" ]]; } # LEVEL

make_venv() {
  find_python
  if [[ -e $venv/pyvenv.cfg ]]; then set -- --clear; fi # one that was left half made; no other folder is cleared
  "$python" -m venv "$@" "$venv" >&2 || fail "$python cannot make a virtual environment in $venv" \
    "install its venv module (on Debian and Ubuntu: apt-get install python3-venv), or name another folder: DDPSTATS_VENV=PATH"
}

set_up() { # LEVEL; sets $python to one that has ddpstats, torch and what the level adds
  if [[ -z ${DDPSTATS_VENV:-} && ! ${VIRTUAL_ENV:-} -ef $venv ]]; then
    find_python
    if [[ -n $torch ]]; then
      export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" # so that nothing of ours stays behind in it
      if (($1 > 0)); then install_level "$1" "torch==$torch"; fi
      return
    fi
  fi
  if ! is_set_up "$1"; then
    mkdir -p "$(dirname "$venv")"
    ( # a second launch waits here, and then finds what the first one has made
      if command -v flock >/dev/null; then flock 9; fi
      if is_set_up "$1"; then exit; fi
      if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then make_venv; fi
      python=$venv/bin/python
      say "installing torch and what else is needed into $venv (once; minutes, longer on a slow network)"
      (install --constraint "$root/constraints.txt" --upgrade pip) || say "going on with an older pip, which takes longer"
      install_level "$1" --constraint "$root/constraints.txt" --no-compile ${PYTHONDONTWRITEBYTECODE:+--compile} setuptools
      install --no-deps --no-build-isolation --editable "$root"
      for ((level = 0; level <= $1; level++)); do sources >"$venv/set-up-$level"; done
      say "set up after $SECONDS s. For the command ddpstats: source $venv/bin/activate, or scripts/launch.sh dev ddpstats ..."
    ) 9>"$venv.lock"
  fi
  python=$venv/bin/python
  export VIRTUAL_ENV=$venv
}

if [[ ${1:-} == demo ]]; then set -- dev ddpstats "$@"; fi
verb=${1:-}
shift $(($# > 0))
case $verb in
  -h | --help | help) usage ;;
  test)
    unset PYTHONDONTWRITEBYTECODE # hundreds of processes import the package
    level=2 options=(--numprocesses 6 --dist worksteal) # also on two cores: many tests do nothing but wait for a timeout
    case ${1:-} in
      --all) shift ;;
      --nightly)
        shift
        options+=(-o "testpaths=tests benchmarks" -o faulthandler_timeout=0 --hypothesis-profile nightly)
        ;;
      *)
        level=1
        options+=(-m "not slow and not library")
        if [[ -n ${1:-} && -e $root/${1%%::*} ]]; then options=(--numprocesses 0); fi # what is named is run, in sight
        ;;
    esac
    set_up "$level"
    cd "$root"
    exec "$python" -m pytest "${options[@]}" "$@"
    ;;
  bench)
    set_up 2
    exec "$python" "$root/scripts/bench.py" "$@"
    ;;
  compat)
    find_python
    exec "$python" "$root/scripts/compat.py" "$@"
    ;;
  dev)
    (($# > 0)) || fail "there is no command to run" "scripts/launch.sh dev COMMAND [ARGS], for example: dev ruff check"
    if [[ $1 == ddpstats ]]; then
      set_up 0
      exec "$python" -m "$@"
    fi
    set_up 2
    PATH=$(dirname "$python"):$PATH
    exec "$@"
    ;;
  [1-9]*([0-9]))
    (($# > 0)) || fail "there is no script to run on $verb ranks" "scripts/launch.sh $verb SCRIPT [ARGS]"
    set_up 0
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # or every rank starts a thread for every core
    exec "$python" "$root/scripts/start_ranks.py" --nproc-per-node "$verb" "$@"
    ;;
  "") usage >&2 && exit 2 ;;
  *) fail "'$verb' is neither a verb nor a number of ranks" "use one of demo, test, compat, bench, dev, or a number of ranks (--help)" ;;
esac
