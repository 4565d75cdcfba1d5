# Runs in a task image; /proof has a patch, the patch of the tests, and the tests, a line each. Prints a line for a problem.
base=$1 namespace_of_node=$2 patch=$3 should_pay=$4
export GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0='*'
echo it runs
[ "$(readlink /proc/self/ns/pid)" != "$namespace_of_node" ] || echo "its processes may end the node's (docs/traps.md, trap 86)"
cd /testbed 2> /dev/null || cd /workspace/repo 2> /dev/null || cd /app || { echo "it has no repository"; exit; }
[ "$(git rev-list --count --all --reflog --not HEAD)" = 0 ] ||
    echo "git log --all --reflog --not HEAD has commits, perhaps the fix (docs/traps.md, trap 87)"
git merge-base --is-ancestor "$base" HEAD || echo "its HEAD does not come from the row's base_commit (docs/traps.md, trap 87)"
. /opt/miniconda3/bin/activate testbed 2> /dev/null || . .venv/bin/activate 2> /dev/null
[ ! -s /proof/patch ] || git apply /proof/patch
[ ! -s /proof/tests.patch ] || git apply /proof/tests.patch
mapfile -t tests < /proof/tests
[ ${#tests[@]} != 0 ] || exit
python -m pytest -q "${tests[@]}" < /dev/null >&2 && pays=1 || pays=0
[ $pays = "$should_pay" ] || echo "the $patch patch pays $pays (docs/traps.md, trap 87)"
