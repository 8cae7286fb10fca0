#!/busybox sh
# /init of the guest: load modules, mount the shared folders, bring up one RDMA device, then run what the host asks for.
# ip and tc are named in full because busybox has its own, which know less. The kernel's command line carries: shares (number), rdma_ip, loss (percent, optional).
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/tmp LANG=C.UTF-8
B=/busybox
$B mount -t proc proc /proc
$B mount -t sysfs sysfs /sys
$B mount -t devtmpfs dev /dev
$B mkdir -p /dev/shm /dev/pts
for dir in /dev/shm /tmp /run; do $B mount -t tmpfs tmpfs $dir; done
while read -r module; do $B insmod "/modules/$module" || echo "insmod $module failed"; done < /modules/order

option() { $B sed -n "s/.*\b$1=\([^ ]*\).*/\1/p" /proc/cmdline; }

share=0
while read -r path; do
    $B mkdir -p "$path"
    $B mount -t 9p -o trans=virtio,version=9p2000.L,ro,msize=512000,cache=loose "share$share" "$path" || echo "no $path"
    share=$((share + 1))
done < /shares

/usr/sbin/ip link set lo up
nic=$(ls /sys/class/net | grep -v '^lo$' | head -n 1)
if [ -z "$nic" ]; then # no wire to another guest: both ends of the link are here
    /usr/sbin/ip link add rdma0 type veth peer name rdma1
    /usr/sbin/ip link set rdma1 up
    nic=rdma0
fi
/usr/sbin/ip addr add "$(option rdma_ip)/24" dev "$nic"
/usr/sbin/ip link set "$nic" up
[ -n "$(option loss)" ] && /usr/sbin/tc qdisc add dev "$nic" root netem loss "$(option loss)%"
rdma link add rxe0 type rxe netdev "$nic"

# One request per line: a word, then the command in base64. The answer: output, then a line of the word and the status.
port=$(echo /dev/vport*p1)
exec 3<> "$port"
echo "ready $(cut -d' ' -f1 /proc/uptime)" >&3
while IFS=' ' read -r word command <&3; do
    echo "$command" | base64 -d > /run/command
    /bin/bash /run/command >&3 2>&1 < /dev/null
    printf '\n%s %s\n' "$word" "$?" >&3
done
$B poweroff -f
