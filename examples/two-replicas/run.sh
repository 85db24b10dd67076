#!/usr/bin/env bash
# Two simulated replicas, the router, and two turns of a conversation. The second turn is predicted to be cached.
# With KEEP=1 everything stays up until Ctrl-C. Ports may be others: ROUTER_PORT, ADMIN_PORT, REPLICA_PORT (and the next).
set -euo pipefail
cd "$(dirname "$0")/../.."

python=${PYTHON:-.venv/bin/python}
router_port=${ROUTER_PORT:-8000}
admin_port=${ADMIN_PORT:-8001}
replica_port=${REPLICA_PORT:-9100}
url=http://127.0.0.1:$router_port

pids=()
stop() {
    kill "${pids[@]}" 2>/dev/null || true
    wait
}
trap stop EXIT

"$python" -m loadtest engine --replicas 1 --port "$replica_port" &
pids+=($!)
"$python" -m loadtest engine --replicas 1 --port $((replica_port + 1)) &
pids+=($!)
# until_ok URL: wait until it answers well, half a minute at most.
until_ok() {
    for _ in $(seq 150); do
        curl --silent --fail --output /dev/null "$1" && return
        sleep 0.2
    done
    echo "$1 does not answer" >&2
    exit 1
}

# Both replicas first: with one alone there would be nothing to choose.
until_ok "http://127.0.0.1:$replica_port/health"
until_ok "http://127.0.0.1:$((replica_port + 1))/health"
"$python" -m router serve --port "$router_port" --admin-port "$admin_port" --set listen.lame_duck_s=0 \
    --replica "http://127.0.0.1:$replica_port" --replica "http://127.0.0.1:$((replica_port + 1))" 2>/dev/null &
pids+=($!)

until_ok "$url/readyz"

# ask BODY: print the headers that say where the request went and why.
ask() {
    curl --silent --show-error --fail --dump-header - --output /dev/null \
        "$url/v1/chat/completions" --header 'content-type: application/json' --data "$1" |
        grep -i '^x-warmroute-\(replica\|reason\|predicted\|miss\)' || true
}

# A system prompt of some 3,000 tokens, as agents have.
system=$(printf 'You are a careful assistant. Rule %d: answer from the manual, and say so when it does not know. ' $(seq 150))
first='{"role": "user", "content": "How do I change the filter?"}'
answer='{"role": "assistant", "content": "Open the lid, and turn the filter to the left."}'
second='{"role": "user", "content": "And how often?"}'

echo '== first turn'
ask "{\"model\": \"sim\", \"max_tokens\": 8, \"messages\": [{\"role\": \"system\", \"content\": \"$system\"}, $first]}"
echo '== second turn'
ask "{\"model\": \"sim\", \"max_tokens\": 8, \"messages\": [{\"role\": \"system\", \"content\": \"$system\"}, $first, $answer, $second]}"

if [ "${KEEP:-}" = 1 ]; then
    echo "== the router is at $url, its dashboard at http://127.0.0.1:$admin_port/dashboard; Ctrl-C ends it"
    wait
fi
