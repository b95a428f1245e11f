#!/usr/bin/env bash
# Build the image of deploy/Dockerfile without a container engine, on a Debian base that this script makes, and let the
# image answer the three questions of `tandem demo`. Needs root, buildah and debootstrap, and 10 GB under $1.
#
#   tools/build_image.sh [FOLDER]     a second run takes the base from FOLDER (default: /var/tmp/tandem-image)
set -euo pipefail
cd "$(dirname "$0")/.."
folder="${1:-/var/tmp/tandem-image}"
mkdir -p "$folder"

# vfs and chroot need no mounts and no namespaces of their own, so the script also works inside a container.
export STORAGE_DRIVER=vfs BUILDAH_ISOLATION=chroot
store=(buildah --root "$folder/store" --runroot "$folder/run")
base=localhost/tandem-base

if ! "${store[@]}" images --quiet "$base" >/dev/null 2>&1; then
    rm -rf "$folder/base" && debootstrap --variant=minbase --include=ca-certificates bookworm "$folder/base"
    container=$("${store[@]}" from scratch)
    "${store[@]}" add --quiet "$container" "$folder/base" /
    "${store[@]}" commit --quiet --rm "$container" "$base"
    rm -rf "$folder/base"
fi

# The pip of the image takes what the pip of this machine takes: certificates, options, folders of wheels.
mounts=(--volume /etc/ssl/certs:/etc/ssl/certs:ro)
python3 -m pip config list |
    sed -n "s/^\(global\|:env:\.\)\.*\(cert\|find-links\)='\(.*\)'$/\2 = \3/p" | sort -u >"$folder/pip.list"
{ echo '[global]' && cat "$folder/pip.list"; } >"$folder/pip.conf"
mounts+=(--volume "$folder/pip.conf:/etc/pip.conf:ro")
while read -r wheels; do
    [ ! -d "$wheels" ] || mounts+=(--volume "$wheels:$wheels:ro")
done < <(sed -n 's/^find-links = //p' "$folder/pip.list")

"${store[@]}" bud --network host "${mounts[@]}" --build-arg "BASE=$base" --tag tandem --file deploy/Dockerfile .
"${store[@]}" rmi --prune >/dev/null # the image of the run before

container=$("${store[@]}" from tandem)
trap '"${store[@]}" rm "$container" >/dev/null' EXIT
"${store[@]}" run --network host "$container" -- tandem demo
