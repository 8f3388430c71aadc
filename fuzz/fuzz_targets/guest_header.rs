//! What a guest shows of its map: header, extents and facts of any bytes. What is
//! accepted lies in RAM, each page once and no more pages than RAM can need.
#![no_main]

use ebb_core::range::Range;
use ebb_core::wire::abi::{self, FACTS_BYTES, Facts, HEADER_BYTES, Header, Layout, MAP_PFNS, PAGE};
use libfuzzer_sys::fuzz_target;

const GPA: u64 = 0x1_0000;

fn array<const N: usize>(data: &[u8]) -> [u8; N] {
    let mut all = [0; N];
    let n = data.len().min(N);
    all[..n].copy_from_slice(&data[..n]);
    all
}

/// What no fuzzer guesses: magic, version, size, address and checksum.
fn mend(header: &mut [u8; HEADER_BYTES]) {
    header[..16].copy_from_slice(&abi::MAGIC);
    header[16..20].copy_from_slice(&abi::VERSION.to_le_bytes());
    header[20..24].copy_from_slice(&(HEADER_BYTES as u32).to_le_bytes());
    header[24..32].copy_from_slice(&GPA.to_le_bytes());
    header[64..68].copy_from_slice(&12u32.to_le_bytes());
    let fixed = array(&header[..abi::STATIC_BYTES]);
    header[32..40].copy_from_slice(&abi::checksum(&fixed).to_le_bytes());
}

fuzz_target!(|data: &[u8]| {
    let Some((first, data)) = data.split_first() else { return };
    let mut bytes: [u8; HEADER_BYTES] = array(data);
    if first & 1 == 0 {
        mend(&mut bytes);
    }
    let facts: [u8; FACTS_BYTES] = array(&bytes[abi::FACTS_AT as usize..]);
    let _ = Facts::parse(&facts, u32::from_le_bytes(array(&facts)));
    let Ok(header) = Header::parse(&bytes, GPA) else { return };
    assert!(header.module_version.len() <= 24);
    let ram = match first >> 1 & 3 {
        0 => vec![Range { start: 0, len: 64 << 20 }],
        1 => vec![Range { start: 0, len: 3 << 30 }, Range { start: 4 << 30, len: 1 << 40 }],
        2 => vec![Range { start: 0, len: 16 << 20 }, Range { start: 17 << 20, len: 4096 }],
        _ => vec![Range { start: 0, len: u64::MAX & !0xfff }],
    };
    // Pages of extents: what is left of the input, by address.
    let rest = data.get(HEADER_BYTES..).unwrap_or_default();
    let mut reads = 0;
    let read = |gpa: u64| {
        reads += 1;
        let at = (gpa / PAGE % 4) as usize * 64;
        Some(array(rest.get(at..).unwrap_or_default()))
    };
    let layout = Layout::collect(&header, &ram, read);
    assert!(reads <= abi::EXTENT_PAGES_MAX);
    let Ok(layout) = layout else { return };
    let holds = |gpa| ram.iter().any(|r| r.holds(gpa, PAGE));
    assert!(layout.pages.iter().all(|p| p.gpa % PAGE == 0 && p.pfn % MAP_PFNS == 0));
    assert!(layout.pages.iter().all(|p| holds(p.gpa) && p.pfn < header.pfn_limit));
    assert!(layout.pages.windows(2).all(|w| w[0].pfn < w[1].pfn));
    let need: u64 = ram.iter().map(|r| r.len / (MAP_PFNS * PAGE) + 2).sum();
    assert!(layout.pages.len() as u64 <= need);
});
