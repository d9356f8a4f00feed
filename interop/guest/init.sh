#!/bin/bash
# Process 1 of a lab guest after switch_root. Takes its settings from the
# kernel command line (lab.*), brings the network and the asked modules up,
# then keeps the command agent running.
export PATH=/lab:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export HOME=/root LC_ALL=C TERM=vt100
mkdir -p /dev/pts /dev/shm
mount -t devpts -o mode=620,ptmxmode=666 devpts /dev/pts
mount -t tmpfs -o mode=1777 shm /dev/shm
mount -t tmpfs -o mode=1777 tmp /tmp
mount -t tmpfs -o mode=755 run /run
mount -t debugfs debugfs /sys/kernel/debug 2>/dev/null
mount -t tracefs tracefs /sys/kernel/tracing 2>/dev/null

name=guest nics=0 modes= mtu=1500
declare -A opt
for w in $(</proc/cmdline); do
    case $w in
        lab.*=*) k=${w%%=*}; opt[${k#lab.}]=${w#*=} ;;
    esac
done
name=${opt[name]:-guest} nics=${opt[nics]:-1} modes=${opt[mode]:-none} mtu=${opt[mtu]:-1500}
hostname "$name"
ip link set lo up

# All virtio parts in one go; names are fixed by MAC order (eth0, eth1).
modprobe -a virtio_net af_packet 2>/dev/null
sysctl() { printf %s "$2" > "/proc/sys/${1//.//}" 2>/dev/null; }
sysctl net.ipv6.conf.all.accept_ra 0
sysctl net.ipv6.conf.default.accept_ra 0
sysctl net.ipv6.conf.default.accept_dad 0
sysctl net.ipv6.conf.default.router_solicitations 0
# two addresses of one host on two wires: answer only for the wire's own address
sysctl net.ipv4.conf.all.arp_ignore 1
sysctl net.ipv4.conf.all.arp_announce 2
sysctl kernel.panic 1
sysctl kernel.core_pattern /tmp/core.%e.%p
for ((i = 0; i < nics; i++)); do
    d=eth$i
    sysctl net.ipv6.conf.$d.accept_ra 0
    sysctl net.ipv6.conf.$d.accept_dad 0
    sysctl net.ipv6.conf.$d.router_solicitations 0
    ip link set $d mtu "$mtu"
    ip link set $d up
    for a in ${opt[ip$i]//,/ }; do
        case $a in *:*) ip -6 addr add "$a" dev $d nodad ;; *) ip addr add "$a" dev $d ;; esac
    done
done
if [ "${opt[offload]}" = 0 ]; then
    for ((i = 0; i < nics; i++)); do
        ethtool -K eth$i tx off rx off tso off gso off gro off >/dev/null 2>&1
    done
fi

want() { case ,$modes, in *,"$1",*) return 0 ;; esac; return 1; }
want rds && modprobe rds
want rds-tcp && modprobe rds_tcp
if want rxe || [ "${opt[modules]}" ]; then
    modprobe -a ib_core ib_uverbs rdma_ucm ib_cm rdma_cm rdma_rxe
    for ((i = 0; i < nics; i++)); do
        rdma link add rxe$i type rxe netdev eth$i || echo "lab: rxe$i on eth$i failed"
    done
fi
for m in ${opt[modules]//,/ }; do
    load-module.sh "$m" || echo "lab: loading $m failed"
done
echo "lab: ready at $(cut -d' ' -f1 /proc/uptime) s: $name mode=$modes"

# The shell stays process 1 so that orphans are reaped; the agent is restarted
# should it ever die.
while :; do
    python3 -S -E /lab/agent.py
    echo "lab: agent ended with $?"
    sleep 1
done
