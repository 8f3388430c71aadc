/* SPDX-License-Identifier: GPL-2.0 WITH Linux-syscall-note OR MIT */
/*
 * What a guest with ebb.ko shows its host: one header page, and behind it a
 * map with one bit for each 4 KiB page.
 *
 *	bit set  =>  the page is in the buddy allocator now
 *
 * All of it lies in ordinary guest memory, little-endian, naturally aligned;
 * every address is guest-physical.  The header page is in ZONE_DMA: the host
 * looks for EBB_MAGIC at the start of the first EBB_SEARCH_PAGES pages.  To the
 * host this is hostile input: copy it once, check it, bound it.
 *
 * Is it alive?  RAM outlives a reset, so a header may be the picture of one, and
 * its pages somebody else's by now.  Several pages may carry the magic.  So:
 *   1. static part: checksum, self_gpa, version, sizes, limits.
 *   2. beat: watch it grow, twice, each time with beat_check == ebb_beat_check().
 *      A picture does not.  Until then write nothing into the page.
 *   3. challenge: write a random number other than 0 with one 8-byte store; the
 *      module answers response = ebb_response(challenge, key) if and while it is
 *      EBB_RUNNING.  The first answer takes up to tick_ms, further ones up to
 *      EBB_CHALLENGED_MS (guest running time), as long as a challenge changes at
 *      least every 10 s.  Both words belong to the host's current epoch only.
 * Beats come about ten times a second from a guest at work.  An idle one is not
 * woken for that: between two of its beats there are up to tick_ms, never more
 * (guest running time; tick_ms is EBB_TICK_MS).
 * `challenge` is the only word that the host ever writes.  A paused guest
 * neither beats nor answers and cannot have been reset unnoticed either: the
 * last answer stays good until the guest runs or is reset.
 *
 * Order.  The guest clears a page's bit, visible to all, before anybody can
 * write to the page.  (One exception, which cannot be seen: a page taken by
 * compaction capture may be filled with *zeroes* before its bits are cleared.
 * A page that is discarded reads as zeroes as well, so nothing is lost; a host
 * that would bring back anything but zeroes must not use the map.)  The host
 *   1. reads the map, chooses runs, 2. makes them inaccessible to writes,
 *   3. reads their bits again, 4. THEN reads `state` and `generation` again,
 *   5. discards only pages whose bits were still set in 3, and nothing at all
 *      unless 4 said EBB_RUNNING and the generation of the extents it used,
 *   6. lifts the protection.
 * Step 4 after step 3 is what makes unloading safe: the module leaves
 * EBB_RUNNING before it gives its map pages back, so bits read from a page that
 * is no map any more are never acted upon, however slow the host is.
 *
 * Stop: state leaves EBB_RUNNING (one store), SETs end, the map is cleared; on
 * unload the magic is wiped, and then pages are freed.  EBB_QUIET may go back to
 * EBB_RUNNING (hibernation cancelled, a CPU that came or went); EBB_STOPPED does
 * not.
 */
#ifndef EBB_ABI_H
#define EBB_ABI_H

#include <linux/types.h>

/* Read as 16 bytes at the start of a page. */
#define EBB_MAGIC { 0xeb, 0xb1, 0x66, 0x72, 0x65, 0x65, 0x6d, 0x61, \
		    0x70, 0x9d, 0x1c, 0x40, 0xd3, 0x7a, 0x05, 0xf4 }
#define EBB_ABI_VERSION		1
#define EBB_SEARCH_PAGES	4096	/* 16 MiB, ZONE_DMA */
#define EBB_PAGE_SIZE		4096
#define EBB_PAGE_SHIFT		12
#define EBB_MAP_PFNS		32768	/* bits in one map page: 128 MiB */

/* Limits; more is a lie. */
#define EBB_EXTENT_PAGES_MAX	64
#define EBB_EXTENTS_A_PAGE	255
#define EBB_EXTENT_LEN_MAX	(1u << 20)	/* map pages in all: 128 TiB */

#define EBB_TICK_MS		500
#define EBB_CHALLENGED_MS	20

enum ebb_state {
	EBB_STARTING	= 1,	/* hooks are being armed, first scan: do not use */
	EBB_RUNNING	= 2,	/* the map holds */
	EBB_QUIET	= 3,	/* cleared, not recording: sleep, a CPU comes or goes */
	EBB_STOPPED	= 4,	/* cleared, for good: unload, reboot, kexec, panic */
};

enum ebb_reason {
	EBB_WHY_NONE	= 0,
	EBB_WHY_UNLOAD	= 1,
	EBB_WHY_REBOOT	= 2,	/* reboot, halt, kexec */
	EBB_WHY_PANIC	= 3,
	EBB_WHY_SLEEP	= 4,	/* hibernation, suspend, restore */
	EBB_WHY_BROKEN	= 5,	/* the module found its own map wrong */
	EBB_WHY_CPU	= 6,	/* a CPU comes or goes */
};

/* ebb_header.features */
#define EBB_FEATURE_FAULTS	(1u << 0)	/* a test build that may lie */

/*
 * A run of map pages that follow each other in guest-physical memory.  Page k
 * of it holds the bits of pfns (first + k) * EBB_MAP_PFNS and following; pfn p
 * is bit p % 64 of 64-bit word p / 64 % 512.
 */
struct ebb_extent {
	__u64 gpa;		/* of its first map page, page-aligned */
	__u32 first;		/* in units of EBB_MAP_PFNS pfns */
	__u32 pages;		/* map pages, at least 1 */
};

struct ebb_extent_page {
	__u64 next;		/* gpa of the next one, 0: none */
	__u32 count;		/* extents in this page */
	__u32 zero;
	struct ebb_extent extent[EBB_EXTENTS_A_PAGE];
};

/* What the guest counts since load; pages unless it says otherwise. */
struct ebb_stats {
	__u64 set;		/* by hooks */
	__u64 cleared;		/* by hooks */
	__u64 repaired;		/* missed by hooks, set by a scan or a hint */
	__u64 late;		/* cleared late, by the backstop */
	__u64 suspect;		/* set and not free, found and cleared by a scan */
	__u64 hints;		/* large frees noted for a second look, in calls */
	__u64 hints_lost;	/* of them, without a place in the ring */
	__u64 scans;		/* full passes of the re-scan */
	__u64 scan_pages;	/* pages looked at by scans */
	__u64 scan_hold_ns;	/* longest time a scan held a zone lock */
	__u64 uncovered;	/* pages without a place in the map */
	__u64 drains;		/* of per-CPU lists, in calls */
	__u64 leaked;		/* late ones that no capture explains: see EBB_WHY_BROKEN */
	__u64 reserved[3];
};

/* Guest facts: read seq, the rest, seq; odd or changed: again. Sizes in pages. */
struct ebb_facts {
	__u32 seq;
	__u32 fields;		/* u64 fields that are filled, in this order */
	__u64 time_ns;		/* boot time clock when they were taken */
	__u64 total;
	__u64 free;
	__u64 available;
	__u64 cached;		/* page cache without buffers */
	__u64 buffers;
	__u64 shmem;
	__u64 anon;
	__u64 slab_reclaimable;
	__u64 swap_free;
	/* counters since boot */
	__u64 alloc;		/* pages allocated */
	__u64 freed;
	__u64 alloc_stall;	/* events: a task went into direct reclaim */
	__u64 scan_direct;	/* pages looked at by direct reclaim */
	__u64 steal_direct;	/* pages reclaimed by it */
	__u64 scan_kswapd;
	__u64 steal_kswapd;
	__u64 refault_anon;
	__u64 refault_file;
	__u64 oom_kill;
	__u64 swap_in;
	__u64 swap_out;
	__u64 major_fault;
	__u64 compact_stall;
	__u64 reserved[8];
};

struct ebb_header {
	/* Static: written once, under the checksum. */
	__u8  magic[16];
	__u32 version;
	__u32 size;		/* sizeof(struct ebb_header) */
	__u64 self_gpa;		/* of this page */
	__u64 checksum;		/* ebb_checksum() of the static part, itself 0 */
	__u64 key;		/* random, for beat and challenge */
	__u8  instance[16];	/* random: another boot or load, another one */
	__u32 page_shift;
	__u32 order;		/* smallest block recorded; set bits come in such */
	__u64 pfn_limit;	/* no pfn from here on will ever be covered */
	__u32 linux_version;	/* KERNEL_VERSION(a, b, 0) */
	__u32 features;
	__u8  module_version[24];
	__u64 kept_gpa;		/* a page that this kernel never writes to; 0: none */
	__u8  reserved0[8];

	/* 128: the state word, and why it is not EBB_RUNNING. */
	__u32 state;
	__u32 reason;
	__u32 tick_ms;		/* longest time between two beats of a running guest */
	__u32 facts_ms;		/* longest time between two updates of facts and stats */
	__u8  reserved1[48];

	/* 192: signs of life. */
	__u64 beat;
	__u64 beat_check;	/* ebb_beat_check(beat, key) */
	__u64 challenge;	/* the host's */
	__u64 response;
	__u8  reserved2[32];

	/* 256: where the map is.  Extents are only ever added, at the end. */
	__u64 generation;	/* odd while extents change */
	__u64 extents_gpa;	/* first struct ebb_extent_page */
	__u32 extent_pages;
	__u32 map_pages;	/* in all extents */
	__u8  reserved3[40];

	struct ebb_stats stats;	/* 320; plain counters, may be torn by a tick */
	__u8  reserved4[64];
	struct ebb_facts facts;	/* 512 */
};

#define EBB_STATIC_BYTES	128

static inline __u64 ebb_mix(__u64 x)
{
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
	x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
	return x ^ (x >> 31);
}

static inline __u64 ebb_beat_check(__u64 beat, __u64 key)
{
	return ebb_mix(beat + key);
}

static inline __u64 ebb_response(__u64 challenge, __u64 key)
{
	return ebb_mix(~challenge ^ key);
}

/* FNV-1a, 64 bits, of the static part with zero for the checksum's bytes. */
static inline __u64 ebb_checksum(const struct ebb_header *h)
{
	const __u8 *p = (const __u8 *)h;
	__u64 sum = 0xcbf29ce484222325ull;
	unsigned int i;

	for (i = 0; i < EBB_STATIC_BYTES; i++)
		sum = (sum ^ (i >= 32 && i < 40 ? 0 : p[i])) * 0x100000001b3ull;
	return sum;
}

#define EBB_AT(type, field, at) \
	_Static_assert(__builtin_offsetof(struct type, field) == (at), #type "." #field)

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the ABI is little-endian"
#endif
_Static_assert(sizeof(struct ebb_extent) == 16, "ebb_extent");
_Static_assert(sizeof(struct ebb_extent_page) == EBB_PAGE_SIZE, "ebb_extent_page");
_Static_assert(sizeof(struct ebb_stats) == 128, "ebb_stats");
_Static_assert(sizeof(struct ebb_facts) == 264, "ebb_facts");
_Static_assert(sizeof(struct ebb_header) == 776, "ebb_header");
EBB_AT(ebb_extent, first, 8);
EBB_AT(ebb_extent_page, extent, 16);
EBB_AT(ebb_facts, time_ns, 8);
EBB_AT(ebb_facts, alloc, 88);
EBB_AT(ebb_facts, compact_stall, 192);
EBB_AT(ebb_header, version, 16);
EBB_AT(ebb_header, self_gpa, 24);
EBB_AT(ebb_header, checksum, 32);
EBB_AT(ebb_header, key, 40);
EBB_AT(ebb_header, instance, 48);
EBB_AT(ebb_header, page_shift, 64);
EBB_AT(ebb_header, pfn_limit, 72);
EBB_AT(ebb_header, linux_version, 80);
EBB_AT(ebb_header, module_version, 88);
EBB_AT(ebb_header, kept_gpa, 112);
EBB_AT(ebb_header, state, EBB_STATIC_BYTES);
EBB_AT(ebb_header, beat, 192);
EBB_AT(ebb_header, challenge, 208);
EBB_AT(ebb_header, generation, 256);
EBB_AT(ebb_header, extents_gpa, 264);
EBB_AT(ebb_header, extent_pages, 272);
EBB_AT(ebb_header, stats, 320);
EBB_AT(ebb_header, facts, 512);

#undef EBB_AT
#endif /* EBB_ABI_H */
