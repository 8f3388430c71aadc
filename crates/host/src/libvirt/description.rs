//! What a domain's XML says of its balloon and of memory that is plugged.
//!
//! A user who may define the domain wrote the XML. libvirt has checked all of it but the metadata,
//! which `metadata.rs` reads. Elements of any name may be in there, so only the domain's own devices
//! count.

use serde_json::{Value, json};

use crate::qmp_balloon::{DEFLATE_ON_OOM, INTERVAL, REPORTING};

/// Most elements read of one description.
const MOST_NODES: u32 = 50_000;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Description {
    /// `None`: the domain has none that can be set.
    pub balloon: Option<Balloon>,
    /// `None`: it has no such device.
    pub virtio_mem: Option<VirtioMem>,
    /// Other memory devices that are no RAM (NVDIMM, virtio-pmem), KiB. libvirt counts them in the
    /// domain's maximum, and QEMU in nothing of the balloon's.
    pub no_ram: u64,
}

/// All devices of virtio-mem together, in KiB.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VirtioMem {
    /// What may be plugged at most. libvirt counts this in the domain's maximum.
    pub most: u64,
    /// What is plugged. libvirt counts this in `balloon.current`, and nowhere else in the balloon's
    /// size.
    pub plugged: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Balloon {
    /// Its device's name in QEMU.
    pub alias: String,
    reporting: bool,
    deflate_on_oom: bool,
    /// Seconds between QEMU's questions to the guest; 0: none.
    pub period: u64,
}

impl Description {
    pub fn of(xml: &str) -> Result<Description, String> {
        let options = roxmltree::ParsingOptions { nodes_limit: MOST_NODES, ..Default::default() };
        let all = roxmltree::Document::parse_with_options(xml, options);
        let all = all.map_err(|e| format!("its description is no XML that Ebb reads: {e}"))?;
        // Those of no namespace, at which `has_tag_name` does not look.
        let lists = |n: &roxmltree::Node<'_, '_>| n.tag_name() == "devices".into();
        let devices = all.root_element().children().filter(lists).flat_map(|d| d.children());
        let mut found = Description::default();
        for node in devices.filter(|n| n.tag_name().namespace().is_none()) {
            match node.tag_name().name() {
                "memballoon" => found.balloon = Balloon::of(node),
                "memory" => {
                    let kib = |name| {
                        let child = node.descendants().find(|n| n.has_tag_name(name));
                        child.and_then(|n| n.text()?.trim().parse::<u64>().ok()).unwrap_or(0)
                    };
                    match node.attribute("model") {
                        Some("virtio-mem") => {
                            let all = found.virtio_mem.get_or_insert_default();
                            all.most = all.most.saturating_add(kib("size"));
                            all.plugged = all.plugged.saturating_add(kib("current"));
                        }
                        Some("dimm") | None => {}
                        Some(_) => found.no_ram = found.no_ram.saturating_add(kib("size")),
                    }
                }
                _ => {}
            }
        }
        Ok(found)
    }
}

impl Balloon {
    fn of(balloon: roxmltree::Node<'_, '_>) -> Option<Balloon> {
        if !balloon.attribute("model").is_some_and(|m| m.starts_with("virtio")) {
            return None;
        }
        let child = |name| balloon.children().find(move |c| c.has_tag_name(name));
        let alias = child("alias").and_then(|a| a.attribute("name")).unwrap_or("balloon0");
        let period = child("stats").and_then(|s| s.attribute("period")?.parse().ok());
        Some(Balloon {
            alias: alias.to_owned(),
            reporting: balloon.attribute("freePageReporting") == Some("on"),
            deflate_on_oom: balloon.attribute("autodeflate") == Some("on"),
            period: period.unwrap_or(0),
        })
    }

    pub fn property(&self, name: &str) -> Option<Value> {
        match name {
            REPORTING => Some(json!(self.reporting)),
            DEFLATE_ON_OOM => Some(json!(self.deflate_on_oom)),
            INTERVAL => Some(json!(self.period)),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn domain(balloon: &str) -> String {
        format!("<domain type='kvm'><name>a</name><devices><disk/>{balloon}</devices></domain>")
    }

    #[test]
    fn a_balloon_is_what_its_element_says() {
        let xml = domain(
            "<memballoon model='virtio-transitional' autodeflate='on' freePageReporting='on'>\
             <stats period='5'/><alias name='ua-b'/></memballoon>",
        );
        let balloon = |xml: &str| Description::of(xml).unwrap().balloon;
        let b = balloon(&xml).unwrap();
        assert_eq!((b.alias.as_str(), b.period), ("ua-b", 5));
        assert_eq!(b.property(REPORTING), Some(json!(true)));
        assert_eq!(b.property(DEFLATE_ON_OOM), Some(json!(true)));
        let b = balloon(&domain("<memballoon model='virtio'/>")).unwrap();
        assert_eq!((b.alias.as_str(), b.property(INTERVAL)), ("balloon0", Some(json!(0))));
        assert_eq!(b.property(DEFLATE_ON_OOM), Some(json!(false)));
        assert_eq!(balloon(&domain("<memballoon model='none'/>")), None);
        assert_eq!(Description::of(&domain("")), Ok(Description::default()));
        assert!(Description::of("<domain>").is_err());
        assert!(Description::of(&"<a>".repeat(100_000)).is_err(), "bounded");
    }

    #[test]
    fn devices_of_virtio_mem_are_summed_and_dimms_left_out() {
        let device = |model, size, current| {
            format!(
                "<memory model='{model}'><target><size unit='KiB'>{size}</size>\
                 <requested unit='KiB'>7</requested>{current}</target></memory>"
            )
        };
        let all = device("virtio-mem", 1024, "<current unit='KiB'>512</current>")
            + &device("dimm", 4096, "")
            + &device("virtio-mem", 256, "");
        let found = Description::of(&domain(&all)).unwrap().virtio_mem;
        assert_eq!(found, Some(VirtioMem { most: 1280, plugged: 512 }));
        let dimm = Description::of(&domain(&device("dimm", 1, ""))).unwrap();
        assert_eq!((dimm.virtio_mem, dimm.no_ram), (None, 0));
        let others = device("nvdimm", 4096, "") + &device("virtio-pmem", 1024, "");
        assert_eq!(Description::of(&domain(&others)).unwrap().no_ram, 5120);
    }

    /// libvirt does not check it: who may define a domain writes there what they like.
    #[test]
    fn what_metadata_calls_devices_is_none() {
        let memory = "<memory model='virtio-mem'><target><size>9</size><current>9</current>\
                      </target></memory><memory model='nvdimm'><size>9</size></memory>\
                      <memballoon model='none'/>";
        let its = "<devices><memballoon model='virtio'/>";
        for (parent, devices, memory) in [
            ("metadata", "x:devices xmlns:x='urn:x'", memory.replace('<', "<x:")),
            ("metadata", "x:devices xmlns:x='urn:x'", memory.to_owned()),
            ("metadata", "devices", memory.to_owned()),
            ("devices", "x:devices xmlns:x='urn:x'", memory.to_owned()),
        ] {
            let memory = memory.replace("<x:/", "</x:");
            let end = devices.split(' ').next().unwrap();
            let hostile = format!("<{devices}>{memory}</{end}>");
            let xml = match parent {
                "devices" => format!("<domain>{its}{hostile}</devices></domain>"),
                _ => {
                    let metadata = format!("<{parent}><a>{hostile}</a>{hostile}</{parent}>");
                    format!("<domain>{metadata}{its}</devices>{metadata}</domain>")
                }
            };
            let found = Description::of(&xml).unwrap();
            assert_eq!((found.virtio_mem, found.no_ram), (None, 0), "{xml}");
            assert!(found.balloon.is_some(), "{xml}");
        }
        let root = "<x:devices xmlns:x='urn:x'><memory model='nvdimm'><size>9</size></memory>";
        let found = Description::of(&format!("<domain>{root}</x:devices></domain>"));
        assert_eq!(found, Ok(Description::default()));
    }
}
