#!/usr/bin/env bash
# Power cuts, for real. As root, tests/fault/power_cuts.py: a FUSE disk that drops, reorders and tears what was not flushed,
# under ext4, xfs and btrfs, and below a file store, the disk tier, a disk tier that grows and shrinks, and a manager; 100
# cuts of each (KV_FAULT_CUTS), two kinds at a time for each core (KV_FAULT_JOBS), with controls that have their barriers
# taken away. Nothing acknowledged may be lost, and nothing wrong. A table of all comes last. Behind it 500 kills of a
# kv-advisor (KV_ADVISOR_KILLS; KV_FAULT_OF=advisor: these alone).
#
# Not as root, or with KV_FAULT_UML=1: a user-mode-linux guest writes to a file store on ext4, xfs and btrfs until the
# guest, with everything in its page cache, is killed; a second boot mounts the disk and checks that all
# that was acknowledged is there, byte-exact, that nothing visible is half, and that the next save works.
# The same for the block manager's disk tier, alone and under a manager. One control per file system and of each has the barriers taken
# away: it must lose something, or the whole proves nothing.
# KV_FAULT_ROUNDS=5 chooses how many; for both: KV_FAULT_FS="ext4 xfs btrfs", KV_FAULT_OF="store disk manager" and KV_TEST_SEED.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
if [ "$(id -u)" = 0 ] && [ -z "${KV_FAULT_UML:-}" ]; then
    status=0
    [ "${KV_FAULT_OF:-}" = advisor ] || python3 tests/fault/power_cuts.py || status=1
    if [[ ${KV_FAULT_OF:-advisor} == *advisor* ]]; then # a kv-advisor killed while it moves and packs
        KV_ADVISOR_KILLS=${KV_ADVISOR_KILLS:-500} /usr/bin/python3 -B tests/fault/test_advisor_kill.py
        case $? in 0 | 77) ;; *) status=1 ;; esac
    fi
    exit "$status"
fi
rounds=${KV_FAULT_ROUNDS:-5}
systems=${KV_FAULT_FS:-ext4 xfs btrfs}
RANDOM=${KV_TEST_SEED:-$$}
build=$PWD/build
of=${KV_FAULT_OF:-store disk manager}
client=$build/tests/store_client disk=$build/tests/disk_client manager=$build/tests/manager_client shim=$build/tests/fault_shim.so
uml=$(command -v linux.uml || command -v linux) || { echo 'fault.sh: be root, or install user-mode-linux (tools/setup.sh fault)' >&2; exit 1; }
work=$(mktemp -d "$build/fault-XXXXXX")
guest=
failed=0 passed=0

cut_power() { # the guest is a process group
    [ -z "$guest" ] || { kill -KILL -- "-$guest"; wait "$guest"; guest=; } 2>/dev/null
}
trap 'cut_power; rm -rf "$work"' EXIT

# boot FS LOG: run $work/job in a guest, the host's files read-only below it, the disk at /mnt/disk.
boot() {
    cat >"$work/init" <<SCRIPT
#!/bin/sh
mount -t proc proc /proc; mount -t tmpfs tmpfs /mnt && mkdir /mnt/disk && mount -t $1 /dev/ubda /mnt/disk && echo MOUNTED || echo 'BAD mount'
. $work/job
sync; umount /mnt/disk; echo DONE
halt -f
SCRIPT
    chmod +x "$work/init"; : >"$2"
    TMPDIR=$work setsid "$uml" mem=384M rootfstype=hostfs rootflags=/ ro init="$work/init" ubd0="$work/disk" con=null \
        con0=null,fd:1 quiet </dev/null >"$2" 2>&1 &
    guest=$!
}

# wait_for PATTERN LOG SECONDS
wait_for() {
    for ((tick = $3 * 20; tick > 0; tick--)); do
        grep -qE "$1" "$2" && return 0
        sleep 0.05
    done
    return 1
}

# one FS OPTIONS PRELOAD: write, cut, check. Prints what happened. 0: nothing lost, 1: something, 2: no test.
one() {
    local after=$((RANDOM % 5000 + 300)) acked
    rm -f "$work/disk"; truncate -s 1G "$work/disk"
    "mkfs.$1" "$work/disk" >"$work/mkfs" 2>&1 || { cat "$work/mkfs" >&2; return 2; }
    {
        echo "export $3"
        for writer in 1 2 3; do
            echo "$client write '/mnt/disk/kv$2' $writer 0 30 10 24000 1 &"
        done
        echo wait
    } >"$work/job"
    boot "$1" "$work/written"
    if ! wait_for '^ACK' "$work/written" 60; then
        cut_power; echo "BAD nothing was written"; tail -n 20 "$work/written" >&2; return 2
    fi
    sleep "$((after / 1000)).$(printf %03d $((after % 1000)))"
    cut_power
    tr -d '\r' <"$work/written" | grep -E '^(ACK|ERR)' >"$work/state"
    acked=$(grep -c '^ACK' "$work/state")
    {
        echo "$client check '/mnt/disk/kv$2' $work/state"
        echo "$client write '/mnt/disk/kv$2' 4 5 5 10 24000 1"
        echo "$client check '/mnt/disk/kv$2' $work/state"
    } >"$work/job"
    boot "$1" "$work/checked"
    wait_for '^DONE' "$work/checked" 120 || echo "BAD the second boot did not end" >>"$work/checked"
    cut_power
    echo "$1$2: cut after $after ms, $acked saves acknowledged; $(tr -d '\r' <"$work/checked" | grep -E '^(OK|FAILED)' | paste -sd';')"
    [ "$(tr -d '\r' <"$work/checked" | grep -c '^OK')" = 2 ] && [ "$(grep -c '^ACK 4' "$work/checked")" = 5 ]
}

# disk_one FS OPTIONS PRELOAD: likewise, of a disk tier. A slot is lost when its last line is an ACK and it isn't there.
disk_one() {
    local after=$((RANDOM % 5000 + 300)) acked
    rm -f "$work/disk"; truncate -s 1G "$work/disk"
    "mkfs.$1" "$work/disk" >"$work/mkfs" 2>&1 || { cat "$work/mkfs" >&2; return 2; }
    echo "export $3 $2; mkdir -p /mnt/disk/t; $disk write /mnt/disk/t 600 1 0 4" >"$work/job"
    boot "$1" "$work/written"
    if ! wait_for '^ACK' "$work/written" 60; then
        cut_power; echo "BAD nothing was written"; tail -n 20 "$work/written" >&2; return 2
    fi
    sleep "$((after / 1000)).$(printf %03d $((after % 1000)))"
    cut_power
    tr -d '\r' <"$work/written" | grep -E '^(BEGIN|ACK|ERR)' >"$work/state"
    acked=$(grep -c '^ACK' "$work/state")
    {
        echo "export KV_NOTHING= $2; mkdir -p /mnt/disk/t; $disk check /mnt/disk/t 600 $work/state; $disk write /mnt/disk/t 600 1000000 5 1"
    } >"$work/job"
    boot "$1" "$work/checked"
    wait_for '^DONE' "$work/checked" 120 || echo "BAD the second boot did not end" >>"$work/checked"
    cut_power
    echo "$1 disk tier $2: cut after $after ms, $acked blocks acknowledged; $(tr -d '\r' <"$work/checked" | grep -E '^(OK|FAILED)' | paste -sd';')"
    [ "$(tr -d '\r' <"$work/checked" | grep -c '^OK')" = 1 ] && [ "$(grep -c '^ACK' "$work/checked")" = 30 ]
}

# manager_one FS OPTIONS PRELOAD: likewise, of the disk tier of a manager that has room there for all. What it said to be on the disk
# (ON thread sequence block) must be served (HAVE sequence block), and all bytes be right.
manager_one() {
    local after=$((RANDOM % 5000 + 300)) said lost
    local tiers='KVBM_HOST_BYTES=192KiB KVBM_DISK=/mnt/disk/t KVBM_DISK_BYTES=3MiB'
    rm -f "$work/disk"; truncate -s 1G "$work/disk"
    "mkfs.$1" "$work/disk" >"$work/mkfs" 2>&1 || { cat "$work/mkfs" >&2; return 2; }
    echo "export $3 $2 $tiers; mkdir -p /mnt/disk/t; $manager write 40 4 $RANDOM" >"$work/job"
    boot "$1" "$work/written"
    if ! wait_for '^ON' "$work/written" 60; then
        cut_power; echo "BAD nothing was written"; tail -n 20 "$work/written" >&2; return 2
    fi
    sleep "$((after / 1000)).$(printf %03d $((after % 1000)))"
    cut_power
    tr -d '\r' <"$work/written" | sed -nE '$!s/^ON [0-9]+ ([0-9]+ [0-9]+)$/\1/p' | sort -u >"$work/state"
    said=$(wc -l <"$work/state")
    echo "export KV_NOTHING= $2 $tiers; mkdir -p /mnt/disk/t; $manager check 40" >"$work/job"
    boot "$1" "$work/checked"
    wait_for '^DONE' "$work/checked" 120 || echo "BAD the second boot did not end" >>"$work/checked"
    cut_power
    lost=$(tr -d '\r' <"$work/checked" | sed -n 's/^HAVE //p' | sort -u | comm -23 "$work/state" - | wc -l)
    echo "$1 manager $2: cut after $after ms, $said blocks said to be on the disk, $lost lost; $(tr -d '\r' <"$work/checked" | grep -E '^(OK|FAILED)')"
    grep -q '^OK .* wrong=0 ' "$work/checked" && ! grep -q '^WRONG' "$work/written" || return 2
    [ "$said" -gt 0 ] && [ "$lost" = 0 ]
}

# rounds_of ONE SYSTEM CONTROL: cuts of one kind on a file system, first without its barriers.
rounds_of() {
    local lost=0 options
    for ((try = 0; try < 3 && !lost; try++)); do
        "$1" "$2" '' "$3" >"$work/control"
        [ $? = 1 ] && lost=1
    done
    if [ "$lost" = 1 ]; then
        echo "ok     control $(cat "$work/control")"; passed=$((passed + 1))
    else
        echo "FAILED control: barriers taken away, and nothing lost: $(cat "$work/control")"; failed=$((failed + 1))
    fi
    for ((round = 0; round < rounds; round++)); do
        options=${more[$((round % ${#more[@]}))]}
        if "$1" "$2" "$options" KV_NOTHING= >"$work/result"; then
            echo "ok     $(cat "$work/result")"; passed=$((passed + 1))
        else
            echo "FAILED $(cat "$work/result")"; failed=$((failed + 1))
            tr -d '\r' <"$work/checked" | tail -n 25
        fi
    done
}

skipped="LD_PRELOAD=$shim KVF_DIR=/mnt/disk KVF_CALL=sync KVF_NTH=1 KVF_MORE=1 KVF_DO=skip"
for system in $systems; do
    case $of in *disk*) more=('' KVD_IO=threads KVD_BUFFERED=1); rounds_of disk_one "$system" "$skipped KVD_IO=threads" ;; esac
    case $of in *manager*) more=('' KVBM_IO=threads KVBM_DISK_BUFFERED=yes); rounds_of manager_one "$system" "$skipped KVBM_IO=threads" ;; esac
    case $of in *store*) more=('' '?sync=fs' '?sync=files'); rounds_of one "$system" "$skipped" ;; esac
done
echo "$passed passed, $failed failed"
[ "$failed" = 0 ] && [ "$passed" -gt 0 ]
