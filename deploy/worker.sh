#!/bin/sh
# How a container of compose.yaml starts its worker; settings come from the environment. It begins as
# root to make its link slow, if LINK says so, and goes on without any rights.
set -eu

if [ "$(id -u)" = 0 ]; then
    if [ -n "${LINK:-}" ]; then
        python /usr/local/lib/murmur-shape.py "$LINK"
    fi
    exec setpriv --reuid=murmur --regid=murmur --clear-groups --inh-caps=-all --no-new-privs "$0" "$@"
fi

# The place in a Swarm service, which another container takes over together with the folder.
case "${SLOT:-}" in
    "" | *[!0-9]*) name=$HOSTNAME ;;
    *) name=worker-$SLOT ;;
esac

asked=0
trap 'asked=$((asked + 1)); kill -TERM "$worker" 2> /dev/null || true' TERM INT
# Of the swarm's network: in a Swarm there is another, by which the others do not reach it.
address=$(getent ahostsv4 "$HOSTNAME" | awk 'NR == 1 { print $1 }')
murmur up --name "$name" --insecure --listen 0.0.0.0:7700 --metrics 0.0.0.0:9464 \
    --advertise "$address:7700" --coordinator coordinator:7600 --min-peers "$MIN_PEERS" --wait-s 600 --out "/out/$name" \
    ${PRESET:+--preset "$PRESET"} ${STEPS:+--steps "$STEPS"} \
    ${INNER_STEPS:+--inner-steps "$INNER_STEPS"} ${SEED:+--seed "$SEED"} \
    ${MODEL:+--model "$MODEL"} ${MURMUR_ARGS:-} &
worker=$!
before=
while [ "$before" != "$asked" ]; do # a signal ends the wait, not the worker
    before=$asked code=0
    wait "$worker" || code=$?
done
# A container that is always started again would only find that its run is over.
if [ "$code$asked" = 00 ] && [ "${RESTART:-no}" != no ]; then
    trap 'exit 0' TERM INT
    echo "the run is over; this container stays until it is stopped"
    sleep infinity &
    wait $!
fi
exit "$code"
