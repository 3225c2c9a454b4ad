#!/bin/sh
# Removes every third page of each namespace: kvstore_evict.sh ADDRESS
set -eu
store() { "${KVSTORE_NODE_PYTHON:-python3}" -m kvstore -a "$address" "$@"; }
address=$1
store ls --json | grep -o '"digest": *"[0-9a-f]*"' | grep -o '[0-9a-f]\{16,\}' |
    while read -r namespace; do
        pages=$(store ls -n "$namespace" --limit 0 --json |
            grep -o '"prefix_hash": *"[0-9a-f]*"' | grep -o '[0-9a-f]\{16,\}' | awk 'NR % 3 == 0')
        # shellcheck disable=SC2086 # a word for each page
        [ -z "$pages" ] || store rm -n "$namespace" -y $pages > /dev/null
    done
