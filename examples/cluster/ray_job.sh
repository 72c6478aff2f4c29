#!/usr/bin/env bash
# Submits the run to a Ray cluster that is up already:
#
#   RAY_API_SERVER_ADDRESS=http://HEAD:8265 SHARED=/shared/rolltree examples/cluster/ray_job.sh [--trainer.steps 400 ...]
#
# SHARED is a directory that all nodes have at the same path; it gets the TOML, the checkpoints and the rollouts.
# `ray job submit` needs the package ray[default], here and on the cluster, and the cluster's token in RAY_AUTH_TOKEN or
# in ~/.ray/auth_token. One GPU is reserved for the run's own process, which trains.
set -euo pipefail

: "${RAY_API_SERVER_ADDRESS:?give the address of the cluster\'s dashboard, as in http://HEAD:8265}"
: "${SHARED:?give a directory that all nodes share}"
export RAY_AUTH_MODE="${RAY_AUTH_MODE:-token}"

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
cp "$here/run.toml" "$SHARED/run.toml"
command="cd $(printf %q "$SHARED") && exec rolltree train run.toml"
if [ "$#" -gt 0 ]; then
    command+="$(printf ' %q' "$@")"
fi
exec ray job submit --address "$RAY_API_SERVER_ADDRESS" --entrypoint-num-gpus 1 -- bash -c "$(printf %q "$command")"
