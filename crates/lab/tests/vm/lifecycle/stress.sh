# What a kernel does with memory, all of it at once, until /tmp/go is gone.
# /tmp/n has a file of each kind with how often it was done.
mkdir -p /tmp/s /tmp/n; touch /tmp/go
while_going() { # NAME: the function of that name, again and again
	( n=0; while [ -f /tmp/go ]; do "$1" && n=$((n+1)); echo $n > /tmp/n.$1; mv /tmp/n.$1 /tmp/n/$1; done ) & }

# Bulk allocation in files, in pieces: every other one goes first.
pieces() {
	for i in 1 2 3 4 5 6; do dd if=/dev/zero of=/tmp/s/h$i bs=4k count=$PIECES & done; wait
	rm -f /tmp/s/h1 /tmp/s/h3 /tmp/s/h5; rm -f /tmp/s/h*; }
# Memory of a process, the first to go when there is none left.
hog() { ( echo 1000 > /proc/self/oom_score_adj; exec dd if=/dev/zero of=/dev/null bs=80M count=1 ); }
hugetlb() { echo $HUGE > /proc/sys/vm/nr_hugepages; got=$(cat /proc/sys/vm/nr_hugepages)
	echo 0 > /proc/sys/vm/nr_hugepages; [ $got -gt 0 ]; }
compact() { echo 1 > /proc/sys/vm/compact_memory; sleep 0.2; }
# The disk is read through the page cache, which is then dropped.
cache() { md5sum /dev/vda > /tmp/s/disk; cmp -s /tmp/s/disk /tmp/disk || touch /tmp/wrong
	echo 3 > /proc/sys/vm/drop_caches; }
forks() { for i in 1 2 3 4 5 6 7 8; do ls -l /bin & done; wait; }
# A block of movable memory goes and comes back: the first that can. The kernel tries for
# as long as no signal comes.
hotplug() { for m in /sys/devices/system/memory/memory*; do
		case "$(cat $m/valid_zones)" in Movable*) ;; *) continue;; esac
		timeout 5 sh -c "echo offline > $m/state"; went=$?; echo online_movable > $m/state
		[ $went = 0 ] && break; done
	sleep 0.5; [ $went = 0 ]; }
# A compressed disk, whose table is allocated in bulk, without any tracepoint.
bulk() { echo 1 > /sys/block/zram1/reset; echo 4G > /sys/block/zram1/disksize
	dd if=/bin/busybox of=/dev/zram1 bs=64k; dd if=/dev/zram1 bs=64k count=16 > /tmp/s/z
	dd if=/bin/busybox bs=64k count=16 | cmp - /tmp/s/z || touch /tmp/wrong; rm -f /tmp/s/z; }

md5sum /dev/vda > /tmp/disk
for kind in pieces hog hugetlb compact cache forks hotplug bulk; do while_going $kind; done
wait
