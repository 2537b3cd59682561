#!/usr/bin/env bash
# Sets up what a verb needs, once, and then becomes the verb's own command. `scripts/launch.sh --help` documents it.
set -euo pipefail
shopt -s extglob

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${DDPSTATS_VENV:-$root/.venv}
if [[ $venv != /* ]]; then venv=$PWD/$venv; fi # `test` leaves this folder
if [[ ${PYTHON:-} == [!/]*/* ]]; then PYTHON=$PWD/$PYTHON; fi
libraries=(accelerate bench espnet lightning live mlflow msprobe ray tensorboard torcheval torchmetrics transformers wandb)
export PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1

usage() {
  cat <<'TEXT'
usage: scripts/launch.sh demo [ARGS]          wrong averages, then right ones (python -m ddpstats demo)
       scripts/launch.sh test [PYTEST ARGS]   the tests that need torch alone and are quick, or those that paths name
       scripts/launch.sh test --all [...]     also the slow ones, and those of other libraries, launchers and tools
       scripts/launch.sh test --nightly [...] also whole corpora, two hosts, all faults, long runs: hours
       scripts/launch.sh compat [NAME==VERSION ...]
                                              a part of the tests with these versions of torch, Python or a library, in an
                                              environment of its own; a row of docs/compatibility.md (compat --help)
       scripts/launch.sh bench [ARGS]         scripts/bench.py
       scripts/launch.sh N SCRIPT [ARGS]      a script on N ranks of this host, through torchrun
       scripts/launch.sh dev COMMAND [ARGS]   a command among the development tools (ruff, mypy, lint-imports, ...),
                                              or ddpstats itself, without them: dev ddpstats compare A B

Each first sets up what it needs. The active environment ($VIRTUAL_ENV, $CONDA_PREFIX, else python3) is used when it has
torch 2.6 or newer; its torch is never changed, and only `test`, `bench` and `dev` add what they lack to it. Otherwise a
virtual environment .venv is made in the repository, with the versions of constraints.txt. `test` installs pytest and
hypothesis beside torch; `test --all`, `bench` and `dev` install every library that the tests know.

  DDPSTATS_VENV=PATH  the virtual environment to make and use, also when the active one has torch
  PYTHON=PROGRAM      the Python to start from
  PIP_*               pip's own settings. Without an NVIDIA GPU, gigabytes are spared by
                      PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu

N ranks on each of several hosts: run it on every host with torchrun's settings in the environment: NNODES, and either
RDZV_ENDPOINT=HOST:PORT (with RDZV_ID and RDZV_BACKEND, default c10d), or MASTER_ADDR, NODE_RANK and MASTER_PORT
(default 29500). The exit status is that of the first rank that failed (128 + the number of a signal), or 0.
TEXT
}

say() { printf 'launch.sh: %s\n' "$*" >&2; }

phase() { say "$(printf '%4d s  %s' "$SECONDS" "$*")"; } # of a set-up, with the time since the start

fail() { # WHAT FIX
  say "error: $1"
  say "fix: $2"
  exit 2
}

at_least() { # VERSION MAJOR MINOR
  local major=${1%%.*} rest=${1#*.}
  local minor=${rest%%[!0-9]*}
  ((major > $2 || (major == $2 && minor >= $3)))
}

# Prints Python's version and torch's ("-" where it has none), or fails where nothing runs under that name. The code is
# written for any Python, for the old ones have to be named as such.
probe() {
  "$1" -c '
import sys
try:
    from importlib.metadata import version
    torch = version("torch")
except Exception:
    torch = "-"
print("%d.%d %s" % (sys.version_info[0], sys.version_info[1], torch))' 2>/dev/null
}

# Sets $python and $torch. Plain python3 goes before newer ones: it is the one for which a torch is likely at hand.
find_python() {
  local candidate facts version too_old=
  if [[ -n ${PYTHON:-} ]]; then
    set -- "$PYTHON"
  else
    set -- python3 python python3.14 python3.13 python3.12 python3.11 python3.10
    if [[ -n ${CONDA_PREFIX:-} ]]; then set -- "$CONDA_PREFIX/bin/python" "$@"; fi
    if [[ -n ${VIRTUAL_ENV:-} ]]; then set -- "$VIRTUAL_ENV/bin/python" "$@"; fi
  fi
  for candidate; do
    facts=$(probe "$candidate") || continue # no such file, or a pyenv shim with no Python behind it
    read -r version torch <<<"$facts"
    if at_least "$version" 3 10; then
      python=$candidate
      return
    fi
    too_old+=" $candidate is $version;"
  done
  if [[ -n $too_old ]]; then
    fail "Python 3.10 or newer is needed, but$too_old nothing newer was found" \
      "install one (apt-get install python3.11 python3.11-venv, or brew install python), or name one: PYTHON=/path/to/python3.11"
  fi
  fail "no Python runs under the name ${PYTHON:-python3, nor under any other that is usual}" \
    "install Python 3.10 or newer, or name one that is installed: PYTHON=/path/to/python3.11"
}

# The requirements of the package and of the given extras, one a line, as setup.cfg lists them.
requirements() {
  "$python" -c '
import configparser, sys
config = configparser.RawConfigParser()
config.read(sys.argv[1])
extras = config["options.extras_require"]
for text in [config["options"]["install_requires"], *(extras[name] for name in sys.argv[2:])]:
    print(text.strip())' "$root/setup.cfg" "$@"
}

# What pip says is told in a few lines (scripts/_pip_progress.py), and whole if it fails.
install() { # PIP ARGUMENTS
  { PYTHONUNBUFFERED=1 "$python" -m pip install --progress-bar off "$@" 2>&1 || { echo "pip ended with $?" && false; }; } |
    "$python" "$root/scripts/_pip_progress.py" "$SECONDS" "${heading:-}" >&2 ||
    fail "pip could not install into $("$python" -c 'import sys; print(sys.prefix)') (its own words are above)" \
      "behind a proxy or mirror, set PIP_PROXY or PIP_INDEX_URL; if this Python has no build of torch, start from another: PYTHON=python3.11"
}

# Installs what the extras list. $pin: what keeps pip to the versions that it must not leave.
install_extras() { # EXTRAS...
  local wanted
  wanted=$(requirements "$@")
  install "${pin[@]}" --requirement /dev/stdin <<<"$wanted"
  # setup.cfg says why these are without what they ask for
  if [[ " $* " == *" espnet "* ]]; then install "${pin[@]}" --no-deps espnet funasr; fi
  if [[ " $* " == *" msprobe "* ]]; then
    install "${pin[@]}" --no-deps 'mindstudio-probe; sys_platform == "linux" and platform_machine == "x86_64"'
  fi
}

set_up_active() { # EXTRAS...
  export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" # so that nothing of ours stays behind in it
  if (($# == 0)); then return; fi
  heading="adding what $python lacks for: $* (its torch $torch stays)"
  pin=("torch==$torch")
  install_extras "$@"
}

make_venv() {
  if "$venv/bin/python" -m pip --version >/dev/null 2>&1; then return; fi
  find_python
  "$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$python cannot make virtual environments" \
      "install its venv module (on Debian and Ubuntu: apt-get install python3-venv), or name another Python: PYTHON=/path/to/python3.11"
  if [[ -e $venv && ! -e $venv/pyvenv.cfg && -n $(ls -A "$venv") ]]; then
    fail "$venv is no virtual environment, and not empty" "name another place: DDPSTATS_VENV=/path/to/a/new/folder"
  fi
  phase "making a virtual environment in $venv with $python"
  "$python" -m venv --clear "$venv" >&2 ||
    fail "could not make a virtual environment in $venv" "name a place that can be written to: DDPSTATS_VENV=/path/to/a/new/folder"
}

# What a finished set-up was made from: it is done again when any of this changes.
fingerprint() {
  { "$venv/bin/python" -VV && echo "$root" && cat "$root"/{constraints.txt,setup.cfg,scripts/launch.sh}; } 2>/dev/null | cksum
}

# The stamp: the fingerprint, then the extras, one a line.
is_set_up() { # EXTRAS...
  local stamp=$venv/ddpstats-set-up extra
  [[ -e $stamp && $(head -n 1 "$stamp") == "$(fingerprint)" ]] || return
  for extra; do grep -qx "$extra" "$stamp" || return; done
}

# Written last and whole, so a set-up that was interrupted is done again.
write_stamp() { # EXTRAS...
  local stamp=$venv/ddpstats-set-up
  {
    fingerprint
    if is_set_up; then tail -n +2 "$stamp"; fi
    printf '%s\n' "$@"
  } >"$stamp.new"
  mv "$stamp.new" "$stamp"
}

set_up_own() { # EXTRAS...
  local has wants
  if [[ -n ${PYTHON:-} ]] && has=$(probe "$venv/bin/python") && wants=$(probe "$PYTHON") && [[ ${has% *} != "${wants% *}" ]]; then
    fail "$venv holds Python ${has% *}, and PYTHON=$PYTHON is ${wants% *}" \
      "name another place with DDPSTATS_VENV=PATH, or remove $venv"
  fi
  if ! is_set_up "$@"; then
    { mkdir -p "$(dirname "$venv")" && touch "$venv.lock"; } ||
      fail "cannot write beside $venv" "name a place that can be written to: DDPSTATS_VENV=PATH"
    ( # a second launch waits here, and then finds the stamp
      if command -v flock >/dev/null; then flock 9; fi
      if is_set_up "$@"; then exit; fi
      make_venv
      python=$venv/bin/python
      phase "installing torch${*:+ and what is needed for: $*} into $venv (once; minutes, longer on a slow network)"
      pin=(--constraint "$root/constraints.txt" setuptools)
      install_extras "$@"
      install --no-deps --no-build-isolation --editable "$root"
      write_stamp "$@"
      phase "set up. For the command ddpstats: source ${venv#"$PWD"/}/bin/activate, or scripts/launch.sh dev ddpstats ..."
    ) 9>"$venv.lock"
  fi
  python=$venv/bin/python
  export VIRTUAL_ENV=$venv
}

# Sets $python to one that has ddpstats, torch and the requirements of the given extras.
set_up() { # EXTRAS...
  if [[ -z ${DDPSTATS_VENV:-} && ! (-z ${PYTHON:-} && ${VIRTUAL_ENV:-} -ef $venv) ]]; then
    find_python
    if [[ $torch != - ]]; then
      if at_least "$torch" 2 6; then
        set_up_active "$@"
        return
      fi
      say "the torch $torch of $python is older than 2.6: using $venv instead"
    fi
  fi
  set_up_own "$@"
}

# Whether one of the arguments is a path of tests; the word after an option such as -k is not.
names_tests() { # PYTEST ARGUMENTS...
  local argument before=
  for argument; do
    if [[ $before != -[a-z] && $argument != -* && -e $root/${argument%%::*} ]]; then return 0; fi
    before=$argument
    if [[ $before == -@(x|q|v|s|l) ]]; then before=; fi # these take no word
  done
  return 1
}

# torchrun, but with the failing rank's exit status instead of 1, and without torchrun's own traceback.
ranks='
import sys
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main
try:
    main()
except ChildFailedError as error:
    print(error, file=sys.stderr)
    status = error.get_first_failure()[1].exitcode
    sys.exit(status if status > 0 else 128 - status)'

run_ranks() { # N SCRIPT ARGS...
  local n=$1 where
  shift
  (($# > 0)) || fail "there is no script to run on $n ranks" "scripts/launch.sh $n SCRIPT [ARGS]"
  if [[ ${NNODES:-1} == 1 ]]; then
    # The host's own name need not resolve; the loopback address always does. Port 0: the system picks a free one.
    where=(--rdzv-backend c10d --rdzv-endpoint localhost:0 --local-addr 127.0.0.1)
  elif [[ -n ${RDZV_ENDPOINT:-} ]]; then
    where=(--rdzv-backend "${RDZV_BACKEND:-c10d}" --rdzv-endpoint "$RDZV_ENDPOINT" --rdzv-id "${RDZV_ID:-ddpstats}")
    if [[ -n ${NODE_RANK:-} ]]; then where+=(--node-rank "$NODE_RANK"); fi
  elif [[ -n ${MASTER_ADDR:-} && -n ${NODE_RANK:-} ]]; then
    where=(--master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}" --node-rank "$NODE_RANK")
  else
    fail "NNODES=$NNODES, but nothing says where the hosts meet" \
      "set RDZV_ENDPOINT=HOST:PORT, or MASTER_ADDR and NODE_RANK, on every host (scripts/launch.sh --help)"
  fi
  set_up
  export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # else every rank starts a thread for every core
  exec "$python" -c "$ranks" --nnodes "${NNODES:-1}" --nproc-per-node "$n" "${where[@]}" "$@"
}

if (($# == 0)); then
  usage >&2
  exit 2
fi
verb=$1
shift
case $verb in
  -h | --help | help)
    usage
    ;;
  demo)
    set_up
    exec "$python" -m ddpstats demo "$@"
    ;;
  test)
    unset PYTHONDONTWRITEBYTECODE # hundreds of processes import the package
    # Four workers, also on two cores: some tests do nothing but wait for a timeout.
    options=(--numprocesses 4 --dist worksteal)
    case ${1:-} in
      --all)
        shift
        set_up testing "${libraries[@]}"
        ;;
      --nightly)
        shift
        set_up testing "${libraries[@]}"
        options+=(-o faulthandler_timeout=0) # each has a time limit of its own, of minutes or hours
        names_tests "$@" || options+=(tests benchmarks)
        ;;
      *)
        set_up testing
        if names_tests "$@"; then options=(); else options+=(-m "not slow and not library"); fi
        ;;
    esac
    cd "$root"
    exec "$python" -m pytest "${options[@]+"${options[@]}"}" "$@"
    ;;
  bench)
    set_up testing "${libraries[@]}" # what is measured is what is tested
    exec "$python" "$root/scripts/bench.py" "$@"
    ;;
  compat)
    find_python
    exec "$python" "$root/scripts/compat.py" "$@"
    ;;
  dev)
    (($# > 0)) || fail "there is no command to run" "scripts/launch.sh dev COMMAND [ARGS], for example: dev ruff check"
    if [[ $1 == ddpstats ]]; then
      set_up
      shift
      exec "$python" -m ddpstats "$@"
    fi
    set_up testing "${libraries[@]}" dev docs
    PATH=$("$python" -c 'import sysconfig; print(sysconfig.get_path("scripts"))'):$PATH
    exec "$@"
    ;;
  [1-9]*([0-9]))
    run_ranks "$verb" "$@"
    ;;
  *)
    fail "'$verb' is neither a verb nor a number of ranks" "use one of demo, test, compat, bench, dev, or a number of ranks (scripts/launch.sh --help)"
    ;;
esac
