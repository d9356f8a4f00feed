#!/bin/bash
# load-module.sh NAME [PARAMETER=VALUE...]: load a module that came with the lab. Parameters are
# those of the kernel command line (MODULE.PARAMETER=VALUE), then those given.
file=/lab/$1.ko name=${1//-/_}
shift
for w in $(</proc/cmdline); do
    case $w in "$name".*) set -- "${w#*.}" "$@" ;; esac
done
modprobe -a $(modinfo -F depends "$file" | tr , ' ' | sed 's/\b\(rtrs\|rnbd\)[a-z_]*//g') 2>/dev/null
exec insmod "$file" "$@"
