//! What any bytes from a guest may do to us: nothing but be refused.

use proptest::prelude::*;

use super::*;

const GIB: u64 = 1 << 30;
const RAM: [Range; 2] = [Range { start: 0, len: GIB }, Range { start: 4 * GIB, len: GIB / 2 }];

/// A header as the module writes it, at `gpa`.
fn header(gpa: u64) -> [u8; HEADER_BYTES] {
    let mut b = [0u8; HEADER_BYTES];
    b[..16].copy_from_slice(&MAGIC);
    let mut put = |at: usize, v: &[u8]| b[at..at + v.len()].copy_from_slice(v);
    put(16, &VERSION.to_le_bytes());
    put(20, &(HEADER_BYTES as u32).to_le_bytes());
    put(24, &gpa.to_le_bytes());
    put(40, &77u64.to_le_bytes());
    put(64, &12u32.to_le_bytes());
    put(72, &(64 * MAP_PFNS).to_le_bytes());
    put(80, &(6u32 << 16 | 12 << 8).to_le_bytes());
    put(88, b"0.1.0");
    put(128, &2u32.to_le_bytes());
    put(136, &100u32.to_le_bytes());
    put(192, &5u64.to_le_bytes());
    put(200, &beat_check(5, 77).to_le_bytes());
    put(264, &0x5000u64.to_le_bytes());
    put(272, &1u32.to_le_bytes());
    seal(&mut b);
    b
}

fn seal(b: &mut [u8; HEADER_BYTES]) {
    let fixed: [u8; STATIC_BYTES] = b[..STATIC_BYTES].try_into().unwrap();
    b[32..40].copy_from_slice(&checksum(&fixed).to_le_bytes());
}

fn extents(next: u64, list: &[(u64, u32, u32)]) -> [u8; 4096] {
    let mut page = [0u8; 4096];
    page[..8].copy_from_slice(&next.to_le_bytes());
    page[8..12].copy_from_slice(&(list.len() as u32).to_le_bytes());
    for (i, (gpa, first, pages)) in list.iter().enumerate().take(255) {
        let at = 16 + 16 * i;
        page[at..at + 8].copy_from_slice(&gpa.to_le_bytes());
        page[at + 8..at + 12].copy_from_slice(&first.to_le_bytes());
        page[at + 12..at + 16].copy_from_slice(&pages.to_le_bytes());
    }
    page
}

fn layout(list: &[(u64, u32, u32)]) -> Result<Layout, Bad> {
    let h = Header::parse(&header(0x3000), 0x3000).unwrap();
    Layout::collect(&h, &RAM, |gpa| (gpa == 0x5000).then(|| extents(0, list)))
}

#[test]
fn a_good_header_is_read() {
    let h = Header::parse(&header(0x3000), 0x3000).unwrap();
    assert_eq!((h.linux().as_str(), h.module_version.as_str()), ("6.12", "0.1.0"));
    assert_eq!((h.live.state, h.live.tick_ms, h.key), (GuestState::Running, 100, 77));
    assert!(h.live.beats_right(h.key));
}

#[test]
fn each_lie_in_the_static_part_is_found() {
    let with = |at: usize, bytes: &[u8]| {
        let mut b = header(0x3000);
        b[at..at + bytes.len()].copy_from_slice(bytes);
        seal(&mut b);
        Header::parse(&b, 0x3000).unwrap_err()
    };
    assert_eq!(with(0, &[0]), Bad::Wrong("no magic"));
    assert_eq!(with(16, &[2]), Bad::Version(2));
    assert_eq!(with(20, &u32::MAX.to_le_bytes()), Bad::Wrong("impossible size"));
    assert_eq!(with(20, &[0, 0]), Bad::Wrong("impossible size"));
    assert_eq!(with(64, &[13]), Bad::Wrong("impossible page size"));
    assert_eq!(with(68, &[11]), Bad::Wrong("impossible order"));
    assert_eq!(with(72, &u64::MAX.to_le_bytes()), Bad::Wrong("impossible pfn limit"));
    let elsewhere = Header::parse(&header(0x3000), 0x4000);
    assert_eq!(elsewhere, Err(Bad::Wrong("its address is another one")));
    let mut b = header(0x3000);
    b[50] ^= 1;
    assert_eq!(Header::parse(&b, 0x3000), Err(Bad::Wrong("wrong checksum")));
}

#[test]
fn extents_are_clipped_to_ram_and_refused_when_they_lie() {
    let good = layout(&[(0x10_0000, 0, 8), (0x20_0000, 32, 4)]).unwrap();
    assert_eq!(good.pages.len(), 12);
    assert_eq!(good.pages[8], MapPage { pfn: 32 * MAP_PFNS, gpa: 0x20_0000 });
    // Sections between the two ranges of RAM are nobody's.
    assert_eq!(layout(&[(0x10_0000, 8, 8)]).unwrap().pages, []);
    for (list, why) in [
        (&[(GIB, 0, 1)][..], Bad::Wrong("a map page outside of RAM")),
        (&[(GIB - 4096, 0, 2)], Bad::Wrong("a map page outside of RAM")),
        (&[(u64::MAX - 4095, 0, 2)], Bad::Wrong("a map page outside of RAM")),
        (&[(0x10_0001, 0, 1)], Bad::Wrong("a map page outside of RAM")),
        (&[(0x10_0000, 0, 0)], Bad::Wrong("too many map pages")),
        (&[(0x10_0000, 0, u32::MAX)], Bad::Wrong("too many map pages")),
        (&[(0x10_0000, u32::MAX, 1)], Bad::Wrong("impossible extent beyond the pfn limit")),
        (&[(0x10_0000, 0, 2), (0x20_0000, 1, 2)], Bad::Wrong("overlapping extents")),
        (&[(0x10_0000, 0, 2), (0x10_1000, 4, 1)], Bad::Wrong("overlapping map pages")),
        (&[(0x10_0000, 0, 8); 200], Bad::Wrong("overlapping extents")),
    ] {
        assert_eq!(layout(list), Err(why), "{list:?}");
    }
}

#[test]
fn a_ring_of_extents_ends() {
    let mut b = header(0x3000);
    b[272..276].copy_from_slice(&64u32.to_le_bytes());
    let h = Header::parse(&b, 0x3000).unwrap();
    let mut reads = 0;
    let found = Layout::collect(&h, &RAM, |_| {
        reads += 1;
        Some(extents(0x5000, &[]))
    });
    assert_eq!((found.unwrap().pages.len(), reads), (0, 64));
    b[272..276].copy_from_slice(&65u32.to_le_bytes());
    let h = Header::parse(&b, 0x3000).unwrap();
    assert_eq!(Layout::collect(&h, &RAM, |_| None), Err(Bad::Wrong("too many extent pages")));
}

#[test]
fn facts_are_read_between_two_writes_only() {
    let mut b = [0u8; FACTS_BYTES];
    b[0..4].copy_from_slice(&4u32.to_le_bytes());
    b[4..8].copy_from_slice(&3u32.to_le_bytes());
    for i in 0..32 {
        b[8 + 8 * i..16 + 8 * i].copy_from_slice(&(i as u64 + 1).to_le_bytes());
    }
    let facts = Facts::parse(&b, 4).unwrap();
    assert_eq!((facts.time_ns, facts.total, facts.free, facts.available), (1, 2, 3, 0));
    assert_eq!(Facts::parse(&b, 5), None);
    b[0] = 5;
    assert_eq!(Facts::parse(&b, 5), None);
}

proptest! {
    #[test]
    fn any_bytes_are_a_header_or_refused(
        patch in prop::collection::vec((0..HEADER_BYTES, any::<u8>()), 0..40),
        sealed in any::<bool>(),
    ) {
        let mut b = header(0x3000);
        for (at, v) in patch {
            b[at] = v;
        }
        if sealed {
            seal(&mut b);
        }
        if let Ok(h) = Header::parse(&b, 0x3000) {
            prop_assert!(h.live.tick_ms <= TICK_MS_MAX);
            let read = |_| Some(extents(0x5000, &[(0x10_0000, 0, 8)]));
            let _ = Layout::collect(&h, &RAM, read);
        }
    }

    #[test]
    fn any_extents_give_pages_inside_ram_each_once(
        list in prop::collection::vec(
            (0..3u64 << 19, 0..70u32, prop_oneof![0..20u32, any::<u32>()]), 0..20),
        raw in prop::collection::vec(any::<u8>(), 4096),
        use_raw in any::<bool>(),
    ) {
        let list: Vec<_> = list.into_iter().map(|(p, f, n)| (p * 4096, f, n)).collect();
        let h = Header::parse(&header(0x3000), 0x3000).unwrap();
        let page: [u8; 4096] = if use_raw { raw.try_into().unwrap() } else { extents(0, &list) };
        if let Ok(l) = Layout::collect(&h, &RAM, |_| Some(page)) {
            prop_assert!(l.pages.len() as u64 <= sections(&RAM));
            prop_assert!(l.pages.windows(2).all(|w| w[0].pfn < w[1].pfn));
            for p in &l.pages {
                prop_assert!(RAM.iter().any(|r| r.holds(p.gpa, PAGE)));
                prop_assert!(p.pfn % MAP_PFNS == 0 && p.pfn < h.pfn_limit);
            }
        }
    }

    #[test]
    fn runs_say_the_same_as_bits(words in prop::collection::vec(any::<u64>(), 0..8)) {
        let bit = |i: usize| words[i / 64] >> (i % 64) & 1 == 1;
        let mut seen = vec![0u64; words.len()];
        let mut last_end = 0;
        for (first, len) in runs(&words) {
            prop_assert!(len > 0 && (first == 0 || first > last_end || last_end == 0));
            prop_assert!((first..first + len).all(bit));
            prop_assert!(all_set(&words, first, len) && !all_set(&words, first, len + 1));
            fill(&mut seen, first, len, true);
            last_end = first + len;
        }
        prop_assert_eq!(&seen, &words);
        for (first, len) in runs(&words).collect::<Vec<_>>() {
            fill(&mut seen, first, len, false);
        }
        prop_assert_eq!(count(&seen), 0);
    }
}
