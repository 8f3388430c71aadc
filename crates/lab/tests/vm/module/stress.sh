# Loops until /tmp/go is gone: what moves pages about, besides `verify`.
mkdir -p /tmp/s; touch /tmp/go
# Processes that go first when there is no memory left: this script goes on.
weak() { echo 1000 > /proc/self/oom_score_adj; exec "$@"; }
hog() { ( weak dd if=/dev/zero of=/dev/null bs=$1 count=1 ) }
movable() { for m in /sys/devices/system/memory/memory*; do
	case "$(cat $m/valid_zones)" in Movable*) echo $m; break;; esac; done; }
# Memory in pieces: every other file goes, and what is left lies between holes.
pieces() { for i in 1 2 3 4 5 6; do weak dd if=/dev/zero of=/tmp/s/h$i bs=4k count=$1 & done; wait
	rm -f /tmp/s/h1 /tmp/s/h3 /tmp/s/h5; }
case "$1" in
all)
	( while [ -f /tmp/go ]; do pieces 9000; rm -f /tmp/s/h*; done ) &
	( while [ -f /tmp/go ]; do hog 80M; done ) &
	( while [ -f /tmp/go ]; do echo 220 > /proc/sys/vm/nr_hugepages
		echo 0 > /proc/sys/vm/nr_hugepages; done ) &
	( while [ -f /tmp/go ]; do echo 1 > /proc/sys/vm/compact_memory
		echo 3 > /proc/sys/vm/drop_caches; sleep 0.2; done ) &
	( while [ -f /tmp/go ]; do for i in 1 2 3 4 5 6 7 8; do ls -l /bin & done; wait; done ) &
	( n=0; while [ -f /tmp/go ]; do m=$(movable); echo offline > $m/state && n=$((n+1))
		echo online_movable > $m/state; echo $n > /tmp/offlined; sleep 0.5; done ) &
	wait; touch /tmp/ended ;;
huge)	# compaction on behalf of huge pages, which are then held
	pieces 22000; echo 300 > /proc/sys/vm/nr_hugepages ;;
compact)
	pieces 22000; echo 1 > /proc/sys/vm/compact_memory ;;
steal)	# movable blocks with holes of single pages; `Guest::stress` goes on
	pieces 26000 ;;
offline)
	echo offline > $(movable)/state ;;
soft)
	for a in 8 9 a b c d e f; do
		echo 0x1${a}000000 > /sys/devices/system/memory/soft_offline_page; done ;;
report)
	pieces 22000; rm -f /tmp/s/h*; sleep 8 ;;
fill)
	pieces 15000; rm -f /tmp/s/h* ;;
cpus)	# memory and loopback at work, while CPUs come and go
	ifconfig lo 127.0.0.1 up
	( while [ -f /tmp/go ]; do weak nc -l -p 99 > /dev/null; done ) &
	( while [ -f /tmp/go ]; do weak dd if=/dev/zero bs=64k count=200 | nc 127.0.0.1 99; done ) &
	( while [ -f /tmp/go ]; do pieces 4000; rm -f /tmp/s/h*; done ) &
	( while [ -f /tmp/go ]; do for i in 1 2 3 4; do ls -l /bin & done; wait; done ) &
	wait ;;
esac
